"""Speculative sampling: verification by its formulas, and the random numbers of production."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import museum
from kernels import Ops
from proof import Walk, WalkingRng, enumerate_distribution, surprise
from request import Request, Settings
from sampling import Keyed
from settings import SETTINGS
from speculative import (
    Drawing,
    Round,
    couple,
    verify,
    verify_block,
)
from testing.toys import (
    COPY,
    DRAFT,
    Kind,
    Place,
    new_tokens,
    play,
    toy_runner,
)

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
    """The probability that a draft is accepted with those before it, which have probability w."""
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
    """For any p and q: each token's distribution is p's."""
    p = data.draw(distributions(k + 1, V))
    q = p.clone() if data.draw(st.booleans()) else data.draw(distributions(k + 1, V))
    num_drafts = data.draw(st.integers(0, k))
    q[num_drafts:] = 0

    def run(walk: Walk, n: int) -> list:
        rng = WalkingRng(walk.branches)
        drafted = torch.full((n, k), -1)
        for j in range(num_drafts):
            drafted[:, j] = rng.pick(q[j].expand(n, -1))
        accepted, token = function(p.expand(n, -1, -1), q.expand(n, -1, -1), drafted, rng)
        rows = zip(drafted.tolist(), accepted.tolist(), token.tolist())
        return [(*row[:count], last) for row, count, last in rows]

    distribution = enumerate_distribution(run)
    assert sum(distribution.values()) == pytest.approx(1, abs=1e-12)
    for j in range(num_drafts + 1):
        before = reached(function, p, q, j)
        assert before == pytest.approx(
            sum(m for text, m in distribution.items() if len(text) > j), abs=1e-12
        )
        for x in range(V):
            mass = sum(m for text, m in distribution.items() if len(text) > j and text[j] == x)
            assert mass == pytest.approx(before * p[j, x].item(), abs=1e-12)


class Refuses:
    """An rng that remembers what is asked, accepts nothing, and picks what is most probable."""

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
    rng = Refuses()
    function(p_of_runs.flatten(0, 1), q_of_runs.flatten(0, 1), drafted, rng)
    reaches = rng.prob.cumprod(1)  # all drafts so far stand
    if function is verify_block:  # this one passes, or one after it: [n · V^k, k], the last first
        reaches = 1 - (1 - rng.prob).flip(1).cumprod(1)
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


WRONG_KEYS = (
    ("draft_role(j)", "TEXT"),
    ("draft_role(j)", "draft_role(0)"),
    ("position = len(request.tokens)", "position = 1"),
)


@pytest.mark.parametrize(
    "where, bugs", [("paged", ()), pytest.param("own", WRONG_KEYS, marks=pytest.mark.slow)]
)
def test_frequencies_of_whole_texts_with_productions_rng(where, bugs):
    """Runner, drafter, caches and keyed numbers, in several rounds: χ² of 2,000 texts. It is large
    if two roles are one, if two drafts are, or if each round draws the numbers of the first."""
    kind = Kind((0,), 2, 4, settings=dict(temperature=2.0))

    def error() -> float:
        requests = [kind.request(seed) for seed in range(2000)]
        play(toy_runner(2000, draft=DRAFT if where == "own" else COPY, where=where), requests)
        assert max(len(request.rounds) for request in requests) > 2
        return surprise(list(map(new_tokens, requests)), kind.distribution())

    assert error() < 4
    for right, wrong in bugs:
        with museum.planted(Round.keys.func, right, wrong):
            assert error() > 8, wrong


def test_coupled_drafts_are_accepted_as_often_as_the_paper_says():
    """At least (1 − TV) / (1 + TV); of 20,000 seeds, and with production's rng."""
    n = 20_000
    p = torch.tensor([0.5, 0.3, 0.2]).expand(n, 2, -1)
    q = torch.tensor([0.3, 0.3, 0.4]).expand(n, -1)  # TV 0.2
    keys = torch.arange(n).repeat_interleave(2), torch.tensor([7, 8]).repeat(n)
    rng = Keyed(*keys)
    drafted = rng[::2].pick(q)[:, None]
    accepted, token = couple(p, drafted, rng)
    assert accepted.float().mean() > 0.8 / 1.2 - 0.01
    first = torch.where(accepted > 0, drafted[:, 0], token)
    assert torch.equal(first, rng[::2].pick(p[:, 0]))  # the target's own picks
    assert torch.equal(token[accepted > 0], rng[1::2].pick(p[:, 1])[accepted > 0])


# ---- A round


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
    """A new setting is declared in Settings; a backend may not know it."""
    asked = {}

    class Recorder(Ops):
        def probabilities(self, logits, masked, **settings):
            asked.update(settings)
            return logits

    def round_of(*chosen: Settings) -> None:
        asked.clear()
        requests = [Request([1], each) for each in chosen]
        round = Round(requests, [0] * len(requests), Drawing(3), target=Place(ops=Recorder()))
        each = range(len(requests))
        depths = [0 for _ in each]
        round.probabilities(torch.zeros(len(requests), 3), each, depths, torch.zeros(len(each), 0))

    round_of(Settings(0.5), Settings(0.5))
    assert asked == {"temperature": 0.5}
    round_of(Settings(0.7, top_k=2), Settings(1.0))
    assert asked["temperature"].tolist() == [0.7, 1.0]  # to the bit, as for a text alone
    assert asked["top_k"].tolist() == [2, 0] and len(asked) == 2  # 0: keeps all
    monkeypatch.setitem(SETTINGS, "coming", 1.0)
    monkeypatch.setattr(Settings, "coming", None, raising=False)
    round_of(Settings(0.5))
    assert asked == {"temperature": 0.5}
    monkeypatch.setattr(Settings, "coming", 0.9)
    round_of(Settings(0.5))
    assert asked == {"temperature": 0.5, "coming": 0.9}
