"""EAGLE heads: drafts beside plain formulas, rows beside those of whole texts, the distribution."""

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from batcher import Batcher
from checkpoint.eagle import is_eagle
from checkpoint.load import load_eagle
from conftest import examples
from eagle import EagleDrafter, EagleHead, HeadChain
from errors import UserError
from generate import generate
from kernels import Ops
from kvcache import Cache, KVCache
from loading import Model, load_draft
from model import Llama
from museum import planted
from paged import PagedCache
from request import Request, Settings
from runner import ModelRunner, ScheduledRequest
from sampling import Setting, probabilities
from speculative import Drawing, Round
from testing.heads import FLAGS, plain_chain, random_head, write_head
from testing.models import num_found, random_llama
from testing.programs import told
from testing.toys import play

# ---- Drafts and rows


def make_runner(target: Llama, head: EagleHead, cache: Cache, budget: int = 512) -> ModelRunner:
    """The head drafts in the target's cache."""
    drawing = Drawing(target.config.vocab_size)
    return ModelRunner(target, cache, drawing, drafter=EagleDrafter(head, cache), budget=budget)


def proposed(runner: ModelRunner, request: Request, k: int) -> tuple[list[int], Tensor]:
    round = Round([request], [k], runner.drawing, target=runner.target)
    drafted, q = runner.drafter.propose(round)
    return drafted[0].tolist(), q[0, :-1]


@pytest.mark.parametrize(
    "flags, layout, kind",
    [
        ({}, "authors", "llama"),
        ({}, "speculators", "qwen3"),
        *((flags, "speculators", "llama") for flags in FLAGS),
    ],
    ids=str,
)
def test_drafts_are_those_of_the_formulas(tmp_path, flags, layout, kind):
    """Read from a folder, after a prompt in chunks and a few rounds."""
    target = random_llama(1, ops=Ops(), model_type=kind)
    drafted = range(261) if flags.get("has_offsets") is False else range(0, 261, 2)
    plain = random_head(target, drafted, **flags)
    folder = write_head(tmp_path / "head", plain, layout)
    assert is_eagle(folder) and not is_eagle(tmp_path)
    head = load_eagle(EagleHead, folder, target, 16)
    assert head.logits(torch.zeros(1, 24, dtype=torch.float64)).isfinite().all()
    check_drafts(head, plain, target)


def check_drafts(head: EagleHead, plain: EagleHead, target: Llama) -> None:
    """The prompt takes 3 steps; the last of them also makes a token. No other text finds a block
    that holds the 0 of a draft."""
    cache = PagedCache(target.kv_spec(draft_layers=1), 20, 4)
    runner = make_runner(target, head, cache, budget=6)
    chosen = Settings(1.0, seed=3, max_tokens=20, gamma=3)
    request = Request(list(range(40, 56)), chosen)
    runner.open(request)
    num_steps = 0
    while not request.finish_reason:
        if len(request.tokens) > request.num_prompt_tokens:
            placeholders = request.tokens[:-1] + [0] * 9
            drafted, q = proposed(runner, request, 4)
            assert num_found(cache, placeholders) < len(request.tokens)
            logits = plain_chain(plain, target, request.tokens, drafted)
            assert (q - logits.softmax(-1)).abs().max() < 1e-6  # angles are float32
        runner.step([runner.schedule(request)])
        num_steps += 1
        assert len(request.rounds) == max(0, num_steps - 2)
    assert max(stats.num_drafts for stats in request.rounds) == 3


@pytest.fixture(scope="module")
def pair() -> tuple[Llama, EagleHead]:
    target = random_llama(1, ops=Ops())
    return target, random_head(target).pack_weights()


def stored_rows(cache, seq: int) -> Tensor:
    """The keys and values of all rows of a text: [2, m, G, D]."""
    (slots,) = cache.metadata([(seq, 0, cache.length(seq))]).slots
    layer = len(cache.keys.parts[0]) - 1
    return torch.stack(
        [store.read(layer, slots, cache.dtype) for store in (cache.keys, cache.values)]
    )


