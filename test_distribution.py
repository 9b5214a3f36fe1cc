"""Whatever drafts, and however it is verified, stored, preempted and masked: outputs follow the
target's distribution. Both are enumerated. Planted bugs change what is enumerated; those that
other engines shipped name their issue."""

from importlib.util import find_spec

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import grammar as grammar_page
from batcher import Batcher
from checkpoint.formats import Quantization
from conftest import examples
from drafters import ModelDrafter, SelfDrafter
from eagle import EagleDrafter
from gamma import speed_ups
from grammar import GrammarState, Masks
from kernels import Ops
from kvcache import Cache, KVCache, KVSpec
from museum import planted
from paged import PagedCache
from proof import Toy, Walk, distance, enumerate_distribution
from runner import ModelRunner
from sampling import penalize
from settings import PENALTIES, SETTINGS
from speculative import (
    Drawing,
    Proposal,
    Round,
    likelihood_ratio,
    pick_residual,
    verify,
    verify_block,
)
from testing.heads import random_head
from testing.models import random_llama
from testing.toys import (
    COPY,
    DRAFT,
    END,
    KINDS,
    REPEATS,
    RULED,
    TARGET,
    FourTokens,
    Kind,
    distributions_of,
    grammars,
    new_tokens,
    play,
    several_tokens,
    toy_cache,
    toy_runner,
)

needs_llguidance = pytest.mark.skipif(not find_spec("llguidance"), reason="needs llguidance")
FEW = (0, 1, 2, -2, -1)  # of the kinds
PLAIN = [kind._replace(gamma=0) for kind in KINDS[:3]]


def shorter(kinds: list[Kind]) -> list[Kind]:
    """In coupled mode each row of a round is a decision."""
    return [kind._replace(gamma=min(kind.gamma, 1), max_tokens=3) for kind in kinds]


WAYS = [  # the kinds of rows side by side, and how they are made
    (KINDS, dict(where="own")),
    ([KINDS[i] for i in FEW], dict(where="own", by_token=True)),
    (KINDS, dict(where="last token")),
    *(
        ([KINDS[i] for i in FEW], dict(draft=COPY, where=where, by_token=by_token))
        for where in ("contiguous", "paged")
        for by_token in (False, True)
    ),
]
WAYS += [
    (shorter([KINDS[i] for i in FEW]), dict(where=where)) for where in ("n-grams", "ngram,own")
]
RULED_WAYS = [
    (RULED, dict(where="own")),
    *(([RULED[i] for i in FEW], dict(where=where)) for where in ("contiguous", "paged")),
    (shorter([RULED[i] for i in FEW]), dict(where="n-grams")),
]


def check(kinds: list[Kind], target=TARGET, **how) -> None:
    for kind, distribution in zip(
        kinds, distributions_of(kinds, target=target, **how), strict=True
    ):
        assert sum(distribution.values()) == pytest.approx(1, abs=1e-12)
        assert distance(distribution, kind.distribution(target)) < 1e-12, kind


@pytest.mark.parametrize("kinds, how", WAYS, ids=range(len(WAYS)))
def test_outputs_follow_the_targets_distribution(kinds, how):
    check(kinds, **how)


@pytest.mark.parametrize("n", [2, 3])
def test_outputs_of_several_tokens_a_step_follow_it(n):
    with several_tokens(TARGET, n):
        check(PLAIN, where="nothing")


@pytest.mark.parametrize("where", ["own", "contiguous"])
def test_outputs_of_several_plain_tokens_between_drafts_follow_it(where):
    """γ auto is 0, or 2 where 3 divides the length of the text."""
    steps = set()

    def make_runner(n: int, make_rng) -> ModelRunner:
        runner = toy_runner(n, where=where, make_rng=make_rng)
        runner.drafter.chances = lambda request: [len(request.tokens)]
        runner.auto_gamma.choose = lambda _, chances: 2 * (chances[0] % 3 == 0)
        observe = runner.auto_gamma.observe

        def noted(num_drafts: list[int], seconds: float, num_rounds: int) -> None:
            steps.add((*num_drafts, num_rounds))
            observe(num_drafts, seconds, num_rounds)

        runner.auto_gamma.observe = noted
        return runner

    kinds = [Kind((0, 1), None, 4, (2,))]
    with several_tokens(TARGET, 2):  # how many depends on other rows, so each is alone
        (distribution,) = distributions_of(kinds, make_runner, width=1)
    assert distance(distribution, kinds[0].distribution()) < 1e-12
    assert {(0, 2), (0, 1), (2, 1)} <= steps


