"""Speculative sampling: its output law by enumeration, beside the target's own; planted bugs; and with real models, the same tokens."""

import sys
from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import speculative
from drafters import ModelDrafter
from gamma import speed_up
from generate import Engine, Model
from kernels import Ops
from kvcache import KVCache
from proof import Toy, Walk, WalkingCoin, distance, enumerate_law, own_law
from request import Request, Round, Settings
from sampling import TEXT, Keyed, _mix, _steps, _uniform, draft_role, probabilities
from speculative import Decoder, verify

TARGET, DRAFT = Toy(seed=1), Toy(seed=2)


def toy_cache(sequences: int) -> KVCache:
    return KVCache(1, 1, 1, 7, sequences, dtype=torch.float64)


def play(maker: Decoder, requests: Sequence[Request]) -> None:
    """All texts to their ends, each step one pass over all that go on; and what must hold after every step."""
    for request in requests:
        maker.open(request)
    while work := [maker.plan(request) for request in requests if not request.finish_reason]:
        assert all(w.num_tokens + (w.num_drafts or 0) <= maker.budget for w in work)
        grown = maker.step(work)
        for w in work:
            request = w.request
            assert (
                maker.cache.length(request.seq) == len(request.tokens) - 1 or w.num_drafts is None
            )
            assert request.left >= 0 and (w.num_drafts is None) == (request not in grown)
            places = [(maker.cache, request.seq)]
            if isinstance(maker.drafter, ModelDrafter) and request in maker.drafter.seqs:
                assert maker.drafter.cache.length(maker.drafter.seqs[request]) < len(request.tokens)
                places.append((maker.drafter.cache, maker.drafter.seqs[request]))
            for cache, seq in places:  # drafts, too, by what they turned out to be
                assert cache._texts[seq].tokens == request.tokens[: cache.length(seq)]


def decoder(
    model: Model,
    length: int,
    draft=None,
    coupled: bool = False,
    sequences: int = 1,
    kv: str = "contiguous",
) -> Decoder:
    return Engine(model, draft, length * sequences, length, sequences, coupled, kv=kv).decoder


def made(request: Request) -> tuple[int, ...]:
    return tuple(request.tokens[request.prompt :])


# ---- The proof by enumeration

Kind = tuple[
    tuple[int, ...], int, int, tuple[int, ...], dict
]  # prompt, γ, tokens, ends of text, settings


def law_of(kinds: Sequence[Kind], target=TARGET, draft=DRAFT) -> list[dict]:
    """The output law of each kind of row, from batches in which rows of all kinds lie side by side."""

    def run(walk: Walk, n: int) -> list:
        chosen = [branch.decide([1.0] * len(kinds)) for branch in walk.branches]
        requests = [
            Request(
                list(kinds[i][0]),
                Settings(seed=row, max_tokens=kinds[i][2], gamma=kinds[i][1], **kinds[i][4]),
                kinds[i][3],
            )
            for row, i in enumerate(chosen)
        ]
        play(
            Decoder(target, toy_cache(n), 3, ModelDrafter(draft, toy_cache(n)), coin=walk), requests
        )
        return [(i, made(request)) for i, request in zip(chosen, requests)]

    law = enumerate_law(run, width=256)
    return [{text: p for (kind, text), p in law.items() if kind == i} for i in range(len(kinds))]


def targets_law(kind: Kind, target=TARGET) -> dict:
    prompt, _, count, ends, chosen = kind
    return own_law(target, prompt, count, ends, lambda logits: probabilities(logits, **chosen))


RAGGED: list[Kind] = [
    ((2,), 3, 4, (2,), {}),
    ((0, 2), 2, 4, (0,), {}),
    ((2, 1, 0), 1, 3, (), {}),
    ((0,), 0, 3, (), {}),
    ((1, 1), 3, 2, (2,), {}),
]


def test_every_row_of_a_ragged_batch_follows_the_targets_law():
    for kind, law in zip(RAGGED, law_of(RAGGED), strict=True):
        assert sum(law.values()) == pytest.approx(1, abs=1e-12) and len(law) > 3
        assert distance(law, targets_law(kind)) < 1e-12


