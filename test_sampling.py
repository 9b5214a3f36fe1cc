"""`probabilities` beside its definition in plain Python; the rng beside its own, and its edges."""

import math
from itertools import accumulate, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sampling
from errors import UserError
from sampling import (
    GOLDEN,
    TEXT,
    Keyed,
    accept_role,
    check_finite,
    check_tokens,
    draft_role,
    penalize,
    probabilities,
)
from settings import SETTINGS
from testing.toys import penalized

TIED = st.integers(-240, 240).map(lambda n: n / 8)
NUMBER = {
    torch.float32: st.floats(-(2.0**127), 2.0**127, width=32),
    torch.float64: st.floats(-1.7e308, 1.7e308),
}
CHOSEN = st.fixed_dictionaries(
    dict(
        temperature=st.sampled_from([0, 1e-300, 1e-6, 0.3, 1, 1, 1, 2.5, 2.5, 1e6]),
        top_k=st.sampled_from([None, 0, 1, 2, 3, 11, 400, 2**31]),
        top_p=st.one_of(st.none(), st.sampled_from([1e-300, 1e-9, 0.5, 1]), st.floats(1e-3, 1)),
        min_p=st.one_of(st.none(), st.sampled_from([0, 0.05, 0.5, 1]), st.floats(0, 1)),
    )
)
Number = float | None


def rows_of(dtype: torch.dtype) -> st.SearchStrategy:
    """Rows with ties, with impossible tokens, and with numbers of every size; and rows of tokens
    that are nearly as probable as each other, of which every filter keeps some."""
    special = st.sampled_from([0.0, 1.0, -math.inf])
    number = st.one_of(TIED, TIED, special, st.floats(-30, 30, width=32), NUMBER[dtype])
    row = st.lists(number, min_size=1, max_size=10).filter(lambda row: max(row) > -math.inf)
    near = st.lists(st.integers(-16, 16).map(lambda n: n / 8), min_size=3, max_size=10)
    return st.tuples(near | row, st.just(dtype))


