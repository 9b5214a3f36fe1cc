"""`generate`: exact texts and ends. The engine: twins, stop strings, Ctrl-C. Folders: their settings, and damage."""

import json
import math
import os
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file

from app.test_cli import PROMPT, run
from conftest import CHATML, peak, write_model
from generate import Engine, Model, generate
from kernels import Ops
from request import Request, Settings, Writer

# ---- A text


@pytest.mark.parametrize(
    "settings",
    [
        dict(temperature=0),
        dict(temperature=1.0),
        dict(temperature=0.7, top_k=20, top_p=0.9, min_p=0.02),
    ],
)
def test_the_same_seed_gives_the_same_text_with_and_without_a_cache(base, settings):
    model = Model.load(base, "cpu", torch.float64)
    a, b = (
        generate(PROMPT, model, seed=7, max_tokens=20, use_cache=cached, **settings)
        for cached in (True, False)
    )
    assert a["tokens"] == b["tokens"] and a["text"] == b["text"] and len(a["tokens"]) > 1
    if settings["temperature"]:
        assert generate(PROMPT, model, seed=8, max_tokens=20, **settings)["tokens"] != a["tokens"]


def test_greedy_is_the_argmax_of_the_plain_forward_pass(base):
    model = Model.load(base, "cpu", torch.float64)
    result = generate(PROMPT, model, temperature=0, max_tokens=30)
    text = result["prompt_tokens"]
    for token in result["tokens"]:
        # 259 and 260 are padding: no token of the tokenizer's
        assert token == int(model.llama(torch.tensor(text))[-1, :259].argmax())
        text = text + [token]


def test_every_position_has_its_own_noise(base, monkeypatch):
    """With a flat distribution, what is drawn is the noise itself."""
    monkeypatch.setattr(
        Ops,
        "probabilities",
        lambda self, logits, *settings: torch.full_like(logits, 1 / logits.shape[-1]),
    )
    model = Model.load(base, "cpu", torch.float64)
    model.ends = set()
    texts = [generate(PROMPT, model, seed=seed, max_tokens=60)["tokens"] for seed in (1, 2)]
    assert all(len(set(text)) > 40 for text in texts) and sum(a == b for a, b in zip(*texts)) < 6


def test_a_long_prompt_is_read_in_chunks_with_the_same_result(base, monkeypatch):
    model = Model.load(base, "cpu", torch.float64)
    whole = generate("a long prompt " * 4, model, seed=1, temperature=1.0, max_tokens=20)
    monkeypatch.setattr("generate.CHUNK", 5)
    assert (
        generate("a long prompt " * 4, model, seed=1, temperature=1.0, max_tokens=20)["tokens"]
        == whole["tokens"]
    )


def test_every_end_of_text_token_ends_it_and_is_not_shown(tmp_path):
    folder = write_model(tmp_path, eos_token_ids=(256,))
    model = Model.load(folder, "cpu", torch.float64)
    tokens = generate(PROMPT, model, temperature=0, max_tokens=30)["tokens"]
    cut = next(i for i in range(3, 30) if tokens[i] not in tokens[:i])
    for where in ("config", "generation"):
        file = folder / ("config.json" if where == "config" else "generation_config.json")
        before = file.read_text()
        file.write_text(json.dumps(json.loads(before) | {"eos_token_id": [256, tokens[cut]]}))
        result = generate(
            PROMPT, folder, temperature=0, max_tokens=30, device="cpu", dtype=torch.float64
        )
        file.write_text(before)
        assert result["tokens"] == tokens[: cut + 1] and result["finish_reason"] == "stop"
        assert result["text"] == model.tokenizer.decode(tokens[:cut])


def test_stop_strings_cut_exactly_also_across_tokens(base):
    model = Model.load(base, "cpu", torch.float64)
    whole = generate(PROMPT, model, temperature=1.0, seed=3, max_tokens=60)["text"]
    stop = whole[10:13]  # three characters: three tokens or more
    shown = []
    result = generate(
        PROMPT,
        model,
        temperature=1.0,
        seed=3,
        max_tokens=60,
        stop=["never there", stop],
        show=shown.append,
    )
    assert (
        result["text"] == whole[: whole.find(stop)] == "".join(shown)
        and result["finish_reason"] == "stop"
    )