def rows_at_once(target: Llama, head: EagleHead, text: list[int]) -> Tensor:
    """The same, of a text that is read in one pass, by a drafter of its own."""
    cache = KVCache(target.kv_spec(draft_layers=1), 96)
    runner = make_runner(target, head, cache)
    request = Request(text, Settings(1.0, seed=0, max_tokens=1))
    runner.open(request)
    runner.step([ScheduledRequest(request, 0, len(text) - 1, samples=False)])
    return stored_rows(cache, request.seq)


def check_rows(runner: ModelRunner, requests: list[Request], head: EagleHead) -> None:
    """The invariant of eagle.py."""
    for request in requests:
        length = runner.cache.length(request.seq)
        if length:
            wanted = rows_at_once(runner.target, head, request.tokens[: length + 1])
            rows = stored_rows(runner.cache, request.seq)
            assert torch.allclose(rows, wanted, atol=1e-9)


@examples(8)
@given(st.data())
def test_every_row_is_that_of_the_whole_text(pair, data):
    """In batches, with shared prefixes, forks, preemption, chunks."""
    target, head = pair
    draw = data.draw
    V = target.config.vocab_size
    budget = draw(st.integers(4, 24))
    if draw(st.booleans()):
        blocks = draw(st.integers(20, 40))  # the longest prompt has 17 tokens
        cache = PagedCache(
            target.kv_spec(draft_layers=1), blocks, draw(st.sampled_from([1, 2, 4])), max_len=48
        )
    else:
        cache = KVCache(target.kv_spec(draft_layers=1), 48, 4)
    mode = draw(st.sampled_from(["greedy", "coupled", "exact"]))
    drawing = Drawing(V, mode == "coupled")
    runner = ModelRunner(target, cache, drawing, drafter=EagleDrafter(head, cache), budget=budget)
    batcher = Batcher(runner, draw(st.integers(1, 4)))
    start = draw(st.lists(st.integers(0, 9), min_size=1, max_size=14))
    requests = []
    for seed in range(draw(st.integers(1, 5))):
        prompt = start + draw(st.lists(st.integers(0, 9), max_size=3))
        chosen = Settings(
            0.0 if mode == "greedy" else 1.0,
            seed=seed,
            max_tokens=min(draw(st.integers(1, 12)), cache.max_len - len(prompt)),
            gamma=draw(st.sampled_from([0, 1, 3] if mode == "exact" else [None, 0, 1, 3])),
        )
        requests.append(Request(prompt, chosen, (7,)))
        if requests[:-1] and requests[-2].tokens == prompt and draw(st.booleans()):
            requests[-1].sibling = requests[-2]
    for request in requests:
        batcher.add(request)
    while batcher.waiting or batcher.running:
        batcher.step()
        check_rows(runner, batcher.running, head)
        if isinstance(cache, PagedCache):
            cache.check()
    assert not runner.drafter.last_z


