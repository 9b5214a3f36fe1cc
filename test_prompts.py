"""Requests from a file: what each line asks for, and every way it can be wrong."""
import json

import pytest
import torch

import generate as cli
from conftest import write_model
from pretrained import Model
from prompts import read_requests
from request import Settings
from test_generate import run


@pytest.fixture(scope="module")
def model(instruct) -> Model:
    return Model.load(instruct, "cpu", torch.float64)


def test_a_line_has_the_settings_it_names_and_the_rest_are_the_command_lines(model):
    lines = ['{"prompt": "hello", "temperature": 0.5, "top_k": 3, "seed": 9, "max_tokens": 7, "stop": "x", "gamma": 2}', "", "  ",
             '{"prompt": "hello", "raw": true, "gamma": "auto", "stop": ["a", "b"]}',
             '{"prompt": [{"role": "user", "content": "hello"}], "system": null, "temperature": null}']
    defaults = Settings(temperature=0.9, top_p=0.8, seed=4, max_tokens=11, gamma=3, stop=("z",))
    first, second, third = read_requests(lines, model, defaults, None)
    assert first.request.settings == Settings(0.5, 3, 0.8, None, 9, 7, ("x",), 2) and (first.index, first.number) == (0, 1)
    assert second.request.settings == Settings(0.9, None, 0.8, None, 4, 11, ("a", "b"), None) and (second.index, second.number) == (1, 4)
    assert second.request.tokens == model.tokenizer.prompt("hello")
    assert third.request.tokens == first.request.tokens == model.tokenizer.chat([{"role": "user", "content": "hello"}]) and third.request.settings.temperature == 0.9


@pytest.mark.parametrize("line, says", [
    ("nonsense", "this is not JSON"), ("[1]", 'there is no "prompt"'), ('{"text": "x"}', 'there is no "prompt"'), ('{"prompt": 3}', "prompt is 3"),
    ('{"prompt": "x", "temprature": 1}', "'temprature' is unknown here: a line may have prompt, id"), ('{"prompt": "x", "top_p": 7}', "top_p is 7"),
    ('{"prompt": "x", "temperature": "hot"}', "temperature is 'hot'"), ('{"prompt": "x", "max_tokens": 0}', "max_tokens is 0"),
    ('{"prompt": "x", "gamma": -2}', "gamma is -2"), ('{"prompt": "x", "seed": "y"}', "seed is 'y'"), ('{"prompt": "", "raw": true}', "the prompt is empty"),
    ('{"prompt": "%s"}' % ("x" * 200), "the prompt has"), ('{"prompt": [{"role": "user"}]}', "content"), ('{"prompt": "x", "stop": [3]}', "a stop string is 3"),
    ('{"prompt": "x", "stop": 3}', "stop is 3: it must be a text, or a list of texts"), ('{"prompt": "x", "stop": {"a": 1}}', "stop is {'a': 1}"),
    ('{"prompt": "x", "raw": "false"}', "raw is 'false': it must be true or false"), ('{"prompt": "x", "raw": true, "chat": true}', "chat and raw are both true"),
    ('{"prompt": "x", "system": 3}', "system is 3: it must be a text"), ('{"prompt": "x", "seed": true}', "seed is True"), ('{"prompt": null}', "prompt is None"),
    ('{"prompt": "x", "id": NaN}', "this is not JSON"), ('{"prompt": "x", "id": 1e999}', "this is not JSON"), ('{"prompt": "x", "seed": %s}' % ("9" * 5000), "this is not JSON"),
    ('{"prompt": "x", "prompt": "y"}', "a name stands twice"), ("[" * 100_000, "this is not JSON"), ('{"a":' * 100_000, "this is not JSON")])
def test_a_bad_line_is_an_error_and_the_others_are_not(model, line, says):
    bad, good = read_requests([line, '{"prompt": "hello"}'], model, Settings(seed=1, max_tokens=5), None)
    assert bad.request is None and says in bad.error and good.request is not None and good.index == 1


