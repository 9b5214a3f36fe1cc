"""Stop strings are cut exactly, however the text arrives; settings refuse what they cannot mean; and requests from a file."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app import cli
from conftest import write_model
from generate import Model, generate, load_draft
from request import Request, Result, Settings, StopStrings, read_requests
from test_generate import run

TEXT = st.text(alphabet="ab", max_size=30)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[a:b] for a, b in zip(bounds, bounds[1:])]


@given(TEXT, STOPS, st.lists(st.integers(0, 30), max_size=12))
def test_a_stream_is_cut_before_the_stop_string_that_is_complete_first(text, stops, cuts):
    cutter = StopStrings(stops)
    out = "".join(cutter.feed(piece) for piece in pieces_of(text, cuts)) + cutter.held
    prefixes = [
        text[:n] for n in range(len(text) + 1) if any(text[:n].endswith(stop) for stop in stops)
    ]
    assert cutter.found == bool(prefixes)
    whole = min((text.find(stop) for stop in stops if stop in text), default=len(text))
    if not prefixes:
        assert out == text
    else:  # several in one piece: the one that begins first
        assert not any(stop in out for stop in stops) and text.startswith(out) and len(out) >= whole


@given(TEXT, STOPS)
def test_letter_by_letter_and_at_once_cut_at_a_stop_string_and_show_all_before_it(text, stops):
    cutter = StopStrings(stops)
    out = "".join(map(cutter.feed, text)) + cutter.held
    ends = [n for n in range(len(text) + 1) if any(text[:n].endswith(stop) for stop in stops)]
    if ends:
        first = text[: ends[0]]
        assert out == first[: min(first.find(stop) for stop in stops if stop in first)]
    else:
        assert out == text


def test_nothing_that_may_begin_a_stop_string_is_shown_early():
    cutter = StopStrings(["<end>"])
    assert cutter.feed("so <en") == "so " and cutter.feed("ough") == "<enough"
    assert cutter.feed("<end") == "" and cutter.feed(">more") == "" and cutter.found
    assert cutter.feed("still more") == "" and cutter.held == ""


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(temperature=-1.0), "temperature is -1.0"),
        (dict(temperature=float("nan")), "temperature is nan"),
        (dict(temperature=float("inf")), "temperature is inf"),
        (dict(top_k=-1), "top_k is -1"),
        (dict(top_k=1.5), "top_k is 1.5"),
        (dict(top_p=0.0), "top_p is 0.0"),
        (dict(top_p=1.1), "top_p is 1.1"),
        (dict(min_p=-0.1), "min_p is -0.1"),
        (dict(min_p=2.0), "min_p is 2.0"),
        (dict(max_tokens=0), "max_tokens is 0"),
        (dict(seed=2**63), "seed is"),
        (dict(stop=("",)), r"stop is \('',\)"),
        (dict(stop=(3,)), r"stop is \(3,\)"),
        (dict(max_tokens=2.5), "max_tokens is 2.5"),
        (dict(seed="x"), "seed is 'x'"),
        (dict(seed=True), "seed is True"),
        (dict(max_tokens=True), "max_tokens is True"),
        (dict(gamma=False), "gamma is False"),
    ],
)
def test_settings_name_what_they_refuse(settings, message):
    with pytest.raises(ValueError, match=message):
        Settings(**settings)


def test_a_rate_needs_two_tokens():
    result = Result("p", [1], 0, tokens=[5], first=0.5, total=0.5)
    assert result.to_dict()["stats"]["tokens_per_second"] is None
    result.tokens, result.total = [5, 6, 7], 1.5
    assert result.to_dict()["stats"]["tokens_per_second"] == 2.0
    result.total = result.first  # all in the first round: drafts that stood
    assert (
        result.to_dict()["stats"]["tokens_per_second"] is None
        and "tokens/s" not in result.summary()
    )


# ---- Requests from a file: what each line asks for, and every way it can be wrong


@pytest.fixture(scope="module")
def model(instruct) -> Model:
    return Model.load(instruct, "cpu", torch.float64)


def test_a_line_has_the_settings_it_names_and_the_rest_are_the_command_lines(model):
    lines = [
        '{"prompt": "hello", "temperature": 0.5, "top_k": 3, "seed": 9, "max_tokens": 7, "stop": "x", "gamma": 2}',
        "",
        "  ",
        '{"prompt": "hello", "raw": true, "gamma": "auto", "stop": ["a", "b"]}',
        '{"prompt": [{"role": "user", "content": "hello"}], "system": null, "temperature": null}',
    ]
    defaults = Settings(temperature=0.9, top_p=0.8, seed=4, max_tokens=11, gamma=3, stop=("z",))
    numbers, _, (first, second, third) = zip(*read_requests(lines, model, defaults, None))
    assert numbers == (1, 4, 5) and first.settings == Settings(0.5, 3, 0.8, None, 9, 7, ("x",), 2)
    assert second.settings == Settings(0.9, None, 0.8, None, 4, 11, ("a", "b"), None)
    assert second.tokens == model.tokenizer.prompt("hello")
    assert (
        third.tokens == first.tokens == model.tokenizer.chat([{"role": "user", "content": "hello"}])
        and third.settings.temperature == 0.9
    )
    lines = [
        '{"prompt": "hello"}',
        '{"prompt": "hello", "system": "be brief"}',
        '{"prompt": "hello", "system": null}',
    ]
    *_, requests = zip(*read_requests(lines, model, defaults, None, "be long"))
    assert [request.tokens for request in requests] == [
        model.encode("hello", system) for system in ("be long", "be brief", None)
    ]


@pytest.mark.parametrize(
    "line, says",
    [
        ("nonsense", "must be a JSON object"),
        ("[1]", 'there is no "prompt"'),
        ('{"text": "x"}', 'there is no "prompt"'),
        ('{"prompt": 3}', "prompt is 3"),
        (
            '{"prompt": "x", "temprature": 1}',
            "'temprature' is unknown here: a line may have prompt, id",
        ),
        ('{"prompt": "x", "top_p": 7}', "top_p is 7"),
        ('{"prompt": "x", "temperature": "hot"}', "temperature is 'hot'"),
        ('{"prompt": "x", "max_tokens": 0}', "max_tokens is 0"),
        ('{"prompt": "x", "gamma": -2}', "gamma is -2"),
        ('{"prompt": "x", "seed": "y"}', "seed is 'y'"),
        ('{"prompt": "", "raw": true}', "the prompt has 0 tokens"),
        ('{"prompt": "%s"}' % ("x" * 200), "the prompt has"),
        ('{"prompt": [{"role": "user"}]}', "content"),
        ('{"prompt": "x", "stop": [3]}', "stop is [3]: it must be a text, or a list of texts"),
        ('{"prompt": "x", "stop": 3}', "stop is 3: it must be a text, or a list of texts"),
        ('{"prompt": "x", "stop": {"a": 1}}', "stop is {'a': 1}"),
        ('{"prompt": "x", "raw": "false"}', "raw is 'false': it must be true or false"),
        ('{"prompt": "x", "raw": true, "chat": true}', "chat and raw are both true"),
        ('{"prompt": "x", "system": 3}', "system is 3: it must be a text"),
        ('{"prompt": "x", "seed": true}', "seed is True"),
        ('{"prompt": null}', "prompt is None"),
        ('{"prompt": "x", "id": NaN}', "must be a JSON object"),
        ('{"prompt": "x", "id": 1e999}', "must be a JSON object"),
        ('{"prompt": "x", "seed": %s}' % ("9" * 5000), "must be a JSON object"),
        ('{"prompt": "x", "prompt": "y"}', "a name stands twice"),
        ("[" * 100_000, "must be a JSON object"),
        ('{"a":' * 100_000, "must be a JSON object"),
    ],
)
def test_a_bad_line_is_an_error_and_the_others_are_not(model, line, says):
    _, _, (bad, good) = zip(
        *read_requests([line, '{"prompt": "hello"}'], model, Settings(seed=1, max_tokens=5), None)
    )
    assert isinstance(bad, ValueError) and says in str(bad) and isinstance(good, Request)


def test_a_file_of_prompts_from_the_shell(base, tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    asked = [
        dict(prompt="Once upon", seed=i, max_tokens=3 + 5 * (i % 3), id=f"no {i}") for i in range(7)
    ]
    file.write_text(
        "\n".join([*map(json.dumps, asked), "oops", '{"prompt": "x", "max_tokens": -1}'])
    )
    common = ("--target", base, "--temperature", "1", "--dtype", "float64")
    status, out, err = run(capsys, "--prompts", file, *common, "--max-batch", "3")
    results = {r["index"]: r for r in map(json.loads, out.splitlines())}
    assert (
        status == 1
        and sorted(results) == list(range(9))
        and "line 8 is left out: Expecting value" in err
        and "line 9 is left out: max_tokens is -1" in err
    )
    assert "keys and values: " in err and "2 bad lines" in err
    for i, line in enumerate(asked):
        _, alone, _ = run(
            capsys,
            line["prompt"],
            *common,
            "--seed",
            i,
            "--max-tokens",
            line["max_tokens"],
            "--json",
            "--kv",
            "contiguous",
        )
        alone = json.loads(alone)
        assert (
            results[i]["tokens"] == alone["tokens"]
            and results[i]["text"] == alone["text"]
            and results[i]["id"] == f"no {i}"
        )
        assert results[i]["stats"]["seconds_queued"] >= 0 and results[i]["finish_reason"] in (
            "length",
            "stop",
        )
    assert results[7]["finish_reason"] == "error" and "JSON" in results[7]["error"]
    file.write_text(json.dumps(asked[0]))
    assert run(capsys, "--prompts", file, *common)[0] == 0


def test_what_a_line_cannot_have_is_refused_or_told(base, tmp_path, capsys):
    """γ without drafts; a seed beside a γ that goes by the clock, unless the mode is coupled."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"prompt": "ab", "gamma": 2}\n{"prompt": "ab", "seed": 1, "max_tokens": 4}\n{"prompt": "a", "seed": 2}'
    )
    status, out, err = run(capsys, "--prompts", file, "--target", base, "--max-tokens", "3")
    assert (
        status == 1
        and "line 1 is left out: gamma is about drafted tokens" in err
        and "by the clock" not in err
    )
    status, out, err = run(
        capsys, "--prompts", file, "--target", base, "--max-tokens", "3", "--draft", "ngram"
    )
    assert status == 0 and err.count("goes by the clock") == 1 and "line 2 has a seed" in err
    for sure in (("--verify", "coupled"), ("--gamma", "1")):
        assert (
            "by the clock"
            not in run(
                capsys,
                "--prompts",
                file,
                "--target",
                base,
                "--max-tokens",
                "3",
                "--draft",
                "ngram",
                *sure,
            )[2]
        )