def reference(
    logits: list[float], temperature: float, top_k: Number, top_p: Number, min_p: Number
) -> list[float]:
    """The definition, in plain Python."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    best = order[0]
    if temperature == 0:
        weight = [float(i == best) for i in range(len(logits))]
    else:
        weight = [math.exp((x - logits[best]) / temperature) for x in logits]
    if top_k:
        order = order[:top_k]
    if top_p not in (None, 1):
        total = sum(weight[i] for i in order)
        kept = []
        for i in order:
            if not kept or sum(weight[j] for j in kept) < top_p * total:
                kept.append(i)
        order = kept
    order = [i for i in order if weight[i] >= (min_p or 0) * weight[best]]
    total = sum(weight[i] for i in order)
    return [weight[i] / total if i in order else 0.0 for i in range(len(logits))]


def is_clear(
    logits: list[float], temperature: float, top_k: Number, top_p: Number, min_p: Number
) -> bool:
    """Whether nothing hangs on the last bits: a tie, a share at top_p or a weight at min_p."""
    order = sorted(logits, reverse=True)
    weight = [math.exp((x - order[0]) / (temperature or 1e-300)) for x in order]
    for a, b, x, y in zip(weight, weight[1:], order, order[1:]):
        if x != y and b > 0 and a < b * (1 + 1e-11):
            return False
    if top_p not in (None, 1):
        kept = weight[: top_k or None]
        if any(abs(mass / sum(kept) - top_p) <= 1e-9 for mass in accumulate(kept[:-1])):
            return False
    return all(w in (0, 1) or abs(w - (min_p or 0)) > 1e-9 for w in weight)


@given(
    st.one_of(rows_of(torch.float32), rows_of(torch.float64)),
    st.lists(CHOSEN, min_size=3, max_size=3),
)
def test_probabilities_are_those_of_the_definition(row, choices):
    logits, dtype = row
    wide = dtype == torch.float64
    for chosen in choices:
        assert chosen.keys() == SETTINGS.keys()
        if not is_clear(logits, **chosen):
            continue
        probs = probabilities(torch.tensor(logits, dtype=dtype), **chosen)
        assert probs.dtype == dtype and probs.shape == (len(logits),)
        expected = torch.tensor(reference(logits, **chosen), dtype=torch.float64)
        atol, rtol = (1e-13, 1e-9) if wide else (1e-7, 1e-6)
        torch.testing.assert_close(probs.double(), expected, atol=atol, rtol=rtol)
        assert (probs[expected > 1e-30] > 0).all() and not probs[expected == 0].any()
        assert abs(probs.double().sum().item() - 1) < (1e-12 if wide else 1e-6)


@given(
    st.lists(
        st.tuples(st.lists(st.integers(-3, 3), min_size=7, max_size=7), CHOSEN),
        min_size=1,
        max_size=4,
    )
)
def test_settings_of_a_row_do_not_touch_its_neighbours(rows):
    choices = []
    for _, chosen in rows:
        choices.append({k: SETTINGS[k] if v is None else v for k, v in chosen.items()})
    columns = {}
    for name in SETTINGS:
        columns[name] = torch.tensor([chosen[name] for chosen in choices], dtype=torch.float64)
    logits = torch.tensor([row for row, _ in rows], dtype=torch.float64)
    together = probabilities(logits, **columns)
    for row, chosen, probs in zip(logits, choices, together):
        assert torch.equal(probs, probabilities(row, **chosen))
    twice = {name: column[:, None].expand(-1, 2) for name, column in columns.items()}
    shaped = probabilities(logits[:, None].expand(-1, 2, -1), **twice)
    assert torch.equal(shaped, together[:, None].expand(-1, 2, -1))


@given(
    st.lists(st.floats(-30, 30, width=32), min_size=3, max_size=5),
    st.lists(st.integers(0, 2), min_size=1, max_size=6),
    st.integers(1, 6),
    st.fixed_dictionaries(
        {},
        optional=dict(
            repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
            presence_penalty=st.sampled_from([0.0, 0.7, -2.0]),
            frequency_penalty=st.sampled_from([0.0, 0.3, -1.0]),
            logit_bias=st.dictionaries(st.integers(0, 2), st.sampled_from([-100, 0.5])),
            min_tokens=st.integers(0, 4),
        ),
    ),
)
def test_penalties_are_those_of_the_definition(logits, tokens, num_prompt_tokens, chosen):
    """Also in bfloat16, of which float32 is made; ends beyond the vocabulary are never drawn."""
    prompt, new = tokens[:num_prompt_tokens], tokens[num_prompt_tokens:]
    for dtype, made in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        row = torch.tensor(logits, dtype=dtype)
        given = row.clone()
        changed = penalize(row, tokens, len(prompt), (1, -1, 99), **chosen)
        wanted = penalized(row.tolist(), prompt, new, (1,), **chosen)
        wanted = torch.tensor(wanted, dtype=torch.float64).clamp(-1e30)
        assert changed.dtype == made and torch.equal(row, given)
        torch.testing.assert_close(changed.double().clamp(-1e30), wanted, rtol=1e-6, atol=1e-6)
        assert chosen or torch.equal(changed, row.to(made))


def test_top_k_keeps_exactly_k_and_ties_go_to_the_lower_index():
    for k in (1, 2, 255, 299, 300):
        kept = probabilities(torch.zeros(300), top_k=k) > 0
        assert kept.tolist() == [True] * k + [False] * (300 - k)
    tied = torch.tensor([1.0, 3, 3, 3, 0])
    assert probabilities(tied, top_k=2).tolist() == [0, 0.5, 0.5, 0, 0]
    assert probabilities(tied, temperature=0).tolist() == [0, 1, 0, 0, 0]
    assert probabilities(torch.tensor([3.0, 1, 3, 2, 3]), top_p=0.5).tolist() == [0.5, 0, 0.5, 0, 0]


def test_top_p_keeps_the_fewest_that_reach_p():
    """Eighths are exact in binary, so that a share that is p already is enough."""
    table = {1e-300: 1, 0.125: 1, 0.126: 2, 0.25: 2, 0.5: 4, 0.75: 6, 0.876: 8, 1: 8}
    for p, kept in table.items():
        probs = probabilities(torch.zeros(8), top_p=p)
        assert (probs > 0).tolist() == [True] * kept + [False] * (8 - kept), p


def test_order_of_top_k_top_p_and_min_p():
    """Top-p is a share of what top-k left, and min-p of the largest that is left."""
    halves = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64).log()
    for chosen, kept in (
        (dict(top_k=2, top_p=0.6), 1),  # 0.5 / 0.75 ≥ 0.6
        (dict(top_p=0.6), 2),
        (dict(top_p=0.8, min_p=0.4), 2),
        (dict(top_p=0.6, min_p=0.3), 2),  # of 0.75, min-p first, 0.5 would be enough
    ):
        assert (probabilities(halves, **chosen) > 0).sum() == kept, chosen
    thirds = torch.tensor([2 / 3, 1 / 3, 0, 0], dtype=torch.float64)
    torch.testing.assert_close(probabilities(halves, min_p=0.3), thirds)


def test_dtypes_and_settings_that_float32_cannot_hold():
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert probabilities(torch.tensor([[0.0, 1.0, -2.0]], dtype=dtype)).dtype == wide
        steep = torch.tensor([0.0, -40.0], dtype=dtype)
        p = 1 - 2.0**-40  # 1 in float32, which would keep all
        assert probabilities(steep, top_p=p).tolist() == [1.0, 0.0]
        assert probabilities(steep).tolist()[1] > 0


def test_no_rows():
    """A round in which nobody drafted."""
    filters = ({}, {"temperature": 0}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1})
    for shape, chosen in product([(0, 5), (2, 0, 5), (0, 3, 5)], filters):
        assert probabilities(torch.zeros(shape), **chosen).shape == shape


def test_column_is_a_number_a_row_in_memory():
    """As a kernel reads it, that is given an address and no strides."""
    for value, each in (
        (0.5, [0.5] * 3),
        (torch.tensor(0.5), [0.5] * 3),
        (torch.tensor([0.5]), [0.5] * 3),
        (torch.tensor(0.5).double().expand(3), [0.5] * 3),
        (torch.arange(6.0).double()[::2], [0, 2, 4]),
        (torch.tensor([[1], [2], [3]]), [1, 2, 3]),
    ):
        column = sampling.column(value, torch.zeros(3, 5))
        assert column.dtype == torch.float64 and column.shape == (3, 1)
        assert column.is_contiguous() and column[:, 0].tolist() == each
    with pytest.raises(ValueError, match="a setting has 2 values, and there are 3 rows of logits"):
        probabilities(torch.zeros(3, 5), temperature=torch.ones(2))


def test_logits_that_are_not_finite_are_refused():
    large = torch.full((2, 9), 3e38)  # whose sum overflows
    assert check_finite(large) is large and check_finite(torch.zeros(0, 3)).shape == (0, 3)
    for wrong in (math.nan, math.inf):
        with pytest.raises(UserError, match="logits are not finite"):
            check_finite(torch.tensor([[0.0, 1.0], [0.0, wrong]]))
    with pytest.raises(UserError, match="logits are not finite"):
        check_finite(torch.full((1, 4), -math.inf))
    masked = torch.tensor([[0.0, -math.inf], [3e38, 3e38]])
    assert check_finite(masked) is masked and check_finite(large, masked=False) is large
    with pytest.raises(UserError, match="logits are not finite"):
        check_finite(masked, masked=False)
    assert check_tokens([3, 0]) == [3, 0] and check_tokens([]) == []
    with pytest.raises(UserError, match="logits are not finite"):
        check_tokens([3, -1])


# ---- The rng

MASK = 2**64 - 1


def splitmix(z: int) -> int:
    """The published finalizer, in integers without end."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def stream(seed: int, position: int, role: int, candidate: int | None) -> float:
    """A uniform by the definition: where a stream begins, or a candidate's number of it."""
    golden, seeds, positions = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95, 0xAF251AF3B0F025B5
    bits = splitmix((seed * seeds + position * positions & MASK) ^ role)
    if candidate is not None:
        bits = splitmix((bits + (candidate + 1) * golden) & MASK)
    return (bits >> 12) / 2**52


