"""Speculative sampling: its output law by enumeration beside the target's own, and planted bugs."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import museum
from conftest import Cipher, Place, examples
from drafters import ModelDrafter, NgramDrafter, SelfDrafter
from kernels import Ops
from kvcache import KVCache, KVSpec
from paged import PagedCache
from proof import Toy, Walk, WalkingCoin, distance, enumerate_law, sequential_law, surprise
from request import Request, Settings
from runner import ModelRunner
from sampling import TEXT, Keyed, counters, draft_role, mix, probabilities, uniform
from settings import RULES, SETTINGS
from speculative import (
    Drawing,
    Round,
    couple,
    likelihood_ratio,
    pick_residual,
    verify,
    verify_block,
)

CPU = torch.device("cpu")
TARGET = Toy(seed=1)
DRAFT = Toy(seed=2)
COPY = Cipher(seed=2)  # what it stores, no other toy can read


class Kind(NamedTuple):
    """A kind of row."""

    prompt: tuple[int, ...]
    gamma: int
    max_tokens: int
    ends: tuple[int, ...] = ()
    settings: dict[str, float] = {}

    def request(self, seed: int) -> Request:
        chosen = Settings(seed=seed, max_tokens=self.max_tokens, gamma=self.gamma, **self.settings)
        return Request(list(self.prompt), chosen, self.ends)

    def law(self, target: Toy = TARGET) -> dict:
        """The target's own."""
        return sequential_law(
            target,
            self.prompt,
            self.max_tokens,
            self.ends,
            lambda logits: probabilities(logits, **self.settings),
        )


def toy_cache(sequences: int, paged: bool = False) -> KVCache | PagedCache:
    if paged:
        return PagedCache(KVSpec(1, 1, 1, dtype=torch.float64), 7 * sequences, 1)
    return KVCache(KVSpec(1, 1, 1, dtype=torch.float64), 7, sequences)


def toy_runner(
    n: int,
    target=TARGET,
    draft=DRAFT,
    where="own",
    coupled=False,
    make_coin=None,
    by_token=False,
    **options,
) -> ModelRunner:
    """where: the draft's keys and values: its own cache, or the target's, contiguous or paged; or
    n-grams, which have none."""
    cache = toy_cache(n, where == "paged")
    drafter = ModelDrafter(draft, toy_cache(n))
    if where == "n-grams":
        drafter = NgramDrafter()
    elif where != "own":
        drafter = SelfDrafter(draft, cache)
    drawing = Drawing(target.V, coupled, make_coin, by_token=by_token)
    return ModelRunner(target, cache, drawing, drafter=drafter, **options)


def new_tokens(request: Request) -> tuple[int, ...]:
    return tuple(request.tokens[request.num_prompt_tokens :])


def play(runner: ModelRunner, requests: Sequence[Request]) -> None:
    """All texts to their ends, and what must hold after every step."""
    for request in requests:
        runner.open(request)
    drafter = runner.drafter
    while scheduled := [runner.schedule(r) for r in requests if not r.finish_reason]:
        assert all(item.num_new_tokens <= runner.budget for item in scheduled)
        new = runner.step(scheduled)
        for item in scheduled:
            request = item.request
            assert request.num_remaining >= 0
            assert item.samples == (request in new)
            caches = [(runner.cache, request.seq)]
            if item.samples:
                assert runner.num_pending(request) == 1
            if isinstance(drafter, ModelDrafter) and request in drafter.seqs:
                assert drafter.cache.length(drafter.seqs[request]) < len(request.tokens)
                caches.append((drafter.cache, drafter.seqs[request]))
            for cache, seq in caches:  # accepted drafts, too, by their tokens
                assert cache.sequence(seq).tokens == request.tokens[: cache.length(seq)]


# ---- The proof by enumeration


class PaddedCoin(WalkingCoin):
    """In coupled mode rows of zeros are padding, and nothing is decided there."""

    def __getitem__(self, rows):
        return PaddedCoin(super().__getitem__(rows).branches)

    def pick(self, probs: Tensor) -> Tensor:
        rows = probs.sum(-1).nonzero()[:, 0].tolist()
        picked = torch.zeros(len(probs), dtype=torch.int64)
        picked[rows] = WalkingCoin([self.branches[row] for row in rows]).pick(probs[rows])
        return picked