def test_a_request_that_memory_cannot_hold_is_refused_alone(base, tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "%s"}\n{"prompt": "ab", "max_tokens": 4}' % ("x" * 60))
    status, out, err = run(
        capsys, "--prompts", file, "--target", base, "--kv-memory", str(32 * 2 * 2 * 2 * 6 * 4)
    )  # 32 tokens, in float32
    results = {r["index"]: r for r in map(json.loads, out.splitlines())}
    assert (
        status == 1
        and "2 blocks of 16 tokens" in err
        and "the prompt has 60 tokens" in results[0]["error"]
        and len(results[1]["tokens"]) == 4
    )


def test_a_line_ends_where_a_line_ends_and_all_that_is_in_it_comes_back(base, tmp_path, capsys):
    """A byte order mark, ends of lines of Windows, other ends of lines inside a text, and half a surrogate pair, in JSON again."""
    file, ids = tmp_path / "prompts.jsonl", ["a\u2028b\x85c", "\ud800", "\udfff", "é😀"]
    lines = [
        json.dumps(
            dict(prompt=f"{id}x", id=id, max_tokens=1),
            ensure_ascii=id.startswith(("\ud800", "\udfff")),
        )
        for id in ids
    ]
    file.write_bytes(
        b"\xef\xbb\xbf"
        + "\r\n".join([*lines, '{"prompt": 3, "id": "%s"}' % ("y" * 2000), ""]).encode()
    )
    status, out, err = run(capsys, "--prompts", file, "--target", base)
    results = [json.loads(line) for line in out.split("\n")[:-1]]
    assert (
        status == 1
        and {r["id"]: r["prompt"] for r in results}
        == {id: f"{id}x" for id in ids} | {"y" * 2000: 3}
        and "line 5 is left out: prompt is 3" in err
    )


