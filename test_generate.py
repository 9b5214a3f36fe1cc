"""`plain_loop`, `generate` and `stream` give one text; the engine; folders that are damaged."""

import json
import math
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import generate as page
import loading
from automaton import Grammars
from checkpoint.formats import Quantization
from checkpoint.hub import find_model
from checkpoint.weights import weight_bytes
from errors import UserError
from generate import Engine, generate, plain_loop, stream
from kernels import Ops
from kvcache import CacheFull
from loading import DRAFTS, Draft, Model, load_draft
from model import Llama
from quant import nf4, widths
from request import OutputStream, Request, Settings
from sampling import Keyed, probabilities
from settings import VERIFY, Options
from testing.folders import CHATML, write_model
from testing.heads import random_head, write_head
from testing.models import add_noise, random_llama
from testing.toys import LastToken

PROMPT = "Once upon a time, there was a little"


@pytest.fixture(scope="module")
def model(base) -> Model:
    """Of its rows beyond the tokenizer's tokens, one always has the largest logit."""
    model = Model.load(base, "cpu", torch.float64)
    padding = model.llama.embed.weight[259:]
    padding[0] *= 1000
    padding[1] = -padding[0]
    return model


@pytest.fixture(scope="module")
def draft(base) -> Model:
    """Nearly the model."""
    draft = Model.load(base, "cpu", torch.float64)
    add_noise(draft.llama)
    return draft


# ---- One text


def plain_text(model: Model, **settings: Any) -> str:
    request = model.request(PROMPT, Settings(**settings))
    tokens = plain_loop(model, request)
    shown = [token for token in tokens if token not in request.eos_token_ids]
    return model.tokenizer.decode(shown, continues=True)  # a first space is kept