def laws_of(kinds: Sequence[Kind], make_runner=toy_runner, **options) -> list[dict]:
    """The law of each kind of row, from batches in which rows of all kinds lie side by side.
    make_runner(n, make_coin, **options): for n rows."""

    def run(walk: Walk, n: int) -> list:
        chosen = [branch.decide([1.0] * len(kinds)) for branch in walk.branches]
        requests = [kinds[i].request(row) for row, i in enumerate(chosen)]

        def coin(*keys):
            return PaddedCoin(walk(*keys).branches)

        play(make_runner(n, make_coin=coin, **options), requests)
        return list(zip(chosen, map(new_tokens, requests)))

    laws = enumerate_law(run, width=512)
    return [{text: p for (kind, text), p in laws.items() if kind == i} for i in range(len(kinds))]


KINDS = [  # γ from 0 to 3, ends and limits anywhere, and every setting
    Kind((2,), 3, 4, (2,)),
    Kind((0, 2), 2, 4, (0,)),
    Kind((2, 1, 0), 1, 3),
    Kind((0,), 0, 3),
    Kind((1, 1), 3, 2, (2,)),
    Kind((0, 1), 2, 3, (), dict(temperature=0.5)),
    Kind((1, 0), 2, 3, (1,), dict(temperature=3.0)),
    Kind((2, 1), 2, 3, (), dict(temperature=0)),
    Kind((0, 1), 2, 3, (), dict(top_k=2)),
    Kind((1, 2), 2, 3, (), dict(top_p=0.6)),
    Kind((2, 1), 2, 3, (), dict(min_p=0.5)),
    Kind((1, 1), 3, 3, (), dict(temperature=0.7, top_k=2, top_p=0.9, min_p=0.05)),
]


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("where", ["own", "contiguous", "paged"])
def test_law_of_every_row_of_a_ragged_batch_is_the_targets(where, by_token):
    draft = DRAFT if where == "own" else COPY
    kinds = KINDS if where == "own" else KINDS[:3] + KINDS[-1:]
    laws = laws_of(kinds, draft=draft, where=where, by_token=by_token)
    for kind, law in zip(kinds, laws, strict=True):
        assert sum(law.values()) == pytest.approx(1, abs=1e-12)
        assert distance(law, kind.law()) < 1e-12, kind


def test_every_setting_has_a_kind():
    assert SETTINGS.keys() == {name for kind in KINDS for name in kind.settings}


def test_law_of_coupled_mode_is_the_targets():
    """Whatever is drafted: the target picks. (That both pick with one noise: the next page.)"""
    kinds = [kind._replace(gamma=min(kind.gamma, 1), max_tokens=3) for kind in KINDS[1:10:2]]
    for kind, law in zip(kinds, laws_of(kinds, coupled=True), strict=True):
        assert distance(law, kind.law()) < 1e-12, kind


@examples(8)
@given(
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.integers(1, 3),
    st.sampled_from([(), (0,), (1, 2)]),
)
def test_law_is_any_targets_with_any_draft(target, draft, gamma, ends):
    """Their tables have zeros, ties and one-hots (proof.Toy)."""
    target = Toy(longest=4, seed=target)
    kind = Kind((2,), gamma, 3, ends=ends)
    (law,) = laws_of([kind], target=target, draft=Toy(longest=4, seed=draft))
    assert distance(law, kind.law(target)) < 1e-12


def test_rows_are_independent():
    """The joint law of two texts of a batch is the product of the target's own laws."""
    kinds = [Kind((1,), 2, 3, (0,)), Kind((2, 0), 1, 2)]

    def run(walk: Walk, n: int) -> list:
        requests = [kinds[seed % 2].request(seed) for seed in range(2 * n)]
        play(toy_runner(2 * n, make_coin=walk), requests)
        texts = list(map(new_tokens, requests))
        return list(zip(texts[::2], texts[1::2]))

    first, second = (kind.law() for kind in kinds)
    product = {(a, b): p * q for a, p in first.items() for b, q in second.items()}
    assert len(product) > 50
    assert distance(enumerate_law(run, group=2, width=512), product) < 1e-12


# ---- Planted bugs: the enumeration sees each


RATIO = "p_x / q_x"
CLAMPED = "residual.clamp(min=0)"
MASS = "mass = residual.sum(-1, keepdim=True)"
RATIO_J = "weights[-1] * ratio_j"
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
    "the last draft that stands, as in a block": (
        verify,
        "count_leading(stands)",
        "count_to_last(stands)",
    ),
}
AS_BLOCK = {
    "weights without their cap": (verify_block, "weight.clamp(max=1)", "weight"),
    "ratios capped, not their product": (
        verify_block,
        RATIO_J,
        "weights[-1] * ratio_j.clamp(max=1)",
    ),
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
    "up to the first that does not stand": (
        verify_block,
        "count_to_last(stands)",
        "count_leading(stands)",
    ),
}