def test_ctrl_c_while_a_result_is_told_leaves_what_there_is_of_the_others(
    base, tmp_path, capsys, monkeypatch
):
    file, say = tmp_path / "prompts.jsonl", cli.say
    file.write_text(
        "".join(json.dumps(dict(prompt="Tom", max_tokens=2 + 9 * i)) + "\n" for i in range(4))
    )

    def interrupted(message):
        say(message)
        if message.startswith("1 of"):
            raise KeyboardInterrupt

    monkeypatch.setattr(cli, "say", interrupted)
    status, out, _ = run(
        capsys,
        "--prompts",
        file,
        "--target",
        base,
        "--max-batch",
        "3",
        "--seed",
        "1",
        "--temperature",
        "1",
    )
    results = sorted(map(json.loads, out.splitlines()), key=lambda r: r["index"])
    assert (
        status == 130
        and [r["finish_reason"] for r in results] == ["length"] + ["interrupted"] * 3
        and [len(r["tokens"]) for r in results] == [2, 2, 2, 0]
    )


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--prompts", "/no/such/file"], "--prompts /no/such/file cannot be read"),
        (["--prompts", "x", "prompt"], "leave out the prompt"),
        (["--prompts", "x", "--n", "2"], "leave out the prompt"),
        (["--prompts", "x", "--no-cache"], "--no-cache keeps nothing"),
        (["x", "--kv", "tree"], "invalid choice: 'tree'"),
        (["x", "--kv-memory", "0"], "memory for keys and values is 0.0"),
        (["x", "--kv-memory", "-1"], "memory for keys and values is -1.0"),
        (["x", "--kv-memory", "100"], "does not hold a block"),
        (["x", "--kv", "contiguous", "--kv-memory", "0.5"], "are about the paged cache"),
        (["x", "--max-batch", "0"], "--max-batch is 0"),
        (["x", "--kv", "contiguous", "--no-prefix-cache"], "are about the paged cache"),
        (["x", "--no-cache", "--no-prefix-cache"], "--no-cache keeps nothing"),
    ],
)
def test_bad_flags_of_batches(base, capsys, arguments, says):
    status, out, err = run(capsys, *arguments, "--target", base)
    assert (
        (status, out) == (2, "")
        and err.startswith("error: ")
        and err.count("\n") == 1
        and says in err
    )