def check_texts(pair) -> None:
    """Texts that begin alike, one after the other: γ = 3, blocks of two tokens."""
    target, head = pair
    cache = PagedCache(target.kv_spec(draft_layers=1), 60, 2)
    runner = make_runner(target, head, cache)
    for i in range(4):
        chosen = Settings(1.0, seed=i, max_tokens=8, gamma=3)
        request = Request([1, 2, 3, 4, 5 + i // 2, 6, 7], chosen)
        runner.open(request)
        assert (cache.length(request.seq) > 0) == (i > 0)
        while not request.finish_reason:
            runner.step([runner.schedule(request)])
            check_rows(runner, [request], head)
        runner.close(request)


TOKENS = "self.offsets + torch.arange(len(self.offsets), device=self.device)"
FORWARD = "self.ops.forward_head(self, f, tokens, metadata)"
COMBINED = "f = self.model.combine(features.values[send(rows, device)])"
BUGS = {  # a bug -> the function, a piece of it, and what is planted there
    "features of the row before": (EagleHead.combine, "(x, self.fc)", "(x, self.fc).roll(1, 0)"),
    "accepted drafts have the features of the row before": (
        EagleDrafter.learn.__wrapped__,
        COMBINED,
        f"{COMBINED}; f[1:] = f[:-1].clone() if self.last_z else f[1:]",
    ),
    "a normalized state": (EagleHead.__call__, FORWARD, f"self._rms_norm({FORWARD}, self.norm)"),
    "a draft's row takes the place of the one before": (
        HeadChain._advance,
        "(self.seqs[b], position, position + 1)",
        "(self.seqs[b], position - 1, position)",
    ),
    "tokens off by one": (EagleHead.tokens.func, TOKENS, f"(1 + {TOKENS}) % 261"),
    "blocks without the next token": (PagedCache.__init__, "= spec.lookahead", "= 0"),
}


def test_planted_bugs_are_caught(pair):
    """Each leaves the outputs as they were: verification is exact for any draft."""

    def check() -> None:
        plain = random_head(pair[0])
        check_drafts(random_head(pair[0]).pack_weights(), plain, pair[0])
        check_texts(pair)

    check()
    for bug in BUGS.values():
        with planted(*bug), pytest.raises(AssertionError):
            check()


class LikeAGPU(Ops):
    """Logits that are not finite are told by token −1, because a GPU would have to wait."""

    def probabilities(self, logits: Tensor, masked: bool = True, **settings: Setting) -> Tensor:
        return probabilities(logits, **settings)

    def pick(self, probs: Tensor, streams: Tensor) -> Tensor:
        return torch.where(probs.isnan().any(-1), -1, super().pick(probs, streams))


def test_drafts_that_are_not_finite_are_told():
    """Neither the head nor the target looks up token −1."""
    target = random_llama(1, ops=LikeAGPU())
    head = random_head(target)
    head.norm.fill_(torch.nan)
    cache = KVCache(target.kv_spec(draft_layers=1), 20, 2)
    runner = make_runner(target, head, cache)
    requests = []
    for seed in range(2):
        requests.append(Request([1, 2, seed], Settings(1.0, seed=seed, max_tokens=9, gamma=3)))
    with pytest.raises(UserError, match="not finite"):
        play(runner, requests)
    assert all(len(request.tokens) == 4 for request in requests)


# ---- With everything else


@pytest.mark.parametrize("bits", [8, 4])
def test_a_head_is_rounded_as_its_target_is(base, tmp_path, bits):
    """Greedy texts are those without a draft."""
    model = Model.load(base, "cpu", torch.float64, bits)
    draft = load_draft(write_head(tmp_path / "head", random_head(model.llama)), model)
    assert draft.models[0].config.quantization.bits == bits
    how = dict(target=model, temperature=0, max_tokens=20, kv_bits="8/4")
    texts = generate(["abc", "abcabc"], draft=draft, gamma=3, **how)
    wanted = generate(["abc", "abcabc"], **how)
    assert [text.tokens for text in texts] == [text.tokens for text in wanted]
    assert all(text.speculation.acceptance is not None for text in texts)


# ---- What is refused


def test_a_damaged_head_is_named_and_the_target_is_not(base, tmp_path, compiler):
    model = Model.load(base, "cpu", torch.float32)
    for name in ("fc.weight", "norm.weight", "lm_head.weight"):
        for value in (math.nan, math.inf):
            head = random_head(model.llama, dtype=torch.float32)
            head.named_tensors()[name].fill_(value)
            folder = write_head(tmp_path / f"{name} {value}", head)
            for temperature, verify in ((0.0, "block"), (1.0, "coupled")):
                how = dict(draft=folder, verify=verify, gamma=3, temperature=temperature, seed=1)
                with pytest.raises(UserError, match="^the draft's logits .* leave out --draft"):
                    generate("a word", model, **how)


WRONG = told(
    """
    head {"use_medusa": true} → use_medusa
    head {"norm_output": 1} → norm_output
    head {"norm_before_fc": true, "fc_norm": true} → one of them
    head {"draft_vocab_size": 0} → draft_vocab_size
    head {"draft_vocab_size": 262} → at most vocab_size
    head {"draft_vocab_size": 130} → lm_head.weight
    head {"draft_vocab_size": "8"} → draft_vocab_size
    head {"target_hidden_size": 25} → hidden_size of the target
    head {"eagle_aux_hidden_state_layer_ids": [0, 2]} → reads layers
    head {"eagle_aux_hidden_state_layer_ids": [0, 0]} → each once
    head {"eagle_aux_hidden_state_layer_ids": [-1]} → list of layers
    head {"eagle_aux_hidden_state_layer_ids": null} → reads layers
    head {"eagle_config": 5} → not an object
    head {"eagle_config": {"use_aux_hidden_state": false}} → use_aux_hidden_state
    head {"speculators_model_type": "hass"} → speculators_model_type
    head {"transformer_layer_config": 5} → not an object
    layer {"num_hidden_layers": 2} → num_hidden_layers
    layer {"model_type": "qwen3_moe"} → model_type
    layer {"model_type": "qwen3"} → q_norm
    layer {"vocab_size": 300} → vocab_size
    layer {"head_dim": 8} → head_dim
    layer {"num_key_value_heads": 4} → num_key_value
    layer {"hidden_size": 20, "head_dim": 6} → hidden_size
    """
)


def test_heads_that_do_not_fit_are_refused_before_anything_is_made(tmp_path, pair):
    target = pair[0]
    folder = write_head(tmp_path / "head", random_head(target))
    config = json.loads((folder / "config.json").read_text())
    layer = config["transformer_layer_config"]
    for line, message in WRONG:
        kind, text = line.split(" ", 1)
        change = json.loads(text)
        if kind == "layer":
            change = {"transformer_layer_config": layer | change}
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(UserError, match=message):
            load_eagle(EagleHead, folder, target, 16)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    offsets = tensors["d2t"]
    damaged = [
        (tensors | {"d2t": offsets + 200}, "d2t"),
        (tensors | {"d2t": -torch.arange(len(offsets))}, "d2t"),
        (tensors | {"d2t": offsets - (offsets == 0).long()}, "d2t"),  # token 0 becomes −1
        (tensors | {"d2t": offsets.int()}, "d2t"),
        (tensors | {"layers.1.mlp.weight": offsets.clone()}, "does not belong to the model"),
        ({name: x for name, x in tensors.items() if name != "fc.weight"}, "fc.weight"),
        ({name: x for name, x in tensors.items() if name != "d2t"}, "d2t"),
    ]
    for changed, message in damaged:
        save_file(changed, folder / "model.safetensors")
        with pytest.raises(UserError, match=message):
            load_eagle(EagleHead, folder, target, 16)


def test_layers_where_the_config_names_none_are_those_of_the_authors():
    target = random_llama(1).config
    unnamed = replace(random_head(random_llama(1)).eagle, feature_layers=None)
    assert unnamed.layers_of(replace(target, num_hidden_layers=32)) == (2, 16, 29)


@pytest.mark.parametrize("L", [4, 5, 6])
def test_a_head_may_read_a_layer_twice(compiler, L):
    """The authors' three layers of a small target are not all different."""
    target = random_llama(1, dtype=torch.float32, num_hidden_layers=L)
    unnamed = replace(random_head(random_llama(1)).eagle, feature_layers=None)
    layers = unnamed.layers_of(target.config)
    assert len({*layers}) < 3
    features = target.empty_features(layers, 5)
    features.values.fill_(math.nan)
    cache = KVCache(target.kv_spec(), 5)
    seq, _ = cache.open(())
    target(torch.arange(5), cache.extend([(seq, range(5))]), features=features)
    for layer in layers:
        alone = target.empty_features((layer,), 5)
        target(torch.arange(5), cache.metadata([(seq, 0, 5)]), features=alone)
        for f, other in enumerate(layers):
            assert other != layer or torch.equal(features.values[:, f], alone.values[:, 0])