FILTERS = [
    dict(temperature=0.5),
    dict(temperature=3.0),
    dict(temperature=0),
    dict(top_k=2),
    dict(top_k=1),
    dict(top_p=0.6),
    dict(min_p=0.5),
    dict(temperature=0.7, top_k=2, top_p=0.9, min_p=0.05),
]


def test_the_law_holds_under_every_setting_in_one_batch():
    kinds: list[Kind] = [((i % 3, 1), 2, 3, (), chosen) for i, chosen in enumerate(FILTERS)]
    for kind, law in zip(kinds, law_of(kinds), strict=True):
        assert distance(law, targets_law(kind)) < 1e-12


@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.integers(1, 3),
    st.sampled_from([(), (0,), (1, 2)]),
)
def test_the_law_holds_for_any_target_and_draft(target, draft, gamma, ends):
    """Their tables have zeros, ties and one-hots (proof.Toy)."""
    target, draft, kind = (
        Toy(longest=4, seed=target),
        Toy(longest=4, seed=draft),
        ((2,), gamma, 3, ends, {}),
    )
    assert distance(law_of([kind], target, draft)[0], targets_law(kind, target)) < 1e-12


def test_two_rows_are_independent_of_each_other():
    """The joint law of two texts of a batch is the product of the target's own laws."""
    kinds: list[Kind] = [((1,), 2, 3, (0,), {}), ((2, 0), 1, 2, (), {})]

    def run(walk: Walk, n: int) -> list:
        requests = [
            Request(
                list(kind[0]),
                Settings(seed=2 * row + i, max_tokens=kind[2], gamma=kind[1]),
                kind[3],
            )
            for row in range(n)
            for i, kind in enumerate(kinds)
        ]
        play(
            Decoder(TARGET, toy_cache(2 * n), 3, ModelDrafter(DRAFT, toy_cache(2 * n)), coin=walk),
            requests,
        )
        return [(made(a), made(b)) for a, b in zip(requests[::2], requests[1::2])]

    first, second = (targets_law(kind) for kind in kinds)
    product = {(a, b): p * q for a, p in first.items() for b, q in second.items()}
    assert distance(enumerate_law(run, group=2, width=256), product) < 1e-12 and len(product) > 50


def test_a_rows_branch_does_not_depend_on_its_neighbours():
    scripts: list[tuple[int, ...]] = [(), (1,), (2, 0), (1, 1, 1), (2, 2, 0, 1)]

    def outcomes(scripts: list) -> list:
        walk = Walk(scripts)
        requests = [
            Request([1] if row % 2 else [0, 2], Settings(seed=row, max_tokens=4, gamma=3))
            for row in range(len(scripts))
        ]
        play(
            Decoder(
                TARGET,
                toy_cache(len(scripts)),
                3,
                ModelDrafter(DRAFT, toy_cache(len(scripts))),
                coin=walk,
            ),
            requests,
        )
        return [
            (branch.path, branch.probability, made(request))
            for branch, request in zip(walk.branches, requests)
        ]

    together = outcomes(scripts)
    for row, script in enumerate(scripts):
        neighbours = [()] * row + [script]  # the same row, beside others
        assert outcomes(neighbours)[row] == together[row]


# ---- Planted bugs: the enumeration sees each


def wrong(accept=None, residual=None, bonus=None):
    """A `verify` that is right but for one line."""

    def planted(p: Tensor, q: Tensor, drafted: Tensor, coin) -> tuple[Tensor, Tensor]:
        B, k, V = q.shape
        x = drafted.clamp(min=0)[..., None]
        p_x, q_x = p[:, :k].gather(-1, x)[..., 0], q.gather(-1, x)[..., 0]
        ratio = torch.where(drafted >= 0, p_x / q_x.clamp(min=1e-300), 0).clamp(max=1)
        accepted = (
            coin.accept(accept(p_x, q_x, ratio) * (drafted >= 0) if accept else ratio)
            .long()
            .cumprod(1)
            .sum(1)
        )
        rows, q = torch.arange(B), torch.cat((q, torch.zeros(B, 1, V, dtype=q.dtype)), 1)
        p_there, q_there = p[rows, accepted], q[rows, accepted]
        full = (q_there.sum(-1) == 0)[:, None]
        left = (p_there - q_there).clamp(min=0)
        left = torch.where(left.sum(-1, keepdim=True) > 0, left, p_there)
        if residual:
            left = torch.where(full, left, residual(p_there, q_there, left))
        if bonus:
            left = torch.where(full & (accepted > 0)[:, None], bonus(p, accepted), left)
        return accepted, coin.pick(left / left.sum(-1, keepdim=True))

    return planted