def test_never_more_than_max_tokens_or_max_len(base):
    result = generate(PROMPT, base, max_tokens=5, temperature=1.0, seed=1)
    assert len(result["tokens"]) == 5 and result["finish_reason"] == "length"
    result = generate(
        PROMPT, base, max_len=len(result["prompt_tokens"]) + 2, temperature=1.0, seed=1
    )
    assert len(result["tokens"]) == 2 and result["finish_reason"] == "length"
    full = generate("x" * 90, base, temperature=1.0, seed=1)  # the model's own limit is 96
    assert len(full["prompt_tokens"]) + len(full["tokens"]) <= 96


def test_stop_strings_and_ends_with_drafts(base):
    model = Model.load(base, "cpu", torch.float64)
    whole = generate(PROMPT, model, temperature=1.0, seed=3, max_tokens=60)
    stop, shown = whole["text"][10:13], []
    result = generate(
        PROMPT,
        model,
        temperature=1.0,
        seed=3,
        max_tokens=60,
        stop=[stop],
        show=shown.append,
        draft=base,
        gamma=4,
        verify="coupled",
        dtype=torch.float64,
    )
    assert result["text"] == whole["text"][: whole["text"].find(stop)] == "".join(shown)
    assert result["finish_reason"] == "stop"
    assert (
        result["tokens"] == whole["tokens"][: len(result["tokens"])] and len(result["tokens"]) < 20
    )


def test_python_callers_get_value_errors(base, instruct):
    for wrong in (
        dict(temperature=-1),
        dict(chat=True),
        dict(system="x"),
        dict(max_len=2),
        dict(stop=[""]),
        dict(verify="loosely"),
        dict(gamma=-1),
        dict(draft="ngram", use_cache=False),
        dict(draft="tiny-draft"),
    ):
        with pytest.raises(ValueError):
            generate(PROMPT, base, **wrong)
    with pytest.raises(ValueError, match="messages needs a chat template"):
        generate([{"role": "user", "content": "x"}], base)
    with pytest.raises(FileNotFoundError):
        generate(PROMPT, "nobody/nothing/at-all")


