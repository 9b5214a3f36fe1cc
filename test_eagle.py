"""EAGLE heads: drafts beside plain formulas, rows beside those of whole texts, the law."""

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
from checkpoint.eagle import EagleConfig, is_eagle
from checkpoint.formats import Quantization
from checkpoint.load import fill_model, load_eagle
from conftest import examples, random_llama, told
from drafters import ModelDrafter
from eagle import EagleDrafter, EagleHead
from errors import UserError
from generate import Engine, Model, generate, load_draft
from kernels import Ops
from kvcache import AttentionMetadata, Cache, KVCache
from model import Llama
from paged import PagedCache
from proof import distance
from request import Request, Settings
from runner import ModelRunner, ScheduledRequest
from sampling import Setting, probabilities
from settings import Options
from speculative import Drawing, Round
from test_kernels import num_found
from test_speculative import Kind, laws_of, play

LAYERS = (1, 0)  # whose inputs the head reads: not in their order
FLAGS = (
    {},
    {"norm_before_residual": True},
    {"norm_before_fc": True},
    {"fc_norm": True, "norm_output": True},
    {"has_embedding": True, "norm_output": True},
    {"has_offsets": False},
)


@torch.no_grad()
def random_head(
    target: Llama, drafted=range(0, 261, 2), seed: int = 5, dtype=torch.float64, bits=16, **flags
) -> EagleHead:
    """Random weights, so large that drafts differ; drafted: the tokens of its vocabulary."""
    layer = replace(
        target.config,
        num_hidden_layers=1,
        intermediate_size=28,
        tie_word_embeddings=False,
        quantization=None,
    )
    C = target.config.hidden_size
    config = EagleConfig(layer, len(drafted), C, feature_layers=LAYERS, **flags)
    head = EagleHead(config, target, dtype=dtype, seed=seed)
    for name, tensor in head.named_tensors().items():
        if tensor.is_floating_point():
            generator = torch.Generator().manual_seed(len(name))
            noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
            tensor.copy_(1 + noise / 4 if "norm" in name else noise / 3)
    head.offsets.copy_(torch.tensor(drafted) - torch.arange(len(drafted)))
    if bits == 16:
        return head
    small = EagleHead(config.quantized(Quantization(bits)), target, dtype=dtype, seed=None)
    fill_model(small, head.named_tensors().items())
    return small