def filtered_again(p: Tensor, q: Tensor, left: Tensor) -> Tensor:
    return probabilities((left / left.sum(-1, keepdim=True)).log(), top_p=0.6)


BUGS = {
    "accepted with p alone": wrong(accept=lambda p, q, ratio: p),
    "the draft is not subtracted": wrong(residual=lambda p, q, left: p),
    "the drafted token is removed from p, and no more": wrong(
        residual=lambda p, q, left: torch.where(q == q.amax(-1, keepdim=True), 0, p) + 1e-9
    ),
    "the residual is not clamped at 0": wrong(residual=lambda p, q, left: (p - q).abs() + 1e-300),
    "the residual is filtered again": wrong(residual=filtered_again),
    "no bonus: the last draft's distribution once more": wrong(
        bonus=lambda p, accepted: p[torch.arange(len(p)), (accepted - 1).clamp(min=0)]
    ),
    "dropped because its q was low": wrong(
        accept=lambda p, q, ratio: torch.where(q < 0.3, 0, ratio)
    ),
    "accepted because its q was high": wrong(
        accept=lambda p, q, ratio: torch.where(q > 0.6, 1, ratio)
    ),
}


@pytest.mark.parametrize("bug", [None, *BUGS])
def test_the_enumeration_catches(bug, monkeypatch):
    monkeypatch.setattr(speculative, "verify", BUGS[bug] if bug else wrong())
    kind: Kind = ((1,), 2, 3, (0,), {})
    error = distance(law_of([kind])[0], targets_law(kind))
    assert error > 1e-3 if bug else error < 1e-12


def test_the_enumeration_catches_soft_probabilities_at_temperature_0(monkeypatch):
    kind: Kind = ((0, 2), 2, 3, (), dict(temperature=0))
    monkeypatch.setattr(
        Ops,
        "probabilities",
        lambda self, logits, temperature, *rest: probabilities(logits, 1.0, *rest),
    )
    assert distance(law_of([kind])[0], targets_law(kind)) > 1e-3


def test_a_filter_on_one_side_only(monkeypatch):
    """The draft may draw from what it likes, as long as it says so; the target may not. (A target's call has rows of the same text.)"""
    kind, right = ((0, 2), 2, 3, (), dict(top_k=2)), Round.probabilities
    drafting = lambda rows: len(rows) == len(set(rows))

    def unfiltered(where):
        def soft(self, logits, rows):
            return (
                probabilities(logits[:, :3])
                if drafting(rows) == (where == "draft") and max(self.gammas)
                else right(self, logits, rows)
            )

        monkeypatch.setattr(Round, "probabilities", soft)
        return distance(law_of([kind])[0], targets_law(kind))

    assert unfiltered("draft") < 1e-12 and unfiltered("target") > 1e-3


@pytest.mark.parametrize("shift", [-1, 1])
def test_the_enumeration_catches_a_cache_that_is_one_token_off(shift, monkeypatch):
    right = Decoder._keep
    monkeypatch.setattr(
        Decoder, "_keep", lambda self, request, length: right(self, request, max(0, length + shift))
    )
    kind: Kind = ((0,), 1, 3, (), {})
    try:
        law = law_of([kind])[0]
    except (AssertionError, ValueError):  # or `play` sees it
        return
    assert distance(law, targets_law(kind)) > 1e-3


# ---- verify itself


def distributions(rows: int, V: int) -> st.SearchStrategy:
    weight = st.one_of(st.sampled_from([0.0, 0.0, 1.0, 1.0, 0.5]), st.floats(1e-6, 1))
    row = (
        st.lists(weight, min_size=V, max_size=V)
        .filter(lambda w: sum(w) > 0)
        .map(lambda w: [x / sum(w) for x in w])
    )
    return st.lists(row, min_size=rows, max_size=rows)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(2, 5), st.integers(1, 3))