def pick_uniforms(rng: Keyed, width: int) -> torch.Tensor:
    """The uniforms of `pick`."""
    counters = sampling.counters(width, torch.device("cpu"))
    return sampling.uniform(sampling.mix(sampling.mix(rng.streams) + counters))


@given(
    st.lists(
        st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40)), min_size=1, max_size=4
    ),
    st.integers(0, 9),
)
def test_rng_bits_are_those_of_splitmix64(rows, j):
    seeds, positions = torch.tensor(rows).T
    for role in (TEXT, draft_role(j)):
        expected = [[stream(*row, role, i) for i in range(3)] for row in rows]
        assert pick_uniforms(Keyed(seeds, positions, role), 3).tolist() == expected
    expected = [[stream(*row, accept_role(i), None) for i in range(j + 1)] for row in rows]
    assert Keyed(seeds, positions).uniforms(j + 1).tolist() == expected


def test_splitmix64_gives_the_published_sequence():
    """From state 0 it begins with these (Vigna's reference gives the same)."""
    states = torch.arange(1, 4) * GOLDEN
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [z % 2**64 for z in sampling.mix(states).tolist()] == expected


def test_every_key_has_a_stream_of_its_own():
    roles = [TEXT, *map(draft_role, range(50)), *map(accept_role, range(50))]
    assert len(set(roles)) == len(roles)
    keys = torch.cartesian_prod(torch.arange(-4, 4), torch.arange(8))  # near seeds and positions
    draws = torch.stack([pick_uniforms(Keyed(*keys.T, role), 4) for role in roles]).flatten()
    decisions = Keyed(*keys.T).uniforms(50).flatten()
    assert len(draws) == 101 * 64 * 4 and len(decisions) == 50 * 64
    every = torch.cat((draws, decisions))
    assert len(every.unique()) == len(every)  # a chance coincidence: 2 in ten million