@pytest.mark.parametrize("worst", [math.nan, math.inf])
@pytest.mark.parametrize(
    "asked",
    [
        {},
        dict(top_k=3),
        dict(temperature=0.0),
        dict(draft="ngram"),
        dict(draft="self"),
        dict(kv_bits=8),
    ],
)
def test_weights_that_are_no_numbers_end_in_one_error(base, tmp_path, worst, asked):
    """A download that went wrong, say: never a text."""
    folder = write_model(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = worst
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for target, more in (
        (folder, asked),
        *(
            (base, dict(draft=folder, gamma=2, dtype=torch.float32, temperature=t))
            for t in (0.0, 1.0)
            if not asked
        ),
    ):
        with pytest.raises(ValueError, match="not finite"):
            generate("a word", target, seed=1, max_tokens=5, **more)


# ---- The engine

OPENING = "Once upon a time, there was a little"


@pytest.fixture(scope="module")
def model(base) -> Model:
    return Model.load(base, "cpu", torch.float64)


def writers(model: Model, count: int, twins: bool = True, **chosen) -> list[Writer]:
    settings = [
        Settings(**{**dict(temperature=1.0, seed=i, max_tokens=10, gamma=0), **chosen})
        for i in range(count)
    ]
    requests = [Request(model.encode(OPENING), s, model.ends) for s in settings]
    for request in requests[1:]:
        request.twin = requests[0] if twins else None
    return [
        Writer(model.tokenizer, request, OPENING, index=i) for i, request in enumerate(requests)
    ]


@pytest.mark.parametrize("kv", ["paged", "contiguous"])
def test_twins_read_their_prompt_once_and_get_their_own_texts(model, kv):
    read, texts = {}, {}
    for twins in (True, False):
        engine, read[twins] = (
            Engine(
                model,
                None,
                4 * 60,
                60,
                4,
                kv=kv,
                **({"prefix_cache": False} if kv == "paged" else {}),
            ),
            0,
        )
        step = engine.decoder.step

        def counted(work, twins=twins, step=step):
            read[twins] += sum(w.num_tokens for w in work)
            return step(work)

        engine.decoder.step = counted
        texts[twins] = {r.index: r.tokens for r in engine.serve(writers(model, 4, twins))}
        assert (
            engine.decoder.cache.open(model.encode(OPENING))[1] == 0
        )  # nothing stays, as was asked
    assert texts[True] == texts[False] and len(set(map(tuple, texts[True].values()))) == 4
    assert read[False] - read[True] == 3 * (len(model.encode(OPENING)) - 1)


def test_a_stop_string_frees_its_request_while_the_others_go_on(model):
    plain = {
        r.index: r for r in Engine(model, None, 300, 60, 4).serve(writers(model, 3, max_tokens=20))
    }
    stop = plain[1].text[4:6]
    engine = Engine(model, None, 300, 60, 4)
    results = {r.index: r for r in engine.serve(writers(model, 3, max_tokens=20, stop=(stop,)))}
    for i, result in results.items():
        at = plain[i].text.find(stop)
        assert result.text == (plain[i].text if at < 0 else plain[i].text[:at])
        assert at < 0 or result.finish_reason == "stop"
    assert (
        len(results[1].tokens) < 20
        and engine.decoder.cache.check()[2] == 0
        and not engine.batch.running
    )


def test_ctrl_c_ends_all_with_what_there_is(model):
    engine, calls = Engine(model, None, 300, 60, 2), []
    step = engine.decoder.step

    def interrupted(work):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return step(work)

    engine.decoder.step = interrupted
    results = []
    with pytest.raises(KeyboardInterrupt):  # which then goes on its way
        for result in engine.serve(writers(model, 3, twins=False)):
            results.append(result)
    assert [r.finish_reason for r in results] == ["interrupted"] * 3 and [
        len(r.tokens) for r in results
    ] == [4, 4, 0]
    assert engine.decoder.cache.check()[2] == 0


def test_blocks_are_as_many_as_can_be_needed_or_as_memory_holds(model):
    token = 2 * 2 * 2 * 6 * 8  # bytes, in float64
    assert Engine(model, None, 100, 50, 2).decoder.cache.pool.total == 7 + 2
    assert (
        Engine(model, None, 100, 50, 2, kv_memory=token * 16 * 5 + 7).decoder.cache.pool.total == 5
    )
    both = Engine(model, model, 100, 50, 2, kv_memory=token * 16 * 10)
    assert [cache.pool.total for cache in both.caches] == [5, 5]
    assert sum(cache.bytes for cache in both.caches) == token * 16 * 10
    assert both.describe() == "keys and values: 5 blocks of 16 tokens, 0.1 MB"
    assert (
        Engine(model, None, 100, 50, 2, kv="contiguous").describe()
        == "keys and values: rows of 50 tokens, 0.0 MB"
    )


def test_what_does_not_go_together(model):
    for wrong, says in (
        (dict(kv="tree"), "kv is 'tree'"),
        (dict(kv="contiguous", kv_memory=0.5), "kv_memory is for the paged cache"),
        (dict(use_cache=False, max_batch=2), "without a cache there are no drafts, batches"),
        (dict(kv_bits=5), "kv_bits is 5"),
        (dict(kv_memory=float("inf")), "is inf bytes, and"),
        (dict(kv_memory=1e308), r"1e\+308 bytes, and .* are free"),
        (dict(kv="contiguous", max_batch=10**12), "for keys and values is .* smaller --max-batch"),
        (dict(use_cache=False, kv_bits=8), "leave out --draft, --prompts and --kv-bits"),
    ):
        with pytest.raises(ValueError, match=says):
            Engine(model, None, 100, 50, **wrong)


# ---- Folders


def test_the_models_own_settings_are_the_default(tmp_path):
    choose = lambda **recommended: (
        Model.load(write_model(tmp_path, generation=recommended), "cpu").complete
    )
    sampled = choose(do_sample=True, temperature=0.6, top_p=0.9)
    assert (
        sampled(Settings()).temperature,
        sampled(Settings()).top_p,
        sampled(Settings()).top_k,
    ) == (0.6, 0.9, None)
    assert (
        sampled(Settings(temperature=0.1)).temperature == 0.1
        and sampled(Settings(temperature=0.1)).top_p == 0.9
    )
    greedy = choose(temperature=0.6)  # transformers reads this as greedy, too
    assert greedy(Settings()).temperature == 0
    assert greedy(Settings(top_p=0.5)).temperature == 1  # who asks for top-p wants to sample
    seeds = {sampled(Settings()).seed for _ in range(4)}
    assert len(seeds) > 1 and sampled(Settings(seed=5)).seed == 5


def spoil(folder: Path, file: str, **changes) -> None:
    data = json.loads((folder / file).read_text())
    (folder / file).write_text(
        json.dumps({k: v for k, v in (data | changes).items() if v is not ...})
    )


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def drop_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    "damage, says",
    [
        (lambda f: spoil(f, "config.json", model_type="mistral"), "model_type is 'mistral'"),
        (lambda f: spoil(f, "config.json", hidden_act="gelu"), "hidden_act is 'gelu'"),
        (
            lambda f: spoil(f, "config.json", rope_scaling={"rope_type": "yarn", "factor": 2.0}),
            "rope_type is 'yarn'",
        ),
        (lambda f: spoil(f, "config.json", hidden_size=...), "hidden_size is missing"),
        (
            lambda f: spoil(f, "config.json", num_key_value_heads=3),
            "must be a multiple of num_key_value_heads 3",
        ),
        (lambda f: write_model(f, vocab_size=200), "belong to different models"),
        (lambda f: spoil(f, "config.json", hidden_size=30), "config.json asks for"),
        (lambda f: (f / "config.json").unlink(), "config.json is missing"),
        (lambda f: (f / "config.json").write_text("{not json"), "config.json is not valid JSON"),
        (lambda f: (f / "config.json").write_text("[1]"), "not an object"),
        (
            lambda f: (f / "generation_config.json").write_text("{"),
            "generation_config.json is not valid JSON",
        ),
        (
            lambda f: spoil(f, "generation_config.json", do_sample="false"),
            "generation_config.json: do_sample is 'false'",
        ),
        (
            lambda f: spoil(f, "generation_config.json", eos_token_id=["x" * 9999]),
            "_config.json: eos_token_id is ['xxx",
        ),
        (lambda f: spoil(f, "config.json", num_hidden_layers=512), "tensor model.layers.2."),
        (lambda f: (f / "model.safetensors").unlink(), "model.safetensors.index.json is missing"),
        (truncate, "not a whole safetensors file"),
        (drop_tensor, "tensor model.layers.1.mlp.up_proj.weight"),
        (
            lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 100),
            "not a whole safetensors file",
        ),
        (lambda f: (f / "tokenizer.json").unlink(), "tokenizer"),
        (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer.json"),
    ],
)
def test_bad_folders(tmp_path, capsys, damage, says):
    damage(write_model(tmp_path))
    status, out, err = run(capsys, PROMPT, "--target", tmp_path)
    assert (
        (status, out, err.count("\n")) == (2, "", 1) and err.startswith("error: ") and says in err
    )


FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors",
)
ODD = {
    "folder": Path.mkdir,
    "pipe": lambda file: os.mkfifo(file),
    "device": lambda file: file.symlink_to("/dev/zero"),
    "nothing": lambda file: file.symlink_to("gone"),
    "itself": lambda file: file.symlink_to(file.name),
    "hole": lambda file: (file.touch(), os.truncate(file, 2**40)),
    "empty": Path.touch,
    "latin-1": lambda file: file.write_bytes(b'"\xe9'),
}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes in folders")
@pytest.mark.parametrize("kind", ODD)
def test_what_stands_for_a_file_and_is_none(base, tmp_path, capsys, kind):
    write_model(tmp_path)
    for name in FILES:
        file = (tmp_path / name).rename(tmp_path / "aside").parent / name
        ODD[kind](file)
        status, out, err = run(
            capsys,
            PROMPT,
            *(("--target", base, "--draft") if name == "config.json" else ("--target",)),
            tmp_path,
        )
        assert (
            (status, out, err.count("\n")) == (2, "", 1)
            and err.startswith("error: ")
            and name in err
        ), err
        file.rmdir() if kind == "folder" else file.unlink()
        (tmp_path / "aside").rename(file)


STRANGE = [
    None,
    True,
    0,
    -1,
    3,
    2**31 - 1,
    2**64,
    10**400,
    0.5,
    1e-300,
    1e300,
    math.nan,
    "",
    "x",
    "\ud800",
    "x\n" * 9999,
    [],
    [[]],
    {},
    {"x": 1},
    [1] * 999,
    [None],
]
BYTES = [b"", b"\x00", b"\xff", b"[[[[" * 999, b"9" * 30, b"{}", b"-", b"e999", b'"']