def test_verify_follows_p_and_accepts_the_overlap(data, V, k):
    """For any p and q: the law of the first token is p, the acceptance Σ min(p, q), and the next one's law is p's next."""
    p = torch.tensor([data.draw(distributions(k + 1, V))], dtype=torch.float64)
    q = torch.tensor([data.draw(distributions(k, V))], dtype=torch.float64)
    if data.draw(st.booleans()):
        q = p[:, :k].clone()
    reach = data.draw(st.integers(0, k))  # a row that drafts fewer than k
    q[:, reach:] = 0

    def run(walk: Walk, n: int) -> list:
        coin, drafted = WalkingCoin(walk.branches), torch.full((n, k), -1)
        for j in range(reach):
            drafted[:, j] = coin.pick(q[:, j].expand(n, -1))
        accepted, token = verify(p.expand(n, -1, -1), q.expand(n, -1, -1), drafted, coin)
        return [
            (*drafted[b, :a].tolist(), t)
            for b, (a, t) in enumerate(zip(accepted.tolist(), token.tolist()))
        ]

    law = enumerate_law(run)
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    still = 1.0  # probability that all before place j stood
    for j in range(reach + 1):
        for x in range(V):
            mass = sum(m for text, m in law.items() if len(text) > j and text[j] == x)
            assert mass == pytest.approx(still * p[0, j, x].item(), abs=1e-12)
        overlap = torch.minimum(p[0, j], q[0, j]).sum().item() if j < reach else 0.0
        assert sum(m for text, m in law.items() if len(text) > j + 1) == pytest.approx(
            still * overlap, abs=1e-12
        )
        still *= overlap


def test_verify_never_makes_what_p_cannot_and_survives_a_residual_without_mass():
    class Always:
        """Rejects everything, and picks what is most probable."""

        def accept(self, prob):
            return torch.zeros_like(prob, dtype=torch.bool)

        def pick(self, probs):
            assert torch.isfinite(probs).all() and (probs.sum(-1) > 0.99).all()
            return probs.argmax(-1)

    p = torch.tensor([[[0.25, 0.75, 0.0], [0.0, 0.0, 1.0]]])
    accepted, token = verify(
        p, p[:, :1], torch.tensor([[1]]), Always()
    )  # q = p: nothing is left of p − q
    assert accepted.tolist() == [0] and token.tolist() == [1]


@pytest.mark.parametrize("shared", [None, "text and draft", "accept and draft", "accept and text"])
def test_numbers_that_are_shared_change_the_law(shared):
    """One place, 40,000 seeds, production's coin: right as it is; wrong as soon as two roles use the same numbers."""
    n = 40_000
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    seeds, at = torch.arange(n), torch.full((n,), 7)
    drafted = Keyed(seeds, at, TEXT if shared == "text and draft" else draft_role(0)).pick(
        q.expand(n, -1)
    )

    class Coin(Keyed):
        def accept(self, prob):
            if shared in ("accept and draft", "accept and text"):
                return (
                    _uniform(
                        _mix(
                            _mix(
                                self.place
                                ^ (draft_role(0) if shared == "accept and draft" else TEXT)
                            )
                            + _steps(1, prob.device)
                        )
                    )
                    < prob
                )
            return super().accept(prob)

    accepted, token = verify(
        torch.stack((p, p)).expand(n, -1, -1), q.expand(n, 1, -1), drafted[:, None], Coin(seeds, at)
    )
    out = torch.where(accepted > 0, drafted, token)
    error = (torch.bincount(out, minlength=3) / n - p).abs().max().item()
    assert error < 0.01 if shared is None else error > 0.02


# ---- Real models: the same tokens with every drafter

PROMPTS = [
    "Once upon a time",
    "The little dog",
    "Lily saw",
    "One day, Tom",
    "Mom said",
    "A big red ball",
    "In the park",
    "The sun was",
    "Ben and Mia",
    "There was a cat",
    "It was",
    "She",
]


@pytest.fixture(scope="module")
def pair(base) -> tuple[Model, Model]:
    """Random weights, and nearly the same: quicker than the embedded pair. A byte is a token."""
    model, draft = (Model.load(base, "cpu", torch.float64) for _ in range(2))
    for place in draft.llama.places().values():
        place.mul_(1 + 0.05 * torch.randn(place.shape, generator=torch.Generator().manual_seed(0)))
    return model, draft