def test_some_rows_of_an_rng_draw_what_they_draw_beside_the_others():
    """However many numbers are asked for."""
    generator = torch.Generator().manual_seed(1)
    roles = torch.tensor([TEXT, draft_role(0), draft_role(1)] * 2)
    rng = Keyed(torch.arange(6) - 3, torch.randint(0, 5000, (6,), generator=generator), roles)
    prob = torch.rand(6, 5, generator=generator)
    probs = torch.rand(6, 40, generator=generator)
    accepted, picked = rng.accept(prob), rng.pick(probs)
    for rows in (slice(None), slice(1, None, 3), slice(2, 3), [4, 0, 4]):
        wider = torch.cat((probs[rows], torch.zeros_like(probs[rows])), 1)
        assert torch.equal(rng[rows].pick(wider), picked[rows])
        assert torch.equal(rng[rows].accept(prob[rows, :2]), accepted[rows, :2])


def test_edges_of_the_uniform(monkeypatch):
    """Whatever the bits: u is below 1, and strictly below what is accepted, also if it is 0; the
    noise is finite."""
    for bits, u in (
        (0, 0.0),
        (2**12, 2.0**-52),
        (-1, 1 - 2.0**-52),
        (-(2**63), 0.5),
        (2**63 - 1, 0.5 - 2.0**-52),
    ):
        monkeypatch.setattr(sampling, "mix", lambda z: torch.full_like(z, bits))
        rng = Keyed(torch.tensor([5]), torch.tensor([6]))
        assert pick_uniforms(rng, 3).tolist() == [[u] * 3]
        noise = sampling.exponential(rng.streams, 3)
        assert 0 < noise.min() and noise.isfinite().all() and noise.dtype == torch.float64
        for dtype in (torch.float32, torch.float64):
            accepted = rng.accept(torch.tensor([[0.0, 1.0]], dtype=dtype))
            assert accepted.tolist() == [[False, True]]
            probs = [[0, 1, 0], [1, 0, 0], [0, 0, 1e-38], [0, 0.4, 0.6]]
            picked = [rng.pick(torch.tensor([p], dtype=dtype)).item() for p in probs]
            assert picked == [1, 0, 2, 2]