def write_head(folder, head: EagleHead, layout: str = "speculators"):
    """A folder of the head, in either layout; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = head.eagle.to_dict("target")
    tensors = {name: tensor.contiguous() for name, tensor in head.named_tensors().items()}
    if layout == "authors":
        layer = config.pop("transformer_layer_config")
        del config["speculators_config"], config["speculators_model_type"]
        config = layer | config | {"architectures": ["LlamaForCausalLMEagle3"]}
        tensors = {name.replace("layers.0", "midlayer"): x for name, x in tensors.items()}
        tensors["t2d"] = torch.zeros(head.eagle.layer.vocab_size, dtype=torch.bool)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# ---- The formulas, plainly


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x: Tensor, theta: float) -> Tensor:
    """Rotary embeddings of rows 0, 1, …: [m, heads, D]."""
    m, _, D = x.shape
    angles = torch.arange(m)[:, None] * theta ** -(torch.arange(0, D, 2) / D)
    angles = angles.to(x.dtype)[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def plain_rows(head: EagleHead, f: Tensor, e: Tensor) -> Tensor:
    """z of all rows: f, e: [m, C]."""
    w = head.named_tensors()
    c = head.eagle.layer
    flags = head.eagle
    m = len(f)
    name = "layers.0."
    token = norm(e, w[name + "input_layernorm.weight"], c.rms_norm_eps)
    feature = norm(f, w[name + "hidden_norm.weight"], c.rms_norm_eps)
    x = torch.cat((token, feature), -1)
    q, k, v = (
        (x @ w[f"{name}self_attn.{part}_proj.weight"].T).view(m, -1, c.head_dim) for part in "qkv"
    )
    if c.model_type == "qwen3":
        q = norm(q, w[name + "self_attn.q_norm.weight"], c.rms_norm_eps)
        k = norm(k, w[name + "self_attn.k_norm.weight"], c.rms_norm_eps)
    q = turned(q, c.rope_theta)
    k = turned(k, c.rope_theta)
    heads = []
    for h in range(c.num_attention_heads):
        g = h // (c.num_attention_heads // c.num_key_value_heads)
        scores = q[:, h] @ k[:, g].T / c.head_dim**0.5
        scores = scores.masked_fill(torch.ones(m, m).triu(1) > 0, -torch.inf)
        heads.append(scores.softmax(-1) @ v[:, g])
    attn_out = torch.cat(heads, -1) @ w[name + "self_attn.o_proj.weight"].T
    y = (feature if flags.norm_before_residual else f) + attn_out
    normed = norm(y, w[name + "post_attention_layernorm.weight"], c.rms_norm_eps)
    gate = normed @ w[name + "mlp.gate_proj.weight"].T
    up = normed @ w[name + "mlp.up_proj.weight"].T
    z = y + (gate * gate.sigmoid() * up) @ w[name + "mlp.down_proj.weight"].T
    return norm(z, w["norm.weight"], c.rms_norm_eps) if flags.norm_output else z


def plain_features(target: Llama, text: list[int]) -> Tensor:
    """x at the inputs of LAYERS, side by side: [m, n C]."""
    metadata = AttentionMetadata.without_cache(1, len(text))
    rope = target.rope(metadata.positions)
    x = target.ops.embed(torch.tensor(text), target.embed, target.dtype)
    inputs = []
    for i, layer in enumerate(target.layers):
        inputs.append(x)
        y, mlp_out = target.decoder_layer(layer, x, None, rope, metadata, i)
        x = y + mlp_out
    return torch.cat([inputs[i] for i in LAYERS], -1)


def combined(head: EagleHead, features: Tensor) -> Tensor:
    """f: [m, n C] -> [m, C]."""
    w = head.named_tensors()
    eps = head.eagle.layer.rms_norm_eps
    if head.eagle.norm_before_fc:
        features = norm(features, w["input_norm.weight"], eps)
    if head.eagle.fc_norm:
        parts = enumerate(features.chunk(len(LAYERS), -1))
        features = torch.cat([norm(x, w[f"fc_norm.{i}.weight"], eps) for i, x in parts], -1)
    return features @ w["fc.weight"].T


def plain_chain(head: EagleHead, target: Llama, text: list[int], drafts: list[int]) -> Tensor:
    """The logits of each draft, given the drafts before it: [k, V]. All rows anew for each."""
    w = head.named_tensors()
    embedding = w.get("embed_tokens.weight", target.embed.weight)
    f = combined(head, plain_features(target, text[:-1]))
    e = embedding[torch.tensor(text[1:])]
    logits = []
    for draft in drafts:
        z = plain_rows(head, f, e)[-1:]
        out = (
            z
            if head.eagle.norm_output
            else norm(z, w["norm.weight"], head.eagle.layer.rms_norm_eps)
        )
        lowest = torch.finfo(torch.float64).min
        row = torch.full((target.config.vocab_size,), lowest, dtype=torch.float64)
        ids = torch.arange(len(w["lm_head.weight"]))
        if "d2t" in w:
            ids = ids + w["d2t"]
        row[ids] = (out @ w["lm_head.weight"].T)[0]
        logits.append(row)
        f = torch.cat((f, z))
        e = torch.cat((e, embedding[draft][None]))
    return torch.stack(logits)


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


def test_a_request_drafts_as_if_it_were_alone(pair):
    """Beside one that wants fewer drafts, and comes before it."""
    target, head = pair
    cache = PagedCache(target.kv_spec(draft_layers=1), 40, 4)
    runner = make_runner(target, head, cache)
    requests = []
    for seed in (1, 2):
        request = Request(list(range(40, 50 + seed)), Settings(1.0, seed=seed, max_tokens=20))
        runner.open(request)
        runner.step([runner.schedule(request)])
        requests.append(request)
    alone, _ = proposed(runner, requests[1], 3)
    both = Round(requests, [1, 3], runner.drawing, target=runner.target)
    assert runner.drafter.propose(both).tokens[1].tolist() == alone


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


@examples(12)
@given(st.data())
def test_every_text_is_the_plain_one_and_every_row_that_of_the_whole_text(pair, data):
    """In batches, with shared prefixes, forks, preemption, chunks; greedy, and in coupled mode. An
    exact text with a fixed γ is that which the head drafts for it alone."""
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
    own_cache = KVCache(target.kv_spec(draft_layers=1), 48)
    own_drafter = EagleDrafter(head, own_cache) if mode == "exact" else None
    own_runner = ModelRunner(target, own_cache, Drawing(V), drafter=own_drafter)
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
    for request in requests:
        alone = Request(request.tokens[: request.num_prompt_tokens], request.settings, (7,))
        list(Batcher(own_runner, 1).run([alone]))
        assert request.tokens == alone.tokens
    assert not runner.drafter.newest


def test_a_preempted_text_is_drafted_as_if_nothing_had_been(pair):
    """In exact mode, with a fixed γ: a round without drafts would make another text."""
    target, head = pair

    def texts(blocks: int, max_batch: int) -> list[Request]:
        cache = PagedCache(target.kv_spec(draft_layers=1), blocks, 4)
        runner = make_runner(target, head, cache)
        chosen = [Settings(1.0, seed=seed, max_tokens=20, gamma=2) for seed in range(6)]
        requests = [Request([1, 2, 3], settings) for settings in chosen]
        list(Batcher(runner, max_batch).run(requests))
        return requests

    alone = texts(100, 1)
    together = texts(14, 6)
    assert sum(request.num_preemptions for request in together) > 3
    assert [request.tokens for request in together] == [request.tokens for request in alone]


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


def shifted_features(monkeypatch):
    combine = EagleHead.combine
    monkeypatch.setattr(EagleHead, "combine", lambda self, x: combine(self, x).roll(1, 0))


def fed_back_rows_stay(monkeypatch):
    learn = EagleDrafter.learn

    def learn_first(self, scheduled, features):
        scheduled = [item._replace(num_drafts=0) for item in scheduled]
        learn(self, scheduled, features)

    monkeypatch.setattr(EagleDrafter, "learn", learn_first)


def normalized_state(monkeypatch):
    rows = EagleHead.rows

    def normalized(self, *arguments):
        z = rows(self, *arguments)
        return self.ops.add_norm(z, None, self.norm, 1e-6)[1]

    monkeypatch.setattr(EagleHead, "rows", normalized)


def position_off_by_one(monkeypatch):
    """In the chain alone: all rows together may be shifted."""
    propose = EagleDrafter.propose

    def shifted(self, round):
        rope = self.model.rope
        self.model.rope = lambda positions: rope(positions + 1)
        try:
            return propose(self, round)
        finally:
            del self.model.rope

    monkeypatch.setattr(EagleDrafter, "propose", shifted)


def tokens_off_by_one(monkeypatch):
    tokens = EagleHead.tokens.func
    monkeypatch.setattr(EagleHead, "tokens", property(lambda self: (tokens(self) + 1) % 261))


def blocks_without_the_next_token(monkeypatch):
    none = property(lambda self: 0, lambda self, value: None)
    monkeypatch.setattr(PagedCache, "lookahead", none, raising=False)


BUGS = (
    shifted_features,
    fed_back_rows_stay,
    normalized_state,
    position_off_by_one,
    tokens_off_by_one,
    blocks_without_the_next_token,
)


@pytest.mark.parametrize("plant", [None, *BUGS], ids=lambda plant: plant and plant.__name__)
def test_planted_bugs_are_caught(pair, monkeypatch, plant):
    """Each leaves the texts as they were: verification is exact for any draft."""

    def check() -> None:
        plain = random_head(pair[0])
        check_drafts(random_head(pair[0]).pack_weights(), plain, pair[0])
        check_texts(pair)

    if plant is None:
        check()
        return
    plant(monkeypatch)
    with pytest.raises(AssertionError):
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


# ---- The law


@pytest.mark.parametrize(
    "draft, bits, coupled",
    [("head", 16, False), ("head", 16, True), ("head", 4, False), ("model", 4, False)],
)
def test_law_is_the_targets_with_a_head_and_with_a_rounded_draft(draft, bits, coupled):
    """By enumeration, rows of all kinds side by side, of a Llama with 3 tokens."""
    shape = dict(vocab_size=3, num_hidden_layers=2, max_position_embeddings=8, eos_token_ids=())
    target = random_llama(4, ops=Ops(), **shape)
    head = random_head(target, drafted=(0, 2), bits=bits).pack_weights()
    small = random_llama(5, ops=Ops(), quantization=Quantization(4), **shape)
    kinds = [
        Kind((2,), 2, 3, (2,)),
        Kind((0, 1), 1, 3),
        Kind((1, 1), 0, 2),
        Kind((0,), 2, 3, (), dict(temperature=0.5)),
        Kind((2, 1), 2, 3, (), dict(top_k=2)),
        Kind((1, 2), 2, 3, (1,), dict(top_p=0.6)),
        Kind((0, 2), 2, 3, (), dict(min_p=0.3)),
        Kind((1, 0), 2, 3, (), dict(temperature=0.0)),
    ]

    def runner_of(n: int, make_coin) -> ModelRunner:
        cache = KVCache(target.kv_spec(draft_layers=1), 8, n)
        drafter = EagleDrafter(head, cache)
        if draft == "model":
            drafter = ModelDrafter(small, KVCache(small.kv_spec(), 8, n))
        return ModelRunner(target, cache, Drawing(3, coupled, make_coin), drafter=drafter)

    for kind, law in zip(kinds, laws_of(kinds, runner_of), strict=True):
        assert distance(law, law_of(target, kind)) < 1e-12


def law_of(target: Llama, kind: Kind) -> dict:
    """The target's own, a token after the other."""
    law = {(): 1.0}
    for _ in range(kind.max_tokens):
        longer = {}
        for text, mass in law.items():
            if text and text[-1] in kind.ends:
                longer[text] = mass
                continue
            logits = target(torch.tensor([*kind.prompt, *text]))[-1:]
            for token, p in enumerate(probabilities(logits, **kind.settings)[0].tolist()):
                if p > 0:
                    longer[(*text, token)] = mass * p
        law = longer
    return law