def test_coupled_outputs_follow_it():
    """The target picks, whatever is drafted: a second draft counts only if the first is picked."""
    check(shorter(KINDS[1:10:2]), coupled=True)
    check([KINDS[1]._replace(gamma=2, max_tokens=3)], coupled=True)


def test_outputs_follow_it_with_as_many_look_ups_as_pay():
    """At a fixed price. 0 drafts are a number, too."""
    counts = set()

    def make_runner(n: int, make_rng) -> ModelRunner:
        runner = toy_runner(n, where="n-grams", make_rng=make_rng)

        def choose(batch_size: int, chances: list[float]) -> int:
            gains = speed_ups(chances, [1.3, 1.35, 1.4])
            counts.add(gains.index(max(gains)))
            return gains.index(max(gains))

        runner.auto_gamma.choose = choose
        return runner

    kinds = [Kind((0, 1), None, 4, (2,)), Kind((2,), None, 4), Kind((1, 1, 0), None, 3)]
    for kind, distribution in zip(kinds, distributions_of(kinds, make_runner), strict=True):
        assert distance(distribution, kind.distribution()) < 1e-12
    assert 0 in counts and len(counts) > 2


class Stopping(ModelDrafter):
    """Ends a row's drafts before draft j if rule(q, x, j), for its distributions and tokens."""

    def __init__(self, rule, *others):
        super().__init__(*others)
        self.rule = rule

    def propose(self, round: Round) -> Proposal:
        proposal = super().propose(round)
        for b, (q, x) in enumerate(zip(proposal.q, proposal.tokens.tolist())):
            wanted = range(round.num_drafts[b])
            count = next((j for j in wanted if self.rule(q, x, j)), len(wanted))
            proposal.tokens[b, count:] = -1
            q[count:] = 0
            round.num_drafts[b] = count
        return proposal


STOPS = {  # a rule -> whether outputs follow the target's distribution
    "before a draft, by the shape of its q": (lambda q, x, j: q[j].max() < 0.6, True),
    "before a draft, by the drafts before it": (lambda q, x, j: j and x[j - 1] == 1, True),
    "after a draft that q thought unlikely; it is verified": (
        lambda q, x, j: j and q[j - 1, x[j - 1]] < 0.4,
        True,
    ),
    "a drawn draft is dropped because q thought it unlikely": (
        lambda q, x, j: q[j, x[j]] < 0.4,
        False,
    ),
}


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("rule", STOPS)
def test_the_number_of_drafts_may_follow_what_is_known_before_a_draw(rule, by_token):
    stops, is_exact = STOPS[rule]

    def make_runner(n: int, make_rng) -> ModelRunner:
        drafter = Stopping(stops, DRAFT, toy_cache(n))
        drawing = Drawing(3, make_rng=make_rng, by_token=by_token)
        return ModelRunner(TARGET, toy_cache(n), drawing, drafter=drafter)

    kinds = [Kind((2,), 2, 3)]
    errors = []
    for kind, distribution in zip(kinds, distributions_of(kinds, make_runner), strict=True):
        errors.append(distance(distribution, kind.distribution()))
    assert max(errors) < 1e-12 if is_exact else min(errors) > 1e-3


def test_every_setting_has_a_kind():
    assert SETTINGS.keys() | PENALTIES.keys() == {name for kind in KINDS for name in kind.settings}


def check_ruled(kinds: list[Kind], **how) -> None:
    check(kinds, FourTokens(seed=1), draft=FourTokens(seed=2), grammars=grammars(), **how)


@needs_llguidance
@pytest.mark.parametrize("kinds, how", RULED_WAYS, ids=range(len(RULED_WAYS)))
def test_outputs_follow_it_over_what_a_grammar_allows(kinds, how):
    check_ruled(kinds, **how)


@needs_llguidance
def test_coupled_outputs_follow_it_with_masks_that_are_filled_one_by_one(monkeypatch):
    """As if all were slow, and none of them too slow."""
    monkeypatch.setattr(grammars(), "is_slow", True)
    monkeypatch.setattr(grammar_page, "SLOW_STEP", -1.0)
    monkeypatch.setattr(grammar_page, "SLOW_MASK", torch.inf)
    check_ruled(shorter(RULED[:3]), coupled=True)