@pytest.mark.parametrize(
    "draft, verify", [("model", "exact"), ("model", "coupled"), ("self", "exact")]
)
def test_everything_at_once(base, tmp_path, capsys, draft, verify):
    """9 mixed requests with drafts, INT8 weights, an INT8 cache and shared beginnings: each gets the tokens that it gets alone."""
    beginning, file = "There was a little dog. ", tmp_path / "prompts.jsonl"
    asked = [
        dict(
            prompt=beginning * (i % 3) + "and " * (i % 4) + "then",
            seed=i,
            gamma=1 + i % 3,
            max_tokens=3 + 2 * (i % 5),
            temperature=(0, 1, 0.7)[i % 3],
            top_k=(0, 9)[i % 2],
        )
        for i in range(9)
    ]
    file.write_text("\n".join(map(json.dumps, asked)))
    draft = (
        str(write_model(tmp_path / "draft", seed=5, num_hidden_layers=1))
        if draft == "model"
        else draft
    )
    flags = (
        "--target",
        base,
        "--draft",
        draft,
        "--verify",
        verify,
        "--dtype",
        "float64",
        "--bits",
        "8",
        "--kv-bits",
        "8",
        "--max-batch",
        "5",
    )
    status, out, _ = run(capsys, "--prompts", file, *flags)
    results = {r["index"]: r for r in map(json.loads, out.splitlines())}
    assert status == 0 and len(results) == 9
    model = Model.load(base, "cpu", torch.float64, 8)
    helper = load_draft(draft, model, torch.float64)
    for i, line in enumerate(asked):
        alone = generate(
            target=model, draft=helper, verify=verify, kv="contiguous", kv_bits=8, **line
        )
        assert results[i]["tokens"] == alone["tokens"]