def texts(
    model: Model,
    draft,
    gamma: int | None,
    temperature: float,
    seeds: Sequence[int],
    prompts: Sequence[str],
    count: int,
    coupled: bool,
) -> list:
    requests = [
        Request(
            model.encode(prompt),
            Settings(temperature, seed=seed, max_tokens=count, gamma=gamma),
            model.ends,
        )
        for prompt, seed in zip(prompts, seeds)
    ]
    maker = decoder(model, 64, draft, coupled, sequences=len(requests))
    play(maker, requests)
    return [made(request) for request in requests]


MANY = [*PROMPTS, *(f"{a} big big big" for a in PROMPTS[:6])]


def test_greedy_texts_are_the_same_with_every_drafter(pair):
    model, draft = pair
    plain = texts(model, None, 0, 0, range(18), MANY, 16, False)
    assert len(set(plain)) == 18
    for drafter, gamma in ((draft, 4), (draft, None), ("ngram", 2), ("ngram", 5)):
        assert texts(model, drafter, gamma, 0, range(18), MANY, 16, False) == plain


def test_coupled_texts_are_those_of_plain_decoding(pair):
    model, draft = pair
    prompts, seeds = PROMPTS[:12], range(12)
    plain = texts(model, None, 0, 1.0, seeds, prompts, 16, False)
    assert len(set(plain)) == 12
    for drafter, gamma in ((draft, 1), (draft, 3), ("ngram", 3)):
        assert texts(model, drafter, gamma, 1.0, seeds, prompts, 16, True) == plain
    assert (
        texts(model, draft, 3, 1.0, seeds, prompts, 16, False) != plain
    )  # rejection sampling: the same law, another text


def test_greedy_float32_differs_at_near_ties_only():
    model, draft = (
        Model.load("tiny", "cpu", torch.float32),
        Model.load("tiny-draft", "cpu", torch.float32),
    )
    plain = texts(model, None, 0, 0, range(8), PROMPTS[:8], 16, False)
    alone = texts(
        model, draft, 3, 0, [0], PROMPTS[:1], 16, False
    )  # a lone text's drafts may be one call
    together = texts(model, draft, 3, 0, range(8), PROMPTS[:8], 16, False)
    for prompt, a, b in zip([*PROMPTS[:1], *PROMPTS], [*plain[:1], *plain], alone + together):
        if a != b:
            same = next(i for i, (x, y) in enumerate(zip(a, b)) if x != y)
            best = model.llama(torch.tensor([*model.encode(prompt), *a[:same]]))[-1].topk(2).values
            assert best[0] - best[1] < 1e-4


def test_drafts_of_the_models_own_make_fewer_passes(pair):
    """That the texts agree would also hold if nothing were ever accepted."""
    model, draft = pair
    for drafter, coupled, least in ((draft, False, 1.5), (model, False, 3.99), (model, True, 3.99)):
        request = Request(
            model.encode(PROMPTS[0]), Settings(int(coupled), seed=0, max_tokens=24, gamma=3)
        )
        maker = decoder(model, 64, drafter, coupled)
        play(maker, [request])
        assert 24 / len(request.rounds) > least or drafter is model and len(request.rounds) == 6
        assert request.acceptance == 1.0 or drafter is draft
    assert set(request.origins) == {"accepted", "bonus"}


# ---- Ends, limits, offsets, failures


class Scripted:
    """A model that always goes on with the token its script has for that place; it notes what it was given, and where."""

    device, dtype, ops = torch.device("cpu"), torch.float64, Ops()

    def __init__(self, script: Sequence[int]):
        self.script, self.seen = script, []

    def __call__(self, tokens: Tensor, step, rows=None) -> Tensor:
        nothing = torch.zeros(len(tokens), 1, 1, dtype=torch.float64)
        self.ops.look_back(nothing, nothing, nothing, step, 0)
        self.seen.append(list(zip(step.places.positions.tolist(), tokens.tolist())))
        after = torch.tensor([self.script[i + 1] for i in step.places.positions.tolist()])
        logits = torch.full((len(tokens), 10), -torch.inf, dtype=torch.float64).scatter_(
            1, after[:, None], 0
        )
        return logits if rows is None else logits[rows]


TRUTH = [5, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9, 9, 9, 9]