def error_of(kind: Kind, **options) -> float:
    """How far the law of this kind of row is from the target's; 1 if it falls apart before."""
    try:
        (law,) = laws_of([kind], **options)
    except (AssertionError, LookupError, RuntimeError, ValueError):  # `play` or a cache sees it
        return 1.0
    return distance(law, kind.law())


@pytest.mark.parametrize("by_token", [False, True])
def test_enumeration_catches_every_planted_verify(by_token):
    kind = Kind((2,), 2, 3)
    assert error_of(kind, by_token=by_token) < 1e-12
    bugs = OF_BOTH | (BY_TOKEN if by_token else AS_BLOCK)
    for bug, (function, right, wrong) in bugs.items():
        with museum.planted(function, right, wrong):
            assert error_of(kind, by_token=by_token) > 1e-3, bug


def test_enumeration_catches_planted_probabilities(monkeypatch):
    """Soft where temperature is 0; and filters on one side: the draft may draw from what it likes,
    as long as it says so, the target may not. (The target's rows are several of one text.)"""
    right = Ops.probabilities

    def soft(self, logits, masked, temperature):
        return right(self, logits, masked, temperature=1.0)

    with monkeypatch.context() as patch:
        patch.setattr(Ops, "probabilities", soft)
        assert error_of(Kind((0, 2), 2, 3, ends=(), settings=dict(temperature=0))) > 1e-3

    right = Round.probabilities

    def unfiltered(of_draft: bool) -> float:
        def of_round(self, logits, rows, depth=0):
            if max(self.num_drafts) and of_draft == (len(rows) == len(set(rows))):
                return probabilities(logits[:, :3])
            return right(self, logits, rows, depth)

        monkeypatch.setattr(Round, "probabilities", of_round)
        return error_of(Kind((0, 2), 2, 3, ends=(), settings=dict(top_k=2)))

    assert unfiltered(of_draft=True) < 1e-12
    assert unfiltered(of_draft=False) > 1e-3


def test_enumeration_catches_caches_that_are_wrong(monkeypatch):
    """One token short or long after a round; and what a draft leaves in the target's cache."""
    right = KVCache.commit
    for shift in (-1, 1):

        def commit(self, seq, text, num_new):
            right(self, seq, [*text, 0] if shift > 0 else text[:-1], num_new)

        with monkeypatch.context() as patch:
            patch.setattr(KVCache, "commit", commit)
            assert error_of(Kind((0,), 1, 3)) > 1e-3

    right = ModelRunner._run_target

    def keeps(self, scheduled, *inputs):
        """The copy's own value of the last token, instead of the target's."""
        stored = self.cache.values.parts[0]  # [L, N, S, G, D]: block `seq`
        before = stored.clone()
        result = right(self, scheduled, *inputs)
        for item in scheduled:
            if item.num_drafts:
                block = item.request.seq
                last = len(item.request.tokens) - 1
                stored[:, block, last] = before[:, block, last]
        return result

    options = dict(draft=COPY, where="contiguous")
    assert error_of(Kind((1,), 1, 4), **options) < 1e-12
    monkeypatch.setattr(ModelRunner, "_run_target", keeps)
    assert error_of(Kind((1,), 1, 4), **options) > 1e-3


# ---- verify and couple themselves


def distributions(rows: int, V: int) -> st.SearchStrategy:
    weight = st.one_of(st.sampled_from([0.0, 0.0, 1.0, 1.0, 0.5]), st.floats(1e-6, 1))
    row = st.lists(weight, min_size=V, max_size=V).filter(lambda weights: sum(weights) > 0)
    return st.lists(row, min_size=rows, max_size=rows).map(
        lambda weights: torch.nn.functional.normalize(
            torch.tensor(weights, dtype=torch.float64), 1, -1
        )
    )


def weight(function: Callable, w: float, ratio: float) -> float:
    """The probability that a draft stands with those before it, which stand with probability w."""
    return min(1, w * ratio) if function is verify_block else w * min(1, ratio)