def test_text_of_the_plain_loop_is_the_engines(model, draft, base, monkeypatch, in_time):
    """Greedy, and by seed: with any cache, and in coupled mode with any draft. The prompt is longer
    than a step."""
    monkeypatch.setattr(model.llama.ops, "step_budget", 8)
    ways = [
        dict(kv="contiguous"),
        dict(draft=draft, verify="coupled", gamma=3),
        dict(draft=draft, verify="coupled"),
        dict(draft=base, draft_bits=4, verify="coupled", gamma=3),
        dict(draft="ngram", verify="coupled", gamma=2),
        dict(draft="self", verify="coupled", gamma=2, kv="contiguous"),
    ]
    texts = set()
    filters = dict(top_k=30, top_p=0.95, min_p=0.01)
    bias = dict(logit_bias={44: 2.0}, presence_penalty=0.5, frequency_penalty=0.2, min_tokens=9)
    penalties = dict(repetition_penalty=1.2, **bias)
    asked = ((0.0, 7, {}), (1.0, 7, filters), (1.0, 8, penalties), (0.0, 7, penalties))
    for temperature, seed, others in asked:
        settings = dict(temperature=temperature, seed=seed, max_tokens=20, **others)
        if others is penalties:  # the plain loop has none
            text = generate(PROMPT, model, **settings).text
        else:
            text = plain_text(model, **settings)
            assert generate(PROMPT, model, **settings, use_cache=False).text == text
        texts.add(text)
        for way in ways:
            assert generate(PROMPT, model, **settings, **way).text == text, way
        exact = generate(PROMPT, model, draft=draft, gamma=4, **settings)
        assert (exact.text == text) == (temperature == 0)
    assert len(texts) == 4


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_plain_loop_draws_each_token_from_the_whole_forward_pass(
    model, temperature, use_cache, monkeypatch
):
    """With the random numbers of its seed and position, up to an end of text. A cache only changes
    how many tokens a pass reads."""
    filters = dict(top_k=30, top_p=0.8, min_p=0.2)  # leave one out, and other tokens are drawn
    request = model.request(
        PROMPT, Settings(temperature=temperature, seed=7, max_tokens=20, **filters)
    )
    prompt = list(request.tokens)
    sizes = []  # tokens of each pass
    call = Llama.__call__

    def counted(llama: Llama, tokens: torch.Tensor, *others: Any) -> torch.Tensor:
        sizes.append(len(tokens))
        return call(llama, tokens, *others)

    with monkeypatch.context() as patch:
        patch.setattr(Llama, "__call__", counted)
        drawn = [*islice(plain_loop(model, request, use_cache), 21)]
    first = len(prompt)
    assert sizes == ([first, *[1] * 19] if use_cache else [*range(first, first + 20)])
    assert len(drawn) == 20 and request.tokens == prompt
    for i, token in enumerate(drawn):
        tokens = prompt + drawn[:i]
        logits = model.llama(torch.tensor(tokens))[-1:, :259]  # 259 and 260 are padding
        rng = Keyed(torch.tensor([7]), torch.tensor([len(tokens)]))
        assert token == int(rng.pick(probabilities(logits, temperature, **filters)))
    end = drawn.index(drawn[9])
    request.eos_token_ids = {drawn[9]}
    assert [*plain_loop(model, request, use_cache)] == drawn[: end + 1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_dtype_that_the_callers_program_prefers_changes_no_token(
    base, tmp_path, compiler, dtype
):
    """With drafts and with an EAGLE head, whether it is set before the model is loaded or after."""
    loaded_before = Model.load(base, "cpu", torch.float32)
    head = write_head(tmp_path, random_head(loaded_before.llama, dtype=torch.float32))
    ways = [
        dict(draft=base, draft_bits="nf4", temperature=0),
        dict(draft=base, draft_bits=4, top_k=9, kv_bits=8),
        dict(draft=head, logprobs=2),
    ]

    def texts(model: Model) -> list[list[int]]:
        nf4.cache_clear()
        asked = dict(seed=3, gamma=3, max_tokens=12)
        return [generate(PROMPT, model, **asked, **way).tokens for way in ways]

    wanted = texts(Model.load(base, "cpu", torch.float32))
    torch.set_default_dtype(dtype)
    try:
        assert texts(loaded_before) == wanted
        assert texts(Model.load(base, "cpu", torch.float32)) == wanted
    finally:
        torch.set_default_dtype(torch.float32)


def test_several_prompts_are_a_batch_in_order(model):
    settings = dict(temperature=1.0, seed=3, max_tokens=12)
    prompts = ["Tom", "Lily saw a dog", "Tom", "One"]
    results = generate(prompts, model, **settings)
    assert [result.prompt for result in results] == prompts
    assert [result.index for result in results] == [0, 1, 2, 3]
    alone = [generate(prompt, model, **settings) for prompt in prompts]
    assert [result.tokens for result in results] == [result.tokens for result in alone]
    assert results[0].text == alone[0].text
    assert generate(["Tom"], model, **settings)[0].text == alone[0].text
    assert generate([], model) == []


def test_stream_yields_the_text_piece_by_piece(model, draft):
    settings = dict(target=model, temperature=1.0, seed=3, max_tokens=40)
    text = generate(PROMPT, **settings).text
    shown = []
    assert [*stream(PROMPT, **settings, show=lambda *piece: shown.append(piece[0]))] == shown
    for more in ({}, dict(draft=draft, verify="coupled"), dict(stop=text[10:13])):
        pieces = list(stream(PROMPT, **settings, **more))
        assert len(pieces) > 3 and all(pieces)
        assert "".join(pieces) == generate(PROMPT, **settings, **more).text
    first = next(stream(PROMPT, **settings))
    assert text.startswith(first) and len(first) < 10


def test_thinking_is_what_the_template_gets(tmp_path):
    asks = write_model(tmp_path, template=CHATML + "{{ enable_thinking }}")
    chat = Model.load(asks, "cpu")
    plain = generate("hello", chat, max_tokens=1).prompt_tokens
    for value in (True, False):
        told = generate("hello", chat, thinking=value, max_tokens=1).prompt_tokens
        assert told == plain + chat.tokenizer.encode(str(value))
    deaf = Model.load(write_model(tmp_path / "deaf", template=CHATML), "cpu")
    with pytest.raises(UserError, match="knows no enable_thinking"):
        generate("hello", deaf, thinking=False, max_tokens=1)


def test_messages_need_a_chat_template_and_stand_for_the_prompt(model, instruct):
    messages = [{"role": "user", "content": "hello"}]
    settings = dict(temperature=1.0, seed=3, max_tokens=8)
    chat = Model.load(instruct, "cpu")
    result = generate(messages=messages, target=chat, **settings)
    assert result.prompt_tokens == chat.tokenizer.chat(messages)
    assert result.prompt == messages
    assert result.text == generate("hello", chat, **settings).text
    assert result.text == "".join(stream(messages=messages, target=chat, **settings))
    assert generate("hello", chat, chat=False, **settings).prompt_tokens != result.prompt_tokens
    brief = generate("hello", chat, system="be brief", **settings)
    assert brief.prompt_tokens == chat.encode(
        [{"role": "system", "content": "be brief"}, *messages]
    )
    with pytest.raises(UserError, match="need a chat template"):
        generate(messages=messages, target=model)
    for wrong in (5, []):
        with pytest.raises(UserError, match="must be a text, or a list of messages"):
            generate(messages=wrong, target=chat)
    for call in (generate, lambda *args, **options: list(stream(*args, **options))):
        for both_or_neither in ({}, dict(prompt="hello", messages=messages)):
            with pytest.raises(UserError, match="give either a prompt or messages"):
                call(**both_or_neither, target=chat)


# ---- Ends


def test_a_grammar_without_its_package_is_one_line(model, monkeypatch):
    """And a text without a grammar needs no package."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setattr(model, "grammars", Grammars(model.tokenizer, model.eos_token_ids))
    with pytest.raises(UserError, match=r"the package llguidance: pip install '.\[server\]'$"):
        generate("Once", model, regex="a+")
    with pytest.raises(UserError, match="schema and regex are given"):
        Settings(regex="a", schema={})
    assert generate("Once", model, max_tokens=2).tokens


def test_every_end_of_text_token_ends_it_and_is_not_shown(tmp_path):
    folder = write_model(tmp_path)
    model = Model.load(folder, "cpu", torch.float64)
    tokens = generate(PROMPT, model, temperature=0, max_tokens=30).tokens
    cut = next(i for i in range(3, 30) if tokens[i] not in tokens[:i])
    for name in ("config.json", "generation_config.json"):
        before = (folder / name).read_text()
        ends = {"eos_token_id": [256, tokens[cut]]}
        (folder / name).write_text(json.dumps(json.loads(before) | ends))
        ended = Model.load(folder, "cpu", torch.float64)
        (folder / name).write_text(before)
        result = generate(PROMPT, ended, temperature=0, max_tokens=30)
        assert result.tokens == tokens[: cut + 1] and result.finish_reason == "stop"
        assert result.text == model.tokenizer.decode(tokens[:cut])
        assert result.text == plain_text(ended, temperature=0, max_tokens=30)


@pytest.mark.parametrize(
    "config, generation, tokenizer, ends",
    [
        (7, None, None, {7}),
        (7, [8, 9], None, {8, 9}),  # 7 is stale
        ([7, 257], 8, None, {8, 257}),  # a control token is none
        (None, 7, "<|im_end|>", {7, 258}),  # a fine-tune's
        ([7, 256], None, {"content": "<|im_end|>"}, {7, 256, 258}),
    ],
)
def test_the_ends_of_a_text_are_those_of_three_files(
    config, generation, tokenizer, ends, tmp_path, model
):
    folder = write_model(tmp_path)
    for name, change in (
        ("config.json", {"eos_token_id": config}),
        ("generation_config.json", {"eos_token_id": generation}),
        ("tokenizer_config.json", {"eos_token": tokenizer}),
    ):
        data = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(data | change))
    assert Model.load(folder, "cpu").eos_token_ids == ends


def test_a_control_token_that_a_prompt_spells_is_told_and_read_if_asked_for(model, instruct):
    prompt = "a<|im_end|>b"
    settings = dict(max_tokens=1, seed=1)
    with pytest.warns(UserWarning, match=r"contains the control token <\|im_end\|>.*--special"):
        assert max(generate(prompt, model, **settings).prompt_tokens) < 256
    read = generate([prompt, "a"], model, special=True, **settings)
    assert [result.prompt_tokens for result in read] == [[97, 258, 98], [97]]
    chat = Model.load(instruct, "cpu")
    assert generate(prompt, chat, chat=False, special=True, **settings).prompt_tokens[1] == 258
    for wrong, says in ((True, "special is for plain prompts"), ("yes", "special is 'yes'")):
        with pytest.raises(UserError, match=says):
            generate(prompt, chat, special=wrong)


def test_stop_strings_cut_across_tokens_and_drafts(model, draft):
    settings = dict(temperature=1.0, seed=3, max_tokens=60, logprobs=1)
    whole = generate(PROMPT, model, **settings)
    stop = whole.text[10:13]  # three characters: three tokens or more
    settings["stop"] = ["never there", stop]
    for more in ({}, dict(draft=draft, gamma=4, verify="coupled")):
        shown = []

        def show(piece: str, origin: str) -> None:
            shown.append(piece)

        result = generate(PROMPT, model, show=show, **settings, **more)
        assert result.text == whole.text[: whole.text.find(stop)] == "".join(shown)
        assert result.finish_reason == "stop"
        assert result.tokens == whole.tokens[: len(result.tokens)]
        assert [entry.token for entry in result.logprobs] == result.tokens
        assert stop not in model.tokenizer.decode(result.tokens[:-1])  # none after the stop string


def test_never_more_than_max_tokens_or_max_len(model):
    settings = dict(temperature=1.0, seed=1)
    result = generate(PROMPT, model, max_tokens=5, **settings)
    assert len(result.tokens) == 5 and result.finish_reason == "length"
    most = len(result.prompt_tokens) + 2
    result = generate(PROMPT, model, max_len=most, **settings)
    assert len(result.tokens) == 2 and result.finish_reason == "length"
    full = generate("x" * 90, model, **settings)  # the model's own limit is 96
    assert len(full.prompt_tokens) + len(full.tokens) <= 96


PLACES = [f"model.layers.1.self_attn.{part}_proj.weight" for part in "kv"]
PLACES += ["model.layers.0.mlp.down_proj.weight", "model.embed_tokens.weight", "model.norm.weight"]


def test_damaged_weights_end_in_one_error(tmp_path, compiler):
    """A download that went wrong, a bit that fell over: never a text. Squares of 3e38 overflow, a
    cache or weights of few bits may cut it, and a lone −∞ among logits looks like a mask's."""
    folder = write_model(tmp_path, tie_word_embeddings=False)
    whole = load_file(folder / "model.safetensors")
    ways = [
        dict(temperature=0.0),
        dict(temperature=1.0, kv_bits=8),
        dict(kv_bits=4, top_k=3),
        dict(draft="ngram"),
        dict(draft="self"),
    ]

    def check(name: str, damaged: torch.Tensor) -> None:
        tensors = whole | {name: damaged}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        model = Model.load(folder, "cpu", torch.float32)
        for way in ways:
            with pytest.raises(UserError, match="not finite"):
                generate("a word", model, **dict(seed=1, max_tokens=1) | way)
        for bits in (8, 4, "fp8", "nf4"):
            with pytest.raises(UserError, match="not finite"):
                generate("a word", folder, device="cpu", bits=bits, seed=1, max_tokens=1)

    for name, value in zip(PLACES, cycle((math.nan, math.inf, 3e38))):
        check(name, torch.full_like(whole[name], value))
    for value in (math.inf, -math.inf):  # one of them makes a logit of −∞, and no other
        damaged = whole["lm_head.weight"].clone()
        damaged[7, 3] = value
        check("lm_head.weight", damaged)


# ---- Drafts


def test_new_drafter_is_a_line_in_one_table(model, monkeypatch):
    monkeypatch.setitem(DRAFTS, "last", lambda model: Draft(lambda cache: LastToken()))
    settings = dict(temperature=1.0, seed=4, max_tokens=30)
    result = generate(PROMPT, model, draft="last", verify="coupled", gamma=2, **settings)
    assert result.text == generate(PROMPT, model, **settings).text
    assert result.speculation.acceptance is not None
    results = generate(["aaaa", "b"], model, draft="last", temperature=0, max_tokens=20)
    assert [len(each.tokens) for each in results] == [20, 20]


def test_an_option_says_how_drafts_are_verified(model):
    for verify in VERIFY:
        engine = Engine(model, None, Options(max_len=60, max_batch=1, verify=verify))
        drawing = engine.runner.drawing
        assert drawing.by_token == (verify == "token")
        assert drawing.coupled == (verify == "coupled")
    assert Options().verify == VERIFY[0] == "block"
    with pytest.raises(UserError, match="^verify is 'exact': it must be block, token or coupled"):
        Options(verify="exact")


def test_a_damaged_draft_is_named(base, compiler):
    model = Model.load(base, "cpu", torch.float32)
    damaged = Model.load(base, "cpu", torch.float32)
    damaged.llama.norm[3] = math.nan
    for temperature in (0.0, 1.0):
        for prompts, verify in ((["a word"], "coupled"), (["a word", "b"], "block")):
            settings = dict(temperature=temperature, verify=verify, seed=1, gamma=2)
            with pytest.raises(UserError, match="^the draft's logits .* leave out --draft"):
                generate(prompts, model, draft=damaged, **settings)


def test_int4_copy_needs_a_folder_of_16_bits(model, base):
    homeless = Model(model.llama, model.tokenizer)
    with pytest.raises(UserError, match="this model has none"):
        generate(PROMPT, homeless, draft="self")
    for bits in (4, "nf4"):
        quantized = Model.load(base, "cpu", bits=bits)
        with pytest.raises(UserError, match="the target's weights are already"):
            generate(PROMPT, quantized, draft="self")


def bytes_in(bits: int | str, folder: str) -> int:
    """Of a folder's weights: norms and offsets as they are, the layers in so many bits."""
    total = 0
    for name, tensor in load_file(find_model(folder) / "model.safetensors").items():
        N, K = [*tensor.shape, 1][:2]
        is_vocabulary = "embed_tokens" in name or "lm_head" in name
        if name == "t2d":
            continue
        if tensor.ndim == 1:
            total += (8 if name == "d2t" else 4) * N
        elif bits == 16:
            total += 4 * N * K  # in float32
        elif bits == 8 or is_vocabulary:
            total += N * (K + 2)
        else:
            total += N * (K // 2 + 4 * math.ceil(K / 128))
    return total


@pytest.mark.parametrize("name", ["tiny-draft", "tiny-eagle"])
def test_a_draft_has_the_bits_that_are_asked_for_or_the_targets(name, monkeypatch):
    monkeypatch.setenv("LLAMA_PLAIN", "1")  # so that no weight is packed
    for target in (16, 8):
        model = Model.load("tiny", "cpu", torch.float32, target)
        for asked in (None, 16, 8, 4):
            (llama,) = load_draft(name, model, torch.float32, asked).models
            stored = sum(tensor.nbytes for tensor in llama.named_tensors().values())
            assert stored == weight_bytes(llama) == bytes_in(asked or target, name)


def test_a_draft_may_compute_in_another_dtype(base):
    models = [Model.load(base, "cpu", dtype) for dtype in (torch.float32, torch.float64)]
    for target, draft in (models, models[::-1]):
        how = dict(draft=draft, temperature=1, seed=1, gamma=2, max_tokens=9)
        results = generate(["a", "bcd", "e"], target, **how, chat=False)
        assert all(result.speculation.acceptance > 0.5 for result in results)


def test_a_draft_with_fewer_rows_than_its_target_is_refused(base, tmp_path):
    """Its tokenizer is the target's, and its weights lack the last token."""
    target = Model.load(base, "cpu", torch.float32)
    folder = write_model(tmp_path, vocab_size=target.tokenizer.vocab_size - 1)
    with pytest.raises(UserError, match="not the target's: tokens from 258 on are missing"):
        generate(PROMPT, target, draft=folder)


def test_a_draft_on_another_device_is_refused(model):
    elsewhere = Model(Llama(model.llama.config, "meta", seed=None), model.tokenizer)
    with pytest.raises(UserError, match="the draft is on meta, and the target is on cpu"):
        generate(PROMPT, model, draft=elsewhere)


def test_a_draft_that_is_stored_in_few_bits_stays_as_it_is(base, model, tmp_path):
    llama = random_llama(3, Ops(), quantization=Quantization(8))
    small = shutil.copytree(base, tmp_path / "model")
    (small / "config.json").write_text(json.dumps(llama.config.to_dict()))
    tensors = {name: tensor.contiguous() for name, tensor in llama.named_tensors().items()}
    save_file(tensors, small / "model.safetensors")
    head = write_head(tmp_path / "head", random_head(model.llama, bits=8))
    for folder in (small, head):
        for target in (model, Model.load(base, "cpu", torch.float64, 4)):
            for asked in (None, 16):
                (draft,) = load_draft(folder, target, torch.float64, asked).models
                assert draft.config.quantization.bits == 8
                stored = load_file(folder / "model.safetensors")
                for name, tensor in draft.named_tensors().items():
                    assert torch.equal(tensor, stored[name].to(tensor.dtype)), name
            for asked, name in ((8, "INT8"), (4, "INT4"), ("nf4", "NF4")):
                with pytest.raises(UserError, match=f"weights are already INT8, and {name} is"):
                    generate(PROMPT, "no target", draft=folder, draft_bits=asked)
    (draft,) = load_draft(base, Model.load(small, "cpu", torch.float64)).models
    assert draft.config.quantization.bits == 8  # as the target is stored


def test_what_is_loaded_is_not_loaded_otherwise(model, draft):
    for how in (
        dict(bits=8),
        dict(device="cpu", draft=draft),
        dict(draft_bits=4),
        dict(draft_bits=8, draft=draft),
        dict(draft_bits=16, draft="ngram"),
        dict(draft_bits=8, draft="self"),
        dict(draft_bits=4, draft=Draft(lambda cache: LastToken())),
    ):
        name = [*how][0]
        with pytest.raises(UserError, match=f"{name}.* {how[name]!r}.* loaded.*leave .*{name}"):
            generate(PROMPT, model, **how)
    assert generate("a", model, draft="self", draft_bits=4, max_tokens=1).tokens


# ---- The engine


def streams(model: Model, count: int, siblings: bool = True, **chosen) -> list[OutputStream]:
    chosen = {**dict(temperature=1.0, max_tokens=10), **chosen}
    requests = []
    for seed in range(count):
        settings = Settings(seed=seed, **chosen)
        requests.append(Request(model.encode(PROMPT), settings, model.eos_token_ids))
    for request in requests[1:]:
        request.sibling = requests[0] if siblings else None
    return [OutputStream(model.tokenizer, r, PROMPT, index=i) for i, r in enumerate(requests)]


def test_siblings_read_their_prompt_once_and_get_their_own_texts(model):
    """All but its last block. Without prefix caching each reads it whole."""
    computed = {}
    texts = {}
    for kv, prefix_caching in (("paged", True), ("paged", False), ("contiguous", True)):
        options = Options(max_len=60, max_batch=4, kv=kv, prefix_caching=prefix_caching)
        engine = Engine(model, None, options, tokens=4 * 60)
        step = engine.runner.step
        counts = []

        def counted(scheduled, step=step, counts=counts):
            counts.extend(item.num_tokens for item in scheduled)
            return step(scheduled)

        engine.runner.step = counted
        results = {result.index: result.tokens for result in engine.serve(streams(model, 4))}
        texts[kv, prefix_caching] = results
        computed[kv, prefix_caching] = sum(counts)
    alone, once, *others = texts.values()
    assert alone == once == others[0] and len(set(map(tuple, alone.values()))) == 4
    num_shared = (len(model.encode(PROMPT)) - 1) // 16 * 16
    assert num_shared > 0
    assert computed["paged", True] == computed["paged", False] - 3 * num_shared
    assert computed["contiguous", True] == computed["paged", False]


def test_stop_string_frees_its_request_while_the_others_go_on(model):
    def serve(**chosen) -> tuple[Engine, dict]:
        engine = Engine(model, None, Options(max_len=60, max_batch=4), tokens=300)
        results = engine.serve(streams(model, 3, max_tokens=20, **chosen))
        return engine, {result.index: result for result in results}

    _, plain = serve()
    stop = plain[1].text[4:6]
    engine, results = serve(stop=(stop,))
    for i, result in results.items():
        start = plain[i].text.find(stop)
        assert result.text == (plain[i].text if start < 0 else plain[i].text[:start])
        assert start < 0 or result.finish_reason == "stop"
    assert len(results[1].tokens) < 20
    assert engine.runner.cache.check()[2] == 0 and not engine.batcher.running


def test_ctrl_c_ends_all_with_what_there_is(model):
    engine = Engine(model, None, Options(max_len=60, max_batch=2), tokens=300)
    step = engine.runner.step

    def interrupted(scheduled):
        if engine.batcher.num_steps == 5:
            raise KeyboardInterrupt
        return step(scheduled)

    engine.runner.step = interrupted
    results = []
    with pytest.raises(KeyboardInterrupt):  # which then goes on its way
        for result in engine.serve(streams(model, 3, siblings=False)):
            results.append(result)
    assert [result.finish_reason for result in results] == ["interrupted"] * 3
    assert [len(result.tokens) for result in results] == [4, 4, 0]
    assert engine.runner.cache.check()[2] == 0


def test_an_engine_serves_again_after_a_caller_had_enough_or_an_error(model):
    engine = Engine(model, None, Options(max_len=60, max_batch=2), tokens=300)
    for _ in engine.serve(streams(model, 3, siblings=False)):
        break
    assert not engine.batcher.running and not engine.batcher.waiting
    too_long = streams(model, 3, siblings=False)
    too_long[2].request.settings = Settings(seed=1, max_tokens=500)
    with pytest.raises(UserError, match="need a cache of"):
        next(engine.serve(too_long))
    results = list(engine.serve(streams(model, 3, siblings=False)))
    assert [len(result.tokens) for result in results] == [10] * 3
    assert engine.runner.cache.check()[2] == 0


def test_a_batch_of_none_is_refused(model):
    with pytest.raises(UserError, match="max_batch is 0"):
        generate(PROMPT, model, max_batch=0)


def test_blocks_are_as_many_as_can_be_needed_or_as_memory_holds(model, monkeypatch):
    token = 2 * 2 * 2 * 6 * 8  # bytes, in float64

    def blocks(**memory) -> list[int]:
        return [
            cache.pool.total
            for cache in Engine(
                model, None, Options(max_len=50, max_batch=2, **memory), tokens=100
            ).caches
        ]

    assert blocks() == [7 + 2]
    assert blocks(kv_memory=token * 16 * 5 + 7) == [5]
    both = Engine(
        model,
        page.load_draft(model, model),
        Options(max_len=50, max_batch=2, kv_memory=token * 16 * 10),
        tokens=100,
    )
    assert [cache.pool.total for cache in both.caches] == [5, 5]
    assert both.describe() == "keys and values: 5 blocks of 16 tokens, 0.1 MB"
    contiguous = Engine(model, None, Options(max_len=50, max_batch=2, kv="contiguous"), tokens=100)
    assert contiguous.describe() == "keys and values: rows of 50 tokens, 0.0 MB"
    draft = Model(random_llama(2, max_position_embeddings=40), model.tokenizer)
    low = Engine(model, page.load_draft(draft, model), Options(max_len=50, max_batch=2, kv_bits=8))
    spec = model.llama.kv_spec(widths(8))
    assert [cache.max_len for cache in low.caches] == [50, 40]
    assert [cache.bytes for cache in low.caches] == [spec.bytes(16 * 9)] * 2
    monkeypatch.setattr(loading, "free_memory", lambda device: 15 * token)
    for bits in (16, 8):
        limit = model.llama.kv_spec(widths(bits)).tokens_in(12 * token)
        assert limit == model.max_total_tokens(Options(kv_bits=bits)) < 96
    assert limit > 12
    with pytest.raises(CacheFull):
        contiguous.caches[0].extend([(contiguous.caches[0].open([])[0], [1] * 51)])


def test_what_does_not_go_together_is_refused_before_memory_is_asked_for(model):
    for wrong, says in (
        (dict(kv="tree"), "kv is 'tree'"),
        (dict(kv="contiguous", kv_memory=0.5), "kv_memory is for the paged cache"),
        (dict(use_cache=False, max_batch=2), "drafts, batches and cache options need a cache"),
        (dict(use_cache=False, kv_bits=8), "leave out --draft, --prompts, --kv, --kv-bits"),
        (dict(use_cache=False, kv="contiguous"), "drafts, batches and cache options need a cache"),
        (dict(use_cache=False, kv_memory=1e6), "drafts, batches and cache options need a cache"),
        (dict(use_cache="no"), "use_cache is 'no': it must be true or false"),
        (dict(prefix_caching=None), "prefix_caching is None: it must be true or false"),
        (dict(max_len=50.5), "max_len is 50.5: it must be a whole number"),
        (dict(kv_memory=True), "kv_memory is True: it must be a share of free memory, or bytes"),
        (dict(kv_bits=5), "kv_bits is 5"),
        (dict(kv_memory=float("inf")), "need inf bytes of memory, and"),
        (dict(kv_memory=1e308), r"1e\+308 bytes of memory, and .* are free"),
        (dict(kv_memory=float("nan")), "kv_memory is nan: it must be a share of"),
        (dict(kv="contiguous", max_batch=10**12), "keys and values need .* smaller --max-batch"),
    ):
        with pytest.raises(UserError, match=says):
            Engine(model, None, Options(**dict(max_len=50, max_batch=1) | wrong), tokens=100)


def test_what_is_for_loading_is_refused_where_the_target_is_loaded(model):
    for name, value in dict(device="cpu", dtype=torch.float64, bits=8).items():
        with pytest.raises(UserError, match="the target is already loaded"):
            page.generate("a", model, **{name: value})


# ---- Folders


def test_models_own_settings_are_the_default(tmp_path):
    def complete(asked: Settings, **recommended) -> Settings:
        folder = write_model(tmp_path, generation=recommended)
        return Model.load(folder, "cpu").complete(asked)

    sampled = dict(do_sample=True, temperature=0.6, top_p=0.9)
    settings = complete(Settings(), **sampled)
    assert (settings.temperature, settings.top_p, settings.top_k) == (0.6, 0.9, None)
    settings = complete(Settings(temperature=0.1), **sampled)
    assert (settings.temperature, settings.top_p) == (0.1, 0.9)
    assert complete(Settings(), temperature=0.6).temperature == 0  # greedy, as in transformers
    assert complete(Settings(top_p=0.5), temperature=0.6).temperature == 0.6  # asks for a sample
    assert len({complete(Settings()).seed for _ in range(4)}) > 1
    assert complete(Settings(seed=5)).seed == 5


def edit(name: str, **changes) -> Callable[[Path], None]:
    """Other values in a JSON file; ... leaves one out."""

    def damage(folder: Path) -> None:
        data = json.loads((folder / name).read_text()) | changes
        kept = {key: value for key, value in data.items() if value is not ...}
        (folder / name).write_text(json.dumps(kept))

    return damage


def write(name: str, data: bytes | None) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        if data is not None:
            (folder / name).write_bytes(data)

    return damage


def drop_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")


DAMAGES = [
    (edit("config.json", hidden_size=30), "the config asks for"),
    (write("config.json", None), "config.json is missing"),
    (write("generation_config.json", b"{"), "generation_config.json is not valid JSON"),
    (write("model.safetensors", None), "model.safetensors.index.json is missing"),
    (drop_tensor, "tensor model.layers.1.mlp.up_proj.weight"),
    (write("tokenizer.json", b"{}"), "tokenizer.json"),
    (lambda folder: write_model(folder, vocab_size=200), "it has token 255, b"),
]


def test_damaged_folder_is_named(tmp_path):
    for i, (damage, says) in enumerate(DAMAGES):
        folder = write_model(tmp_path / str(i))
        damage(folder)
        with pytest.raises((UserError, FileNotFoundError)) as error:
            generate(PROMPT, folder, max_tokens=2)
        message = str(error.value)
        assert says in message and "\n" not in message and len(message) < 1000


def test_a_model_may_lack_tokens_beside_those_of_texts(tmp_path):
    """They are never drawn, and no prompt may hold them."""
    template = "{{ messages[-1].content }}{{ '<|im_end|>' if messages[1:] }}"
    folder = write_model(tmp_path, template, vocab_size=258)  # the tokenizer has 259 tokens
    model = Model.load(folder)
    message = dict(role="user", content="<|im_end|>")
    result = generate(messages=[message], target=model, max_tokens=40, temperature=9.0)
    assert max(result.tokens) < 258 == model.tokenizer.vocab_size
    with pytest.raises(UserError, match="has token 258, and the model has tokens 0 to 257"):
        generate(messages=[message, message], target=model)


FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors",
)
ODD: dict[str, Callable[[Path], object]] = {
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
def test_odd_files_are_named(model, tmp_path):
    folder = write_model(tmp_path / "model")
    for name in FILES:
        file = folder / name
        aside = file.rename(tmp_path / "aside")
        for make in ODD.values():
            make(file)
            where = dict(target=folder)
            if name == "config.json":
                where = dict(target=model, draft=folder)
            with pytest.raises((UserError, OSError)) as error:
                generate(PROMPT, **where)
            assert name in str(error.value) and "\n" not in str(error.value)
            if file.is_dir() and not file.is_symlink():
                file.rmdir()
            else:
                file.unlink()
        aside.rename(file)


def test_a_wrong_name_of_a_setting_is_told_the_right_ones(model):
    with pytest.raises(UserError, match=r"no setting \(did you mean temperature\?\): there"):
        Settings(temprature=1)
    for call in (generate, lambda *given, **options: next(stream(*given, **options))):
        for name, guess in (("temprature", "temperature"), ("max_batches", "max_batch")):
            with pytest.raises(UserError, match=rf"'{name}' is no .*{guess}\?\).*seed.*kv_bits"):
                call(PROMPT, target=model, **{name: 1})
    assert replace(Settings(), seed=3) == pickle.loads(pickle.dumps(Settings(seed=3)))


def test_mistakes_of_python_callers_are_told_in_a_line(model):
    message = dict(role="user", content="Hi")
    for said, prompt, given in (
        ("chat messages, .* need a chat template", message, {}),
        ("chat messages, .* need a chat template", 5, {}),
        ("gamma needs drafted tokens", PROMPT, dict(gamma=2)),
        ("chat is 0: it must be true or false", PROMPT, dict(chat=0)),
        (r"the name of a model is \[5\]: it must be a text", PROMPT, dict(draft=[5])),
        ("dtype is 'float32'; it must be None, torch.float32", PROMPT, dict(dtype="float32")),
        ("dtype is torch.int8", PROMPT, dict(dtype=torch.int8)),
        ("device 'nope' is unknown", PROMPT, dict(device="nope")),
        ("device 'meta' is not supported", PROMPT, dict(device="meta")),
    ):
        target = "tiny" if given.keys() & {"dtype", "device"} else model
        with pytest.raises((UserError, FileNotFoundError), match=f"^{said}"):
            generate(prompt, target, max_tokens=1, **given)


def test_an_engine_of_many_texts_warms_up_all_models(monkeypatch):
    """The target, and a head; with one text none."""
    model = Model.load("tiny", "cpu")
    draft = load_draft("tiny-eagle", model)
    warmed = []
    monkeypatch.setattr(Ops, "warm_up", lambda self, llama, cache, V: warmed.append(llama))
    Engine(model, draft, Options(max_len=20, max_batch=1))
    assert not warmed
    Engine(model, draft, Options(max_len=20, max_batch=2))
    assert warmed == [model.llama, *draft.models] and len(warmed) == 2