@given(
    st.lists(
        st.lists(st.sampled_from([0.0, 0.0, 1e-30, 0.2, 0.7]), min_size=5, max_size=5).filter(any),
        min_size=1,
        max_size=7,
    ),
    st.integers(0, 999),
)
def test_pick_never_takes_probability_0(rows, seed):
    probs = torch.tensor(rows, dtype=torch.float64)
    picked = Keyed(torch.arange(len(rows)) + seed, torch.arange(len(rows)) * 3).pick(probs)
    assert picked.dtype == torch.int64
    assert (probs.gather(1, picked[:, None]) > 0).all()


def chi_square(drawn: torch.Tensor, distribution: torch.Tensor) -> float:
    """How far the counts of the indices in `drawn` are from n · distribution."""
    counts = torch.bincount(drawn, minlength=len(distribution)).double()
    expected = len(drawn) * distribution.double()
    assert len(counts) == len(distribution) and not counts[distribution == 0].any()
    return float(((counts - expected)[distribution > 0] ** 2 / expected[distribution > 0]).sum())


def test_distribution_of_picks_and_of_decisions():
    """Bounds that a true rng exceeds once in a million, along the texts and across requests."""
    n = 200_000
    distribution = torch.tensor([0.5, 0.25, 0.0, 0.15, 0.1])
    sevens = torch.full((n,), 7)
    for seeds, positions in ((sevens, torch.arange(n)), (torch.arange(n), sevens)):
        first = Keyed(seeds, positions, TEXT).pick(distribution.expand(n, 5))
        second = Keyed(seeds, positions, draft_role(0)).pick(distribution.expand(n, 5))
        decided = Keyed(seeds, positions).accept(torch.tensor([0.3, 0.9]).expand(n, 2)).long()
        distribution_a, distribution_b = (torch.tensor([1 - p, p]) for p in (0.3, 0.9))
        assert (
            chi_square(first, distribution) < 31 and chi_square(second, distribution) < 31
        )  # 3 degrees of freedom
        for (
            a,
            b,
            distribution_of_a,
            distribution_of_b,
            bound,
        ) in [  # pairs: each is independent of the other
            (first, second, distribution, distribution, 58),
            (decided[:, 0], decided[:, 1], distribution_a, distribution_b, 31),
            (first, decided[:, 0], distribution, distribution_a, 41),
            (second, decided[:, 0], distribution, distribution_a, 41),
            (first[:-1], first[1:], distribution, distribution, 58),
        ]:
            joint = (distribution_of_a[:, None] * distribution_of_b).flatten()
            assert chi_square(a * len(distribution_of_b) + b, joint) < bound


def test_distribution_of_a_wide_flat_draw():
    """Every token of a vocabulary is drawn equally often, the last as the first."""
    n, V = 60_000, 64
    distribution = torch.full((V,), 1 / V)
    picked = Keyed(torch.full((n,), -3), torch.arange(n)).pick(distribution.expand(n, V))
    assert chi_square(picked, distribution) < 130  # 63 degrees of freedom