def reached(function: Callable, p: Tensor, q: Tensor, count: int) -> float:
    """The probability that at least so many drafts are accepted, as the page's proof says."""
    total = 0.0
    for drafts in product(range(p.shape[1]), repeat=count):
        mass = w = 1.0
        for p_x, q_x in zip(p[range(count), drafts].tolist(), q[range(count), drafts].tolist()):
            mass *= q_x
            w = weight(function, w, p_x / q_x) if q_x > 0 else 0.0
        total += mass * w
    return total


@pytest.mark.parametrize("function", [verify, verify_block])
@given(st.data(), st.integers(2, 5), st.integers(1, 3))
def test_verify_follows_p_and_accepts_as_many_as_it_says(function, data, V, k):
    """For any p and q: each token's law is p's."""
    p = data.draw(distributions(k + 1, V))
    q = p.clone() if data.draw(st.booleans()) else data.draw(distributions(k + 1, V))
    num_drafts = data.draw(st.integers(0, k))
    q[num_drafts:] = 0

    def run(walk: Walk, n: int) -> list:
        coin = WalkingCoin(walk.branches)
        drafted = torch.full((n, k), -1)
        for j in range(num_drafts):
            drafted[:, j] = coin.pick(q[j].expand(n, -1))
        accepted, token = function(p.expand(n, -1, -1), q.expand(n, -1, -1), drafted, coin)
        rows = zip(drafted.tolist(), accepted.tolist(), token.tolist())
        return [(*row[:count], last) for row, count, last in rows]

    law = enumerate_law(run)
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    for j in range(num_drafts + 1):
        before = reached(function, p, q, j)
        assert before == pytest.approx(
            sum(m for text, m in law.items() if len(text) > j), abs=1e-12
        )
        for x in range(V):
            mass = sum(m for text, m in law.items() if len(text) > j and text[j] == x)
            assert mass == pytest.approx(before * p[j, x].item(), abs=1e-12)


class Refuses:
    """A coin that remembers what is asked, accepts nothing, and picks what is most probable."""

    def accept(self, prob: Tensor) -> Tensor:
        assert prob.isfinite().all()
        self.prob = prob
        return torch.zeros_like(prob, dtype=torch.bool)

    def pick(self, probs: Tensor) -> Tensor:
        assert probs.isfinite().all() and (probs.sum(-1) > 0.99).all()
        return probs.argmax(-1)