def scripted(
    draft_script: Sequence[int],
    count: int = 8,
    gamma: int = 3,
    ends: Sequence[int] = (),
    longest: int = 40,
) -> tuple:
    truth = TRUTH
    target, draft = Scripted(truth), Scripted(draft_script)
    caches = [KVCache(1, 1, 1, n, dtype=torch.float64) for n in (40, longest)]
    request = Request(truth[:2], Settings(1.0, seed=3, max_tokens=count, gamma=gamma), ends)
    maker = Decoder(target, caches[0], 10, ModelDrafter(draft, caches[1]))
    play(maker, [request])
    for position, token in sum(
        target.seen, []
    ):  # what stands in the target's cache for good is the text
        assert position < len(truth)
    return request, target, draft, truth


def test_the_drafts_cache_after_full_acceptance():
    request, target, draft, truth = scripted(
        [5, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9]
    )
    assert request.tokens == truth[:10] and [taken[:2] for taken in request.rounds] == [
        (3, 3),
        (3, 3),
    ]
    at = lambda *positions: [(i, truth[i]) for i in positions]
    assert draft.seen == [
        at(0, 1),
        at(2),
        at(3),
        at(4, 5),
        at(6),
        at(7),
    ]  # 4 was drafted, not read: it comes with the bonus, 5
    assert target.seen == [at(0, 1, 2, 3, 4), at(5, 6, 7, 8)]
    assert request.origins == ["accepted"] * 3 + ["bonus"] + ["accepted"] * 3 + ["bonus"]


def test_the_drafts_cache_after_partial_acceptance():
    request, target, draft, truth = scripted(
        [5, 1, 2, 9, 4, 5, 9, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9]
    )
    assert request.tokens == truth[:10] and [taken[:2] for taken in request.rounds] == [
        (3, 1),
        (3, 2),
        (2, 2),
    ]
    assert draft.seen[:4] == [
        [(0, 5), (1, 1)],
        [(2, 2)],
        [(3, 9)],
        [(3, 3)],
    ]  # the draft's 9 at 3 is gone, the correction 3 is read
    assert target.seen[1][0] == (3, 3) and target.seen[2][0] == (6, 6)
    assert request.origins[:2] == ["accepted", "corrected"]


def test_the_drafts_cache_when_nothing_is_accepted():
    request, target, draft, truth = scripted([9] * 24)
    assert (
        request.tokens == truth[:10]
        and all(taken.accepted == 0 for taken in request.rounds)
        and len(request.rounds) == 8
    )
    assert [seen[0] for seen in target.seen] == [(0, 5)] + [(i, truth[i]) for i in range(2, 9)]
    first = [seen for seen in draft.seen if seen[0][0] < 3]
    assert first == [[(0, 5), (1, 1)], [(2, 9)], [(2, 2)]]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 6),
    st.integers(1, 14),
    st.lists(st.integers(1, 9), max_size=3),
    st.sets(st.integers(2, 16)),
)
@example(6, 14, [4], set())  # an end inside accepted drafts,
@example(3, 8, [5], {5})  # as a correction,
@example(3, 8, [4], set())  # and as the bonus
def test_limits_and_ends_wherever_they_fall(gamma, count, ends, wrong):
    """wrong: where the draft's script is."""
    request, *_, truth = scripted(
        [9 - token if i in wrong else token for i, token in enumerate(TRUTH)], count, gamma, ends
    )
    expected = truth[2 : 2 + count]
    cut = next((i + 1 for i, token in enumerate(expected) if token in ends), count)
    assert list(made(request)) == expected[:cut]
    assert (
        request.finish_reason == ("stop" if expected[cut - 1] in ends else "length")
        and len(request.origins) == cut
    )


def test_where_a_text_outgrows_the_drafts_context_decoding_goes_on():
    request, target, draft, truth = scripted(
        [5, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8], count=14, longest=6
    )
    assert request.tokens == truth[:16] and [taken.drafted for taken in request.rounds][:3] == [
        3,
        1,
        0,
    ]
    assert max(seen[-1][0] for seen in draft.seen) == 5  # its last place
    prompt_too_long, *_ = scripted([5] * 20, count=5, longest=1)
    assert list(made(prompt_too_long)) == truth[2:7]