def damaged(data: bytes, random: Random) -> bytes:
    """JSON with a few entries replaced, left out or added; or any bytes with some changed, cut off or put in."""
    if random.random() < 0.6:
        whole = json.loads(data)
        for _ in range(random.randint(1, 3)):
            at = whole
            while isinstance(at, (dict, list)) and at:
                above, key = at, random.choice([*at] if isinstance(at, dict) else range(len(at)))
                at = at[key]
                if random.random() < 0.4:
                    break
            above[key] = random.choice(STRANGE)
            if random.random() < 0.2:
                del above[key]
            if not whole:
                break
        return json.dumps(whole).encode()
    at, cut = random.randrange(len(data)), random.choice([0, 1, len(data)])
    return data[:at] + random.choice(BYTES) + data[at + cut :]


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_folder_makes_text_or_one_line(tmp_path, name):
    write_model(
        tmp_path, CHATML, generation=dict(do_sample=True, temperature=0.7, eos_token_id=[256, 258])
    )
    file, random = tmp_path / name, Random(name)
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little") if file.suffix == ".safetensors" else 0
    for _ in range(12):
        spoilt = damaged(whole[8:header], random) if header else damaged(whole, random)
        file.write_bytes(
            len(spoilt).to_bytes(8, "little") + spoilt + whole[header:] if header else spoilt
        )
        try:
            generate(PROMPT, tmp_path, max_tokens=2, seed=1, device="cpu")
        except (ValueError, OSError) as error:
            assert len(str(error)) < 1000 and "\n" not in str(error)


def test_a_setting_that_is_none_and_who_asks_for_another(tmp_path, capsys):
    write_model(tmp_path, generation=dict(do_sample=True, top_k=-1))
    status, _, err = run(capsys, PROMPT, "--target", tmp_path)
    assert status == 2 and "generation_config.json: top_k is -1" in err and err.count("\n") == 1
    assert run(capsys, PROMPT, "--target", tmp_path, "--top-k", 3, "--max-tokens", 2)[0] == 0


LARGE = dict(
    hidden_size=512, intermediate_size=2048, num_hidden_layers=6, num_attention_heads=8, head_dim=64
)
BEFORE = """
Model.load("models/tiny", "cpu", torch.float32).int4_copy()
model = Model.load(folder, "cpu", torch.float32)
"""


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="memory is read from Linux's /proc"
)
@pytest.mark.meanwhile(peak, json.dumps(LARGE), BEFORE, "copy = model.int4_copy()")
def test_the_int4_copy_takes_its_layers_bytes_and_a_tensor_on_the_way(meanwhile):
    layers = 6 * (512 * (8 + 2 * 2) * 64 + 512 * 512 + 3 * 512 * 2048)
    assert layers * 2 > 40e6
    assert meanwhile() < layers * 0.55 + 27e6, (
        f"{meanwhile() >> 20} MiB at the peak for {layers / 1e6:.0f} million"
    )