def test_a_file_of_prompts_from_the_shell(base, tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    asked = [dict(prompt="Once upon", seed=i, max_tokens=3 + 5 * (i % 3), id=f"no {i}") for i in range(7)]
    file.write_text("\n".join([*map(json.dumps, asked), "oops", '{"prompt": "x", "max_tokens": -1}']))
    common = ("--target", base, "--temperature", "1", "--dtype", "float64")
    status, out, err = run(capsys, "--prompts", file, *common, "--max-batch", "3")
    results = {r["index"]: r for r in map(json.loads, out.splitlines())}
    assert status == 1 and sorted(results) == list(range(9)) and "line 8 is left out: this is not JSON" in err and "line 9 is left out: max_tokens is -1" in err
    assert "keys and values: " in err and "2 bad lines" in err
    for i, line in enumerate(asked):
        _, alone, _ = run(capsys, line["prompt"], *common, "--seed", i, "--max-tokens", line["max_tokens"], "--json", "--kv", "contiguous")
        alone = json.loads(alone)
        assert results[i]["tokens"] == alone["tokens"] and results[i]["text"] == alone["text"] and results[i]["id"] == f"no {i}"
        assert results[i]["stats"]["seconds_queued"] >= 0 and results[i]["finish_reason"] in ("length", "stop")
    assert results[7]["finish_reason"] == "error" and "JSON" in results[7]["error"]
    file.write_text(json.dumps(asked[0]))
    assert run(capsys, "--prompts", file, *common)[0] == 0


def test_a_request_that_memory_cannot_hold_is_refused_alone(base, tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "%s"}\n{"prompt": "ab", "max_tokens": 4}' % ("x" * 60))
    status, out, err = run(capsys, "--prompts", file, "--target", base, "--kv-memory", str(32 * 2 * 2 * 2 * 6 * 4))      # 32 tokens, in float32
    results = {r["index"]: r for r in map(json.loads, out.splitlines())}
    assert status == 1 and "2 blocks of 16 tokens" in err and "the prompt has 60 tokens" in results[0]["error"] and len(results[1]["tokens"]) == 4


def test_a_line_ends_where_a_line_ends_and_all_that_is_in_it_comes_back(base, tmp_path, capsys):
    """A byte order mark, ends of lines of Windows, other ends of lines inside a text, and half a surrogate pair, in JSON again."""
    file, ids = tmp_path / "prompts.jsonl", ["a\u2028b\x85c", "\ud800", "\udfff", "é😀"]
    lines = [json.dumps(dict(prompt=f"{id}x", id=id, max_tokens=1), ensure_ascii=id.startswith(("\ud800", "\udfff"))) for id in ids]
    file.write_bytes(b"\xef\xbb\xbf" + "\r\n".join([*lines, '{"prompt": 3, "id": "%s"}' % ("y" * 2000), ""]).encode())
    status, out, err = run(capsys, "--prompts", file, "--target", base)
    results = [json.loads(line) for line in out.split("\n")[:-1]]
    assert status == 1 and {r["id"]: r["prompt"] for r in results} == {id: f"{id}x" for id in ids} | {"y" * 2000: 3} and "line 5 is left out: prompt is 3" in err


def test_ctrl_c_while_a_result_is_told_leaves_what_there_is_of_the_others(base, tmp_path, capsys, monkeypatch):
    file, say = tmp_path / "prompts.jsonl", cli.say
    file.write_text("".join(json.dumps(dict(prompt="Tom", max_tokens=2 + 9 * i)) + "\n" for i in range(4)))

    def interrupted(message):
        say(message)
        if message.startswith("1 of"):
            raise KeyboardInterrupt
    monkeypatch.setattr(cli, "say", interrupted)
    status, out, _ = run(capsys, "--prompts", file, "--target", base, "--max-batch", "3", "--seed", "1", "--temperature", "1")
    results = sorted(map(json.loads, out.splitlines()), key=lambda r: r["index"])
    assert status == 130 and [r["finish_reason"] for r in results] == ["length"] + ["interrupted"] * 3 and [len(r["tokens"]) for r in results] == [2, 2, 2, 0]


@pytest.mark.parametrize("arguments, says", [
    (["--prompts", "/no/such/file"], "--prompts /no/such/file cannot be read"), (["--prompts", "x", "prompt"], "leave out the prompt"),
    (["--prompts", "x", "--n", "2"], "leave out the prompt"), (["--prompts", "x", "--no-cache"], "--no-cache keeps nothing"),
    (["x", "--kv", "tree"], "invalid choice: 'tree'"), (["x", "--kv-memory", "0"], "memory for keys and values is 0.0"),
    (["x", "--kv-memory", "-1"], "memory for keys and values is -1.0"), (["x", "--kv-memory", "100"], "does not hold a block"),
    (["x", "--kv", "contiguous", "--kv-memory", "0.5"], "are about the paged cache"), (["x", "--max-batch", "0"], "--max-batch is 0"),
    (["x", "--kv", "contiguous", "--no-prefix-cache"], "are about the paged cache"), (["x", "--no-cache", "--no-prefix-cache"], "--no-cache keeps nothing")])
def test_bad_flags_of_batches(base, capsys, arguments, says):
    status, out, err = run(capsys, *arguments, "--target", base)
    assert (status, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1 and says in err


@pytest.mark.parametrize("draft, verify", [("model", "exact"), ("model", "coupled"), ("self", "exact")])
def test_everything_at_once(base, tmp_path, capsys, draft, verify):
    """16 mixed requests with drafts, INT8 weights, an INT8 cache and shared beginnings: each gets the tokens that it gets alone."""
    beginning, file = "There was a little dog. ", tmp_path / "prompts.jsonl"
    asked = [dict(prompt=beginning * (i % 3) + "and " * (i % 4) + "then", seed=i, gamma=1 + i % 3, max_tokens=4 + 3 * (i % 5), temperature=(0, 1, 0.7)[i % 3], top_k=(0, 9)[i % 2])
             for i in range(16)]
    file.write_text("\n".join(map(json.dumps, asked)))
    common = ("--target", base, "--draft", write_model(tmp_path / "draft", seed=5, num_hidden_layers=1) if draft == "model" else "self", "--verify", verify, "--dtype", "float64", "--bits", "8", "--kv-bits", "8")
    status, out, _ = run(capsys, "--prompts", file, *common, "--max-batch", "5")
    results = {r["index"]: r for r in map(json.loads, out.splitlines())}
    assert status == 0 and len(results) == 16
    for i, line in enumerate(asked):
        flags = [part for name in ("seed", "gamma", "max_tokens", "temperature", "top_k") for part in (f"--{name.replace('_', '-')}", line[name])]
        _, alone, _ = run(capsys, line["prompt"], *common, *flags, "--json", "--kv", "contiguous")
        assert results[i]["tokens"] == json.loads(alone)["tokens"]