def test_a_long_prompt_is_read_in_chunks_by_both():
    target, draft = Scripted([1] * 60), Scripted([1] * 60)
    caches = [KVCache(1, 1, 1, 60, dtype=torch.float64) for _ in range(2)]
    request = Request([1] * 23, Settings(1.0, seed=3, max_tokens=6, gamma=2))
    play(Decoder(target, caches[0], 10, ModelDrafter(draft, caches[1]), budget=10), [request])
    assert [len(seen) for seen in target.seen[:3]] == [10, 10, 3 + 2]
    assert [len(seen) for seen in draft.seen[:4]] == [10, 10, 3, 1]


def test_a_draft_that_did_not_draft_for_long_catches_up_in_chunks():
    target, draft = Scripted([1] * 90), Scripted([1] * 90)
    caches = [KVCache(1, 1, 1, 90, dtype=torch.float64) for _ in range(2)]
    request, maker = (
        Request([1] * 5, Settings(1.0, seed=3, max_tokens=60)),
        Decoder(target, caches[0], 10, ModelDrafter(draft, caches[1]), budget=10),
    )
    maker.open(request)
    wanted = [0] * 30 + [2] * 40
    maker.auto[request].choose = lambda most, rows: min(wanted.pop(0), most)
    while not request.finish_reason:
        maker.step([maker.plan(request)])
    assert [len(seen) for seen in draft.seen[:5]] == [10, 10, 10, 8, 1] and made(request) == (
        1,
    ) * 60
    assert [taken.drafted for taken in request.rounds][30:35] == [0, 0, 0, 2, 2]


@pytest.mark.parametrize("who", ["target", "draft"])
def test_after_a_pass_that_was_interrupted_the_text_goes_on_as_if_nothing_had_been(pair, who):
    model, draft = pair

    def make(broken: bool) -> tuple:
        maker, request = (
            decoder(model, 64, draft),
            Request(
                model.encode(PROMPTS[0]), Settings(1.0, seed=4, max_tokens=20, gamma=3), model.ends
            ),
        )
        maker.open(request)
        calls = []

        class Breaks:
            def __init__(self, llama):
                self.llama, self.device, self.dtype, self.ops = (
                    llama,
                    llama.device,
                    llama.dtype,
                    Ops(),
                )

            def __call__(self, tokens, step, rows=None):
                calls.append(1)
                out = self.llama(
                    tokens * 0 + 5 if len(calls) == 4 else tokens, step, rows
                )  # what it stored before it broke is wrong
                if len(calls) == 4:
                    raise KeyboardInterrupt
                return out

        if broken and who == "target":
            maker.target = Breaks(model.llama)
        if broken and who == "draft":
            maker.drafter.llama = Breaks(draft.llama)
        while not request.finish_reason:
            try:
                maker.step([maker.plan(request)])
            except KeyboardInterrupt:
                assert maker.cache.length(request.seq) == len(request.tokens) - 1
        return made(request), len(calls)

    (text, calls), (whole, _) = make(True), make(False)
    assert text == whole and calls > 4


def test_a_mixed_step_of_chunks_rounds_and_plain_rows(pair):
    model, draft = pair
    alone = []
    for prompt, gamma in ((PROMPTS[0], 3), (" ".join(PROMPTS[:4]), 2), (PROMPTS[1], 0)):
        request = Request(
            model.encode(prompt), Settings(1.0, seed=9, max_tokens=10, gamma=gamma), model.ends
        )
        play(decoder(model, 64, draft), [request])
        alone.append(request)
    together = [Request(r.tokens[: r.prompt], r.settings, model.ends) for r in alone]
    maker = decoder(model, 64, draft, sequences=3)
    maker.budget = 12  # the long prompt takes several steps
    play(maker, together)
    assert [made(r) for r in together] == [made(r) for r in alone]
    assert [r.rounds[0].drafted for r in together] == [3, 2, 0]