def small_runner(n: int, make_rng, draft) -> ModelRunner:
    """Its pool is so small that requests are preempted, and read again."""
    spec = KVSpec(1, 1, 1, dtype=torch.float64)
    blocks = max(3, n // 2)
    cache = PagedCache(spec, blocks, 2)
    drafter = SelfDrafter(draft, cache)
    if draft is DRAFT:
        drafter = ModelDrafter(draft, PagedCache(spec, 2 * blocks, 1))
    return ModelRunner(TARGET, cache, Drawing(3, make_rng=make_rng), drafter=drafter)


@pytest.mark.parametrize("draft", [DRAFT, COPY], ids=["own cache", "the target's"])
def test_preempted_outputs_follow_it(draft):
    num_preemptions = []

    def serve(runner: ModelRunner, requests: list) -> None:
        list(Batcher(runner, max(2, len(requests))).run(requests))
        num_preemptions.extend(request.num_preemptions for request in requests)

    penalties = dict(repetition_penalty=1.5, frequency_penalty=0.5)
    kinds = [Kind((1,), 2, 4, (1,)), Kind((0, 2), 1, 4, (0,)), Kind((2, 1), 3, 3, (1,), penalties)]
    distributions = distributions_of(kinds, small_runner, serve, width=64, draft=draft)
    for kind, distribution in zip(kinds, distributions, strict=True):
        assert distance(distribution, kind.distribution()) < 1e-12
    assert sum(num_preemptions) > 10


@pytest.mark.parametrize(
    "draft, bits, coupled",
    [("head", 16, False), ("head", 16, True), ("head", 4, False), ("model", 4, False)],
)
def test_outputs_of_a_llama_follow_it(draft, bits, coupled):
    """Of 3 tokens, with an EAGLE head and with a rounded draft."""
    shape = dict(vocab_size=3, num_hidden_layers=2, max_position_embeddings=8, eos_token_ids=())
    target = random_llama(4, ops=Ops(), **shape)
    head = random_head(target, drafted=(0, 2), bits=bits).pack_weights()
    small = random_llama(5, ops=Ops(), quantization=Quantization(4), **shape)

    def runner_of(n: int, make_rng) -> ModelRunner:
        cache = KVCache(target.kv_spec(draft_layers=1), 8, n)
        drafter = EagleDrafter(head, cache)
        if draft == "model":
            drafter = ModelDrafter(small, KVCache(small.kv_spec(), 8, n))
        return ModelRunner(target, cache, Drawing(3, coupled, make_rng), drafter=drafter)

    kinds = [
        Kind((2,), 2, 3, (2,)),
        Kind((1, 1), 0, 2),
        Kind((0,), 2, 3, (), dict(temperature=0.5)),
        Kind((1, 2), 2, 3, (1,), dict(top_p=0.6)),
        Kind((1, 0), 2, 3, (), dict(temperature=0.0)),
    ]
    for kind, distribution in zip(kinds, distributions_of(kinds, runner_of), strict=True):
        assert distance(distribution, kind.distribution(target)) < 1e-12


# ---- Any models, and any grammar


@examples(8)
@given(
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.integers(1, 3),
    st.sampled_from([(), (0,), (1, 2)]),
)
def test_outputs_follow_any_target_with_any_draft(target, draft, gamma, ends):
    """Their tables have zeros, ties and one-hots (proof.Toy)."""
    target = Toy(longest=4, seed=target)
    kind = Kind((2,), gamma, 3, ends=ends)
    check([kind], target, draft=Toy(longest=4, seed=draft))


@needs_llguidance
@examples(6)
@given(
    st.from_regex(r"\A([ab][*?+]?|\([ab]\|[ab]{2}\)[*?]?){1,3}\Z"),
    st.integers(1, 3),
    st.sampled_from([{}, dict(top_k=2), REPEATS, dict(temperature=0.3, min_p=0.2)]),
)
def test_outputs_follow_any_regex(regex, gamma, more):
    kind = Kind((2,), gamma, 3, ends=(END,), settings=dict(regex=regex, **more))
    check_ruled([kind])


def test_rows_are_independent():
    """The joint distribution of two texts of a batch is the product of the target's own."""
    kinds = [Kind((1,), 2, 3, (0,)), Kind((2, 0), 1, 2)]

    def run(walk: Walk, n: int) -> list:
        requests = [kinds[seed % 2].request(seed) for seed in range(2 * n)]
        play(toy_runner(2 * n, make_rng=walk), requests)
        texts = list(map(new_tokens, requests))
        return list(zip(texts[::2], texts[1::2]))

    first, second = (kind.distribution() for kind in kinds)
    product = {(a, b): p * q for a, p in first.items() for b, q in second.items()}
    assert len(product) > 50
    assert distance(enumerate_distribution(run, group=2, width=512), product) < 1e-12


# ---- Planted bugs

RATIO = "p_x / q_x"
CLAMPED = "residual.clamp(min=0)"
MASS = "mass = residual.sum(-1, keepdim=True)"
NORMALIZED = "m / (m + rest)"
OF_BOTH = {  # a bug -> the function, a piece of it, and what is planted there
    "accepted with p alone": (likelihood_ratio, RATIO, "p_x"),
    "dropped because its q was low": (likelihood_ratio, "q_x > 0", "q_x >= 0.3"),
    "accepted because its q was high": (
        likelihood_ratio,
        RATIO,
        "torch.where(q_x > 0.6, 1, p_x / q_x)",
    ),
    "the residual is filtered again": (
        pick_residual,
        MASS,
        f"residual[residual < 0.5 * residual.amax(-1, keepdim=True)] = 0; {MASS}",
    ),
    "the draft is not subtracted": (pick_residual, "p_end - q_end", "p_end"),
    "the residual is not clamped": (pick_residual, CLAMPED, "residual.abs()"),
    "drafts are an argmax, but q is that of a draw (huggingface/transformers#32867)": (
        Round.pick_drafts,
        "self.draft_rng(j, rows).pick(q)",
        "q.argmax(-1)",
    ),
    "the correction is an argmax (sgl-project/sglang#31214)": (
        pick_residual,
        "rng.pick(probs)",
        "probs.argmax(-1)",
    ),
    "p of a draft becomes 0 in place (vllm-project/vllm-ascend#2881)": (
        likelihood_ratio,
        "p_x = p[:, :-1]",
        "p_x = p[:, :-1].scatter_(-1, index, 0)",
    ),
}
BY_TOKEN = {
    "only the drafted token is removed": (
        pick_residual,
        CLAMPED,
        "torch.where((q_end > 0) & (q_end == q_end.amax(-1, keepdim=True)), 0, p_end)",
    ),
    "no bonus: the last distribution once more": (
        pick_residual,
        "p[rows, accepted]",
        "p[rows, accepted - 1 * (q[rows, accepted].sum(-1) == 0)]",
    ),
    "the last draft that passes, as in a block": (
        verify,
        "count_leading(passed)",
        "count_to_last(passed)",
    ),
}
AS_BLOCK = {
    "weights without their cap": (verify_block, "weight.clamp(max=1)", "weight"),
    "the residual is not weighted": (verify_block, "pick_residual(weighted", "pick_residual(p"),
    "the residual of the draft before": (
        pick_residual,
        "q[rows, accepted]",
        "q[rows, accepted - 1]",
    ),
    "the mass without weights": (verify_block, "weighted - q", "p - q"),
    "the weight of the draft before": (
        verify_block,
        "pick_residual(weighted",
        "pick_residual(torch.cat((w[:, :1], w[:, :-1]), 1)[..., None] * p",
    ),
    "the wrong normalizer": (verify_block, NORMALIZED, "m / (m + 1)"),
    "the sum of the draft before": (verify_block, NORMALIZED, "m.roll(1, 1) / (m + rest)"),
    "accepted with its weight": (verify_block, NORMALIZED, "w"),
    "accepted if most probable (ROCm/ATOM#2318)": (
        verify_block,
        "rng.accept(h[:, 1:])",
        "drafted == p[:, :-1].argmax(-1)",
    ),
    "each ratio is capped (vllm-project/vllm-ascend#7807)": (
        verify_block,
        "weights[-1] * ratio_j",
        "weights[-1] * ratio_j.clamp(max=1)",
    ),
    "up to the first that does not stand": (
        verify_block,
        "count_to_last(passed)",
        "count_leading(passed)",
    ),
}
STEPS = {
    "one token short": (Cache.commit, "len(text) - 1)", "len(text) - 2)"),
    "a rejected draft stays": (Cache.commit, "len(text) - 1)", "len(text))"),
    "only the draft is filtered (vllm-project/vllm#10198)": (
        ModelRunner._probabilities,
        "round.probabilities(logits[: len(owners)], owners, depths, drafted)",
        "logits[: len(owners)].softmax(-1)",
    ),
    "greedy unless a temperature is set (NVIDIA/TensorRT-LLM#19390)": (
        Round.probabilities,
        "**settings)",
        "**{'temperature': 1e-5, **settings})",
    ),
}
TEXT = "request.tokens + drafts[b][:depth]"
PENALIZED = {
    "all rows count as the first (sgl-project/sglang#28242)": (
        Round.penalized,
        TEXT,
        "request.tokens",
    ),
    "each row counts all drafts": (Round.penalized, TEXT, "request.tokens + drafts[b]"),
    "of accepted tokens the last counts (sgl-project/sglang#33643)": (
        Round.penalized,
        TEXT,
        f"request.tokens[:1] + ({TEXT})[1:][-1:]",
    ),
    "penalties are ignored (vllm-project/vllm#18902)": (
        Round.probabilities,
        "self.penalized(check_finite(logits), owners, depths, drafted)",
        "logits",
    ),
    "only drafts are penalized": (
        Round.penalized,
        "request.settings.penalties",
        "request.settings.penalties if len({*owners}) == len(owners) else {}",
    ),
    "the prompt counts": (penalize, "text[num_prompt_tokens:]", "text"),
    "the prompt does not": (penalize, "bincount(text", "bincount(output"),
    "negative logits are divided": (penalize, "logits * repetition", "logits / repetition"),
    "the end may come a token early": (penalize, "(output) <", "(output) + 1 <"),
}
APPLIED = "return forbid(logits, masked, self.bits[masks])"
MASKED = "logits = self.masks.apply(logits, owners, depths)"
MASKS = {
    "the mask of the wrong row": (Masks.apply, "self.first_rows[b] + depth", "self.first_rows[b]"),
    "the bonus is not masked": (
        Masks._fill,
        "for b in requests:",
        "for b in requests if depth in (0, *range(len(self.bits) // len(self.states) - 1))"
        " else ():",
    ),
    "only drafts are masked": (
        Masks.apply,
        APPLIED,
        f"{APPLIED} if len({{*owners}}) == len(owners) else logits",
    ),
    "drafts are not taken back (vllm-project/vllm#30916)": (
        GrammarState.settle,
        "not self.matcher.rollback(self.num_drafts)",
        "False",
    ),
    "a grammar gets tokens twice (sgl-project/sglang#29102)": (
        GrammarState.settle,
        "self._follow(new)",
        "self._follow([*new, *new])",
    ),
    "the end of an output is taken back, too": (
        GrammarState.push,
        "self.drafts_ended = True",
        "self.drafts_ended = True; self.num_drafts += not is_token",
    ),
    "filters before the mask": (
        Round.probabilities,
        MASKED,
        f"logits = self.ops.probabilities(logits, **settings).log(); settings = {{}}; {MASKED}",
    ),
}


def error_of(kinds: list[Kind], target=TARGET, **how) -> float:
    """How far these distributions are from the target's; 1 if it falls apart before."""
    try:
        distributions = distributions_of(kinds, target=target, **how)
    except (AssertionError, LookupError, RuntimeError, ValueError):  # `play` or a cache sees it
        return 1.0
    return max(
        distance(distribution, kind.distribution(target))
        for kind, distribution in zip(kinds, distributions, strict=True)
    )


def check_caught(bugs: dict[str, tuple], kinds: list[Kind], **how) -> None:
    assert error_of(kinds, **how) < 1e-12
    for bug, (function, right, wrong) in bugs.items():
        with planted(function, right, wrong):
            assert error_of(kinds, **how) > 1e-3, bug


@pytest.mark.parametrize("by_token", [False, True])
def test_enumeration_catches_every_planted_verify(by_token):
    bugs = OF_BOTH | (BY_TOKEN if by_token else AS_BLOCK)
    check_caught(bugs, [Kind((2,), 2, 3)], by_token=by_token)


def test_enumeration_catches_steps_that_are_wrong():
    check_caught(STEPS, [Kind((0,), 1, 3), Kind((0,), 1, 3, settings=dict(top_p=0.6))])


def test_enumeration_catches_penalties_that_are_wrong():
    penalties = dict(presence_penalty=0.7, frequency_penalty=0.5, min_tokens=2)
    check_caught(PENALIZED, [Kind((0,), 2, 3, (2,), dict(repetition_penalty=1.5, **penalties))])


@needs_llguidance
@pytest.mark.slow
def test_enumeration_catches_masks_that_are_wrong():
    kinds = [
        Kind((1,), 2, 4, (END,), dict(regex="(ab?)*", top_k=2)),
        Kind((1,), 2, 3, (END,), dict(regex="a?b?a?b?")),
    ]
    toys = dict(target=FourTokens(seed=1), draft=FourTokens(seed=2))
    check_caught(MASKS, kinds, **toys, grammars=grammars())