def expected_drafts(function: Callable, p: list[Tensor], q: list[Tensor]) -> Tensor:
    """How many of k drafts are accepted on average: float[n], for n pairs of models.

    p[j], q[j]: [n, V^j, V], the distributions after each run of j tokens; q has no k-th.
    """
    n, _, V = p[0].shape
    k = len(q)
    runs = torch.arange(V**k)  # of k drafts, in base V
    after = [runs // V ** (k - j) for j in range(k + 1)]  # the runs of their first j
    drafted = torch.stack([code % V for code in after[1:]], 1).repeat(n, 1)  # [n · V^k, k]
    p_of_runs = torch.stack([rows[:, at] for rows, at in zip(p, after)], 2)  # [n, V^k, k + 1, V]
    q_of_runs = torch.stack([rows[:, at] for rows, at in zip(q, after)], 2)
    mass = q_of_runs.flatten(0, 1).gather(2, drafted[..., None]).prod(1).view(n, -1)
    q_of_runs = torch.nn.functional.pad(q_of_runs, (0, 0, 0, 1))
    coin = Refuses()
    function(p_of_runs.flatten(0, 1), q_of_runs.flatten(0, 1), drafted, coin)
    reaches = coin.prob.cumprod(1)  # all drafts so far stand
    if function is verify_block:  # this one stands, or one after it: [n · V^k, k], the last first
        reaches = 1 - (1 - coin.prob).flip(1).cumprod(1)
    return (mass * reaches.sum(1).view(n, -1)).sum(1)


@pytest.mark.parametrize("V, k", [(2, 3), (3, 3), (6, 2), (9, 1)])
def test_a_block_accepts_at_least_as_many_drafts(V, k):
    """For 10,000 pairs of models whose distributions depend on the tokens before."""
    generator = torch.Generator().manual_seed(V)

    def models(rows: int) -> list[Tensor]:
        drawn = []
        for j in range(rows):
            weights = torch.rand(2500, V**j, V, generator=generator, dtype=torch.float64) ** 3
            weights[weights < 0.01] = 0  # impossible tokens
            weights[..., j % V] += 1e-3  # not all are impossible
            drawn.append(weights / weights.sum(-1, keepdim=True))
        return drawn

    p = models(k + 1)
    q = models(k)
    by_token = expected_drafts(verify, p, q)
    as_block = expected_drafts(verify_block, p, q)
    gain = as_block - by_token
    assert gain.min() > -1e-12
    if k == 1:
        assert gain.max() < 1e-12
    else:
        assert gain.max() > 0.05
    single = expected_drafts(verify_block, [x.float() for x in p], [x.float() for x in q])
    torch.testing.assert_close(single.double(), as_block, atol=1e-5, rtol=0)


def test_the_papers_example():
    """Two tokens, and models that do not read the text (Sun et al. 2024, 2)."""
    p = [torch.tensor([1 / 3, 2 / 3]).expand(1, 2**j, 2) for j in range(3)]
    q = [torch.tensor([2 / 3, 1 / 3]).expand(1, 2**j, 2) for j in range(2)]
    assert expected_drafts(verify, p, q).item() == pytest.approx(10 / 9)
    assert expected_drafts(verify_block, p, q).item() == pytest.approx(11 / 9)


@pytest.mark.parametrize("function", [verify, verify_block])
def test_verify_survives_a_residual_without_mass(function):
    """And takes one with little mass for what it is."""
    p = torch.tensor([[[0.25, 0.75, 0.0], [0.0, 0.0, 1.0]]])
    accepted, token = function(p, p, torch.tensor([[1]]), Refuses())  # q = p
    assert accepted.tolist() == [0] and token.tolist() == [1]
    q = p + torch.tensor([-1e-6, 1e-6, 0.0])
    assert function(p, q, torch.tensor([[1]]), Refuses())[1].tolist() == [0]


def test_roles_that_share_numbers_change_the_law():
    """40,000 seeds with production's coin: right as it is, and wrong if two roles are one."""
    n = 40_000
    p = torch.tensor([0.5, 0.3, 0.2])
    q = torch.tensor([0.2, 0.2, 0.6])
    seeds = torch.arange(n)
    positions = torch.full((n,), 7)

    class Shared(Keyed):
        """`accept` uses the first number that `pick` in this role uses."""

        accept_as: int | None = None

        def accept(self, prob):
            if self.accept_as is None:
                return super().accept(prob)
            return uniform(mix(mix(self.keys ^ self.accept_as) + counters(1, CPU))) < prob

    def error(role: int = draft_role(0), accept_as: int | None = None) -> float:
        drafted = Keyed(seeds, positions, role).pick(q.expand(n, -1))
        coin = Shared(seeds, positions)
        coin.accept_as = accept_as
        both = torch.stack((p, p)).expand(n, -1, -1)
        proposed = torch.stack((q, torch.zeros(3))).expand(n, -1, -1)
        accepted, token = verify_block(both, proposed, drafted[:, None], coin)
        first = torch.where(accepted > 0, drafted, token)
        return (torch.bincount(first, minlength=3) / n - p).abs().max().item()

    assert error() < 0.01
    assert error(role=TEXT) > 0.02
    assert error(accept_as=draft_role(0)) > 0.02
    assert error(accept_as=TEXT) > 0.02


@pytest.mark.parametrize("where", [pytest.param("own", marks=pytest.mark.slow), "paged"])
def test_frequencies_of_whole_texts_with_productions_coin(where):
    """Runner, drafter, caches and keyed numbers, in several rounds: χ² of 2,000 texts. It is large
    if two roles are one, if two drafts are, or if each round draws the numbers of the first."""
    kind = Kind((0,), 2, 4, settings=dict(temperature=2.0))

    def error() -> float:
        requests = [kind.request(seed) for seed in range(2000)]
        play(toy_runner(2000, draft=DRAFT if where == "own" else COPY, where=where), requests)
        assert max(len(request.rounds) for request in requests) > 2
        return surprise(list(map(new_tokens, requests)), kind.law())

    assert error() < 4
    for right, wrong in (
        ("draft_role(j)", "TEXT"),
        ("draft_role(j)", "draft_role(0)"),
        ("position = len(request.tokens)", "position = 1"),
    ):
        with museum.planted(Round.keys.func, right, wrong):
            assert error() > 8, wrong


def test_coupled_drafts_are_accepted_as_often_as_the_paper_says():
    """At least (1 − TV) / (1 + TV); of 20,000 seeds, and with production's coin."""
    n = 20_000
    p = torch.tensor([0.5, 0.3, 0.2]).expand(n, 2, -1)
    q = torch.tensor([0.3, 0.3, 0.4]).expand(n, -1)  # TV 0.2
    keys = torch.arange(n).repeat_interleave(2), torch.tensor([7, 8]).repeat(n)
    coin = Keyed(*keys)
    drafted = coin[::2].pick(q)[:, None]
    accepted, token = couple(p, drafted, coin)
    assert accepted.float().mean() > 0.8 / 1.2 - 0.01
    first = torch.where(accepted > 0, drafted[:, 0], token)
    assert torch.equal(first, coin[::2].pick(p[:, 0]))  # the target's own picks
    assert torch.equal(token[accepted > 0], coin[1::2].pick(p[:, 1])[accepted > 0])


# ---- A round: a row's settings, seed and positions


def test_round_gives_each_row_its_own_settings_seed_and_position():
    chosen = [
        Settings(0.5, seed=4),
        Settings(1.0, top_k=2, seed=5),
        Settings(0, min_p=0.1, seed=6),
        Settings(2.0, top_p=0.5, seed=7),
    ]
    requests = [Request([1] * (i + 1), each) for i, each in enumerate(chosen)]
    round = Round(requests, [1, 2, 3, 0], Drawing(5), target=Place())
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    rows = [2, 0, 1, 3, 0]
    probs = round.probabilities(logits, rows)  # two columns are padding
    for row, one, got in zip(rows, logits, probs):
        s = chosen[row]
        alone = probabilities(one[:5], s.temperature, s.top_k, s.top_p, s.min_p)
        assert torch.allclose(got, alone, atol=1e-7)

    def picks(keys: Sequence[tuple[int, int, int]], probs: Tensor) -> list[int]:
        """One row after the other."""
        coins = [Keyed(torch.tensor([s]), torch.tensor([at]), role) for s, at, role in keys]
        return [int(coin.pick(row[None])) for coin, row in zip(coins, probs)]

    probs = torch.full((8, 50), 0.02)  # flat: a pick shows its coin
    assert round.draft_coin(1, [2, 0]).pick(probs[:2]).tolist() == picks(
        [(6, 3, draft_role(1)), (4, 1, draft_role(1))], probs
    )
    assert round.text_coin().pick(probs[:4]).tolist() == picks(
        [(4, 1, TEXT), (5, 2, TEXT), (6, 3, TEXT), (7, 4, TEXT)], probs
    )
    round = Round(requests, [1, 1, 1, 0], Drawing(5, coupled=True), target=Place())
    assert round.draft_coin(1, [2, 0]).pick(probs[:2]).tolist() == picks(
        [(6, 4, TEXT), (4, 2, TEXT)], probs
    )
    keys = [(4 + i, 1 + i + j, TEXT) for i in range(4) for j in range(2)]
    assert round.text_coin().pick(probs).tolist() == picks(keys, probs)


def test_distributions_of_drafts_are_kept_as_they_were_drawn_from():
    """In 16 bits they would be others, and the text would not follow the target."""
    for dtype, kept in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        round = Round([Request([1], Settings(seed=0))], [2], Drawing(5), target=Place(dtype=dtype))
        assert round.no_drafts()[1].dtype == kept


def test_round_passes_settings_by_name_and_leaves_out_those_of_nobody(monkeypatch):
    """A new setting needs a line in SETTINGS and one in Settings; a backend may not know it."""
    asked = {}

    class Recorder(Ops):
        def probabilities(self, logits, masked, **settings):
            asked.update(settings)
            return logits

    def round_of(*chosen: Settings) -> None:
        asked.clear()
        requests = [Request([1], each) for each in chosen]
        round = Round(requests, [0] * len(requests), Drawing(3), target=Place(ops=Recorder()))
        round.probabilities(torch.zeros(len(requests), 3), range(len(requests)))

    round_of(Settings(0.5), Settings(0.5))
    assert asked == {"temperature": 0.5}
    round_of(Settings(0.7, top_k=2), Settings(1.0))
    assert asked["temperature"].tolist() == [0.7, 1.0]  # to the bit, as for a text alone
    assert asked["top_k"].tolist() == [2, 0] and len(asked) == 2  # 0: keeps all
    monkeypatch.setitem(SETTINGS, "coming", 1.0)
    monkeypatch.setitem(RULES, "coming", (0, 1, "between 0 and 1"))
    monkeypatch.setattr(Settings, "coming", None, raising=False)
    round_of(Settings(0.5))
    assert asked == {"temperature": 0.5}
    monkeypatch.setattr(Settings, "coming", 0.9)
    round_of(Settings(0.5))
    assert asked == {"temperature": 0.5, "coming": 0.9}