def test_the_report_is_what_the_rounds_say(pair):
    model, draft = pair
    maker, request = (
        decoder(model, 64, draft),
        Request(
            model.encode(PROMPTS[0]), Settings(1.0, seed=1, max_tokens=24, gamma=2), model.ends
        ),
    )
    assert maker.report(request) is None
    play(maker, [request])
    tokens, lengths = list(request.tokens), maker.cache.length(request.seq)
    assert (
        maker.report(request).speed_up is None and maker.costs.drafting(2) > 0
    )  # nobody knows yet what plain decoding costs
    maker.measure_plain(request)
    report, later = maker.report(request), request.rounds[1:]
    looked_at = [min(taken.accepted + 1, taken.drafted) for taken in request.rounds]
    assert report.acceptance == sum(taken.accepted for taken in request.rounds) / sum(looked_at)
    assert report.tokens_per_round == pytest.approx(
        sum(taken.accepted + 1 for taken in later) / len(later)
    )
    plain, spent = maker.costs.plain(), sum(taken.seconds for taken in later)
    assert report.speed_up == pytest.approx(
        plain * sum(taken.accepted + 1 for taken in later) / spent
    )
    assert (
        request.tokens == tokens and maker.cache.length(request.seq) == lengths and len(later) > 5
    )
    request.rounds = [taken for taken in request.rounds if taken.drafted == 2]  # not the last one
    report, w, c = (
        maker.report(request),
        maker.costs.passes.at(3) / plain,
        maker.costs.drafting(2) / plain,
    )
    assert report.predicted_speed_up == pytest.approx(speed_up(report.acceptance, 2, c, w))
    maker.costs.drafts.known = maker.costs.drafts.known[:1]  # drafts were never timed
    assert maker.report(request)[2:] == (report.speed_up, None)


@pytest.mark.parametrize("good", [True, False])
def test_gamma_follows_how_the_drafts_fare(good):
    """Costs are given, not measured: a draft costs a twentieth of a pass, and every pass the same."""
    target, draft = Scripted([1] * 200), Scripted([1 if good else 2] * 200)
    maker = Decoder(
        target,
        KVCache(1, 1, 1, 200, dtype=torch.float64),
        10,
        ModelDrafter(draft, KVCache(1, 1, 1, 200, dtype=torch.float64)),
    )
    maker.costs.passes.known, maker.costs.drafts.known = [(1, 1e-9)], [(0, 0.0), (64, 64 * 5e-11)]
    maker.costs.passes.saw = maker.costs.drafts.saw = lambda size, seconds: None
    request = Request([1, 1], Settings(1.0, seed=3, max_tokens=150))
    play(maker, [request])
    drafted = [taken.drafted for taken in request.rounds]
    assert drafted[0] > 1 and (
        max(drafted) > 30 if good else sum(drafted[20:]) < 0.5 * len(drafted[20:])
    )


@torch.inference_mode()
def test_times_are_read_when_the_device_was_waited_for(monkeypatch):
    """A GPU cannot tell what lies between two marks before it has passed both. Chunks of a prompt wait for nothing, so they are not timed."""
    marks, passed, tolist = [], [0], Tensor.tolist

    def mark(device: torch.device) -> int:
        marks.append(None)
        return len(marks)

    def waits(x: Tensor) -> list:
        if (
            x.numel() and sys._getframe(1).f_globals["__name__"] == "speculative"
        ):  # of an empty tensor nothing is copied
            passed[0] = len(marks)
        return tolist(x)

    def between(start: int, end: int) -> float:
        assert start <= end <= passed[0]
        return 1.0

    for name, stand_in in (("mark", mark), ("between", between)):
        monkeypatch.setattr(speculative, name, stand_in)
    monkeypatch.setattr(Tensor, "tolist", waits)
    maker = Decoder(TARGET, toy_cache(2), 3, ModelDrafter(DRAFT, toy_cache(2)), budget=3)
    requests = [
        Request(list(prompt), Settings(seed=1, max_tokens=3, gamma=1), ())
        for prompt in ((1, 2, 1, 2), (2,))
    ]
    maker.open(requests[0])
    assert maker.step([maker.plan(requests[0])]) == {}  # a chunk, and nothing else
    maker.close(requests[0])
    play(maker, requests)
    again = Request([1, 2, 1], Settings(seed=1, max_tokens=3, gamma=1), ())
    maker = Decoder(TARGET, toy_cache(2), 3, ModelDrafter(DRAFT, toy_cache(2)))
    maker.open(again)
    maker.step([maker.plan(again)])
    maker.measure_plain(again)
    assert maker.costs.plain() == 1.0 and len(marks) > 10