# ---- With everything else


@pytest.mark.parametrize("bits, kv, kv_bits", [(8, "paged", "8/4"), (4, "contiguous", "4")])
def test_a_head_drafts_for_quantized_targets_and_caches(base, tmp_path, bits, kv, kv_bits):
    """In as few bits. Coupled texts, and greedy ones, are those without a draft."""
    model = Model.load(base, "cpu", torch.float64, bits)
    folder = write_head(tmp_path / "head", random_head(model.llama))
    draft = load_draft(folder, model)
    assert draft.models[0].config.quantization.bits == bits
    texts = []
    for one in (None, draft):
        engine = Engine(
            model,
            one,
            Options(max_len=90, max_batch=2, verify="coupled", kv=kv, kv_bits=kv_bits),
            tokens=400,
        )
        requests = []
        for seed in range(3):
            temperature = 1.0 if seed else 0.0
            chosen = Settings(temperature, top_k=3, seed=seed, max_tokens=20, gamma=one and 3)
            requests.append(Request(model.encode("abc" * (1 + seed % 2)), chosen))
        list(engine.batcher.run(requests))
        texts.append([request.tokens for request in requests])
    assert texts[0] == texts[1]
    assert all(max(stats.num_drafts for stats in r.rounds) == 3 for r in requests)


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
        (tensors | {"layers.1.mlp.weight": offsets.clone()}, "no place"),
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
