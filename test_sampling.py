"""`probabilities` against a reference that sorts and loops; the coin against its own definition, and at its edges."""

import math
from itertools import accumulate

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import sampling
from sampling import GOLDEN, TEXT, Keyed, accept_role, check_settings, draft_role, probabilities

TIED = st.integers(-240, 240).map(lambda n: n / 8)
NUMBER = {
    torch.float32: st.floats(-(2.0**127), 2.0**127, width=32),
    torch.float64: st.floats(-1.7e308, 1.7e308),
}
SETTING = dict(
    temperature=st.sampled_from([0, 1e-300, 1e-6, 0.3, 1, 2.5, 1e6]),
    top_k=st.sampled_from([None, 0, 1, 2, 3, 11, 400, 2**31]),
    top_p=st.one_of(st.none(), st.sampled_from([1e-300, 1e-9, 0.5, 1]), st.floats(1e-3, 1)),
    min_p=st.one_of(st.none(), st.sampled_from([0, 0.05, 0.5, 1]), st.floats(0, 1)),
)
NEUTRAL = dict(temperature=1, top_k=0, top_p=1, min_p=0)


def logits_of(dtype: torch.dtype) -> st.SearchStrategy:
    """Rows with ties, with impossible tokens, and with numbers of every size."""
    row = st.lists(
        st.one_of(
            TIED,
            TIED,
            st.sampled_from([0.0, 1.0, -math.inf]),
            st.floats(-30, 30, width=32),
            NUMBER[dtype],
        ),
        min_size=1,
        max_size=10,
    )
    return st.tuples(row.filter(lambda row: max(row) > -math.inf), st.just(dtype))


def reference(
    logits: list[float],
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
) -> list[float]:
    """The definition, in plain Python."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    best = logits[order[0]]
    weight = (
        [math.exp((x - best) / temperature) for x in logits]
        if temperature
        else [float(i == order[0]) for i in range(len(logits))]
    )
    order = order[: top_k or None]
    total, kept = sum(weight[i] for i in order), []
    for i in order:
        if not kept or top_p in (None, 1) or sum(weight[j] for j in kept) < top_p * total:
            kept.append(i)
    kept = [i for i in kept if weight[i] >= (min_p or 0) * weight[order[0]]]
    return [
        weight[i] / sum(weight[j] for j in kept) if i in kept else 0.0 for i in range(len(logits))
    ]


def is_clear(
    logits: list[float],
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
) -> bool:
    """Whether nothing hangs on the last bits: no two weights, no share at top_p and no weight at min_p that are nearly equal."""
    order = sorted(logits, reverse=True)
    weight = [math.exp((x - order[0]) / (temperature or 1e-300)) for x in order]
    if any(
        a < b * (1 + 1e-11)
        for a, b, x, y in zip(weight, weight[1:], order, order[1:])
        if x != y and b > 0
    ):
        return False
    order, total = weight[: top_k or None], sum(weight[: top_k or None])
    shares = [s / total for s in accumulate(order[:-1])] if top_p else []
    return all(abs(s - (top_p or 1)) > 1e-9 or top_p in (None, 1) for s in shares) and all(
        w == 1 or abs(w - (min_p or 0)) > 1e-9 for w in order if w
    )


@settings(deadline=None, max_examples=130)
@given(
    st.one_of(logits_of(torch.float32), logits_of(torch.float64)),
    st.lists(st.fixed_dictionaries(SETTING), min_size=3, max_size=3),
)
def test_probabilities_are_those_of_the_definition(row, chosen):
    logits, dtype = row
    for setting in (setting for setting in chosen if is_clear(logits, **setting)):
        probs = probabilities(torch.tensor(logits, dtype=dtype), **setting)
        assert probs.dtype == dtype and probs.shape == (len(logits),)
        expected = torch.tensor(reference(logits, **setting), dtype=torch.float64)
        torch.testing.assert_close(
            probs.double(),
            expected,
            atol=1e-13 if dtype == torch.float64 else 1e-7,
            rtol=1e-9 if dtype == torch.float64 else 1e-6,
        )
        assert (
            torch.equal(probs[expected > 1e-30] > 0, (expected > 0)[expected > 1e-30])
            and not probs[expected == 0].any()
        )
        assert abs(probs.double().sum().item() - 1) < (1e-12 if dtype == torch.float64 else 1e-6)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 2**32),
    st.integers(2049, 3000),
    st.sampled_from([0.0, 0.001, 0.1, 1.0, 5.0]),
    st.sampled_from([None, 1, 255, 256, 257, 2048, 2500]),
    st.sampled_from([None, 0.3, 0.9, 0.99, 0.99999]),
    st.sampled_from([None, 0.2]),
)
def test_a_large_vocabulary_flat_or_steep(seed, V, scale, top_k, top_p, min_p):
    """Flat rows need far more than the 256 candidates that are sorted first."""
    steps = (
        torch.randint(-8, 8, (V,), generator=torch.Generator().manual_seed(seed)).double() * scale
    )
    setting = dict(temperature=1, top_k=top_k, top_p=top_p, min_p=min_p)
    assume(is_clear(steps.tolist(), **setting))
    torch.testing.assert_close(
        probabilities(steps, **setting),
        _sorted_reference(steps, top_k or V, top_p or 1, min_p or 0),
        atol=1e-15,
        rtol=1e-9,
    )


def _sorted_reference(logits: torch.Tensor, k: int, p: float, m: float) -> torch.Tensor:
    """The definition once more, for rows that are too long for loops."""
    weight, order = logits.sort(descending=True, stable=True)
    weight = (weight - weight[0]).exp()
    weight[k:] = 0
    if p < 1:
        weight[1:][weight.cumsum(0)[:-1] >= p * weight.sum()] = 0
    weight[weight < m] = 0
    return torch.zeros_like(weight).scatter(0, order, weight / weight.sum())


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(-3, 3), min_size=7, max_size=7), st.fixed_dictionaries(SETTING)
        ),
        min_size=1,
        max_size=4,
    )
)
def test_a_row_with_its_own_settings_does_not_depend_on_its_neighbours(rows):
    chosen = [
        {k: NEUTRAL[k] if v is None else v for k, v in setting.items()} for _, setting in rows
    ]
    columns = {
        name: torch.tensor([c[name] for c in chosen], dtype=torch.float64) for name in NEUTRAL
    }
    logits = torch.tensor([row for row, _ in rows], dtype=torch.float64)
    together = probabilities(logits, **columns)
    for row, alone, out in zip(logits, chosen, together):
        assert torch.equal(out, probabilities(row, **alone))
    shaped = probabilities(
        logits[:, None].expand(-1, 2, -1),
        **{name: c[:, None].expand(-1, 2) for name, c in columns.items()},
    )
    assert torch.equal(shaped, together[:, None].expand(-1, 2, -1))


@pytest.mark.parametrize("V", [255, 256, 257, 2047, 2048, 2049, 5000])
def test_a_flat_row_beside_steep_ones(V):
    """The number of candidates that is sorted grows for the flattest row; the others must not notice."""
    flat, steep = torch.zeros(V, dtype=torch.float64), torch.arange(V, 0, -1).double()
    logits, p = torch.stack((steep, flat, steep, flat)), torch.tensor([0.9, 0.9, 1.0, 1e-4])
    probs = probabilities(logits, top_p=p, top_k=torch.tensor([0, 0, 7, 0]))
    n = math.ceil(0.9 * V)
    assert (
        int((probs[1] > 0).sum()) in (n, n + 1)
        and bool((probs[1, :n] > 0).all())
        and int((probs[3] > 0).sum()) == 1
    )
    assert (probs[0] > 0).nonzero()[:, 0].tolist() == [0, 1, 2] and int(
        (probs[2] > 0).sum()
    ) == 7  # 0.632 + 0.233 + 0.086
    for b in range(4):
        assert torch.equal(
            probs[b], probabilities(logits[b], top_p=p[b].item(), top_k=7 if b == 2 else 0)
        )


@pytest.mark.parametrize("k", [1, 2, 255, 256, 257, 299, 300])
def test_exactly_k_are_kept_of_equals_the_first(k):
    assert (probabilities(torch.zeros(300), top_k=k) > 0).tolist() == [True] * k + [False] * (
        300 - k
    )
    assert probabilities(torch.tensor([1.0, 3, 3, 3, 0]), top_k=2).tolist() == [0, 0.5, 0.5, 0, 0]
    assert probabilities(torch.tensor([1.0, 3, 3, 3, 0]), temperature=0).tolist() == [0, 1, 0, 0, 0]
    assert probabilities(torch.tensor([3.0, 1, 3, 2, 3]), top_p=0.5).tolist() == [0.5, 0, 0.5, 0, 0]


@pytest.mark.parametrize(
    "p, kept",
    [(1e-300, 1), (0.125, 1), (0.126, 2), (0.25, 2), (0.5, 4), (0.75, 6), (0.876, 8), (1, 8)],
)
def test_the_smallest_set_that_reaches_p(p, kept):
    """Eighths are exact in binary, so that a share which is p already is enough."""
    assert (probabilities(torch.zeros(8), top_p=p) > 0).tolist() == [True] * kept + [False] * (
        8 - kept
    )


def test_top_p_is_a_share_of_what_top_k_left_and_min_p_of_the_largest():
    halves = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64).log()
    assert (probabilities(halves, top_k=2, top_p=0.6) > 0).tolist() == [
        True,
        False,
        False,
        False,
    ]  # 0.5 / 0.75 ≥ 0.6
    assert (probabilities(halves, top_p=0.6) > 0).tolist() == [True, True, False, False]
    assert (probabilities(halves, top_p=0.8, min_p=0.4) > 0).tolist() == [True, True, False, False]
    torch.testing.assert_close(
        probabilities(halves, min_p=0.3), torch.tensor([2 / 3, 1 / 3, 0, 0], dtype=torch.float64)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_dtype_and_settings_that_float32_cannot_hold(dtype):
    logits = torch.tensor([[0.0, 1.0, -2.0]], dtype=dtype)
    assert probabilities(logits).dtype == (
        torch.float64 if dtype == torch.float64 else torch.float32
    )
    p = 1 - 2.0**-40  # 1 in float32, which would keep all
    assert probabilities(torch.tensor([0.0, -40.0], dtype=dtype), top_p=p).tolist() == [1.0, 0.0]
    assert probabilities(torch.tensor([0.0, -40.0], dtype=dtype)).tolist()[1] > 0


@pytest.mark.parametrize(
    "setting",
    [dict(), dict(temperature=0), dict(top_k=2), dict(top_p=0.5), dict(min_p=0.1)],
    ids=str,
)
@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 5), (0, 3, 5)])
def test_no_rows(shape, setting):
    """A round in which nobody drafted."""
    assert probabilities(torch.zeros(shape), **setting).shape == shape


@pytest.mark.parametrize(
    "setting",
    [
        {name: bad}
        for name, bads in dict(
            temperature=[
                -0.1,
                -1e-300,
                math.nan,
                math.inf,
                -math.inf,
                "1",
                "hot\nor not",
                True,
                1j,
                [1.0],
            ],
            top_k=[-1, 1.5, 2.5, math.nan, math.inf, "3", True, 2**31 + 1],
            top_p=[0, 0.0, -0.5, 1.01, math.nan, math.inf, "x", True],
            min_p=[-1, -1e-9, 1.5, math.nan, math.inf, "", False],
        ).items()
        for bad in bads
    ],
    ids=str,
)
def test_a_setting_out_of_range_is_named_in_one_line(setting):
    ((name, value),) = setting.items()
    for call in (
        lambda: probabilities(torch.zeros(3), **setting),
        lambda: check_settings(**setting),
    ):
        with pytest.raises(ValueError) as error:
            call()
        assert str(error.value).startswith(f"{name} is {value!r}: it must be ") and "\n" not in str(
            error.value
        )


@pytest.mark.parametrize(
    "value, each",
    [
        (0.5, [0.5] * 3),
        (torch.tensor(0.5), [0.5] * 3),
        (torch.tensor([0.5]), [0.5] * 3),
        (torch.tensor(0.5).double().expand(3), [0.5] * 3),
        (torch.arange(6.0).double()[::2], [0, 2, 4]),
        (torch.tensor([[1], [2], [3]]), [1, 2, 3]),
    ],
    ids=str,
)
def test_a_setting_is_a_number_a_row_one_after_the_other_in_memory(value, each):
    """As a kernel reads it, that is told an address and no strides."""
    found = sampling.column(value, torch.zeros(3, 5))
    assert (
        found.dtype == torch.float64
        and found.shape == (3, 1)
        and found.is_contiguous()
        and found[:, 0].tolist() == each
    )


@pytest.mark.parametrize("values", [2, 6])
def test_a_setting_of_another_number_of_rows_is_refused(values):
    with pytest.raises(
        ValueError, match=f"a setting has {values} values and there are 3 rows of logits"
    ):
        probabilities(torch.zeros(3, 5), temperature=torch.ones(values))


@pytest.mark.parametrize(
    "setting",
    [
        dict(temperature=0),
        dict(temperature=5e-324),
        dict(temperature=1e300),
        dict(top_k=0),
        dict(top_k=3.0),
        dict(top_k=2**31),
        dict(top_p=1),
        dict(top_p=1e-300),
        dict(min_p=0),
        dict(min_p=1),
        dict(temperature=None, top_k=None),
        NEUTRAL,
    ],
    ids=str,
)
def test_the_ends_of_the_ranges_are_inside(setting):
    check_settings(**setting)
    assert probabilities(torch.tensor([1.0, 2.0]), **setting).sum() == 1


# ---- The coin

MASK = 2**64 - 1
EXTREME = {
    "all zero": (0, 0.0),
    "all one": (-1, 1 - 2.0**-52),
    "only the sign": (-(2**63), 0.5),
    "all but the sign": (2**63 - 1, 0.5 - 2.0**-52),
}


def splitmix(z: int) -> int:
    """The published finalizer, in integers without end."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def stream(seed: int, position: int, role: int, column: int | None) -> float:
    """A uniform by the definition: where a stream begins, or a number of it."""
    golden, seeds, positions = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95, 0xAF251AF3B0F025B5
    key = splitmix((seed * seeds + position * positions & MASK) ^ role)
    return (
        (key if column is None else splitmix((key + (column + 1) * golden) & MASK)) >> 12
    ) / 2**52


def uniforms_of(coin: Keyed, verb: str, width: int) -> torch.Tensor:
    """What `accept` or `pick` compares with."""
    if verb == "accept":
        return coin.uniforms(width)
    return sampling._uniform(
        sampling._mix(sampling._mix(coin.streams) + sampling._steps(width, torch.device("cpu")))
    )


def everywhere(coin: Keyed, probs: torch.Tensor) -> torch.Tensor:
    """`pick` with noise for every column, without a look at the values."""
    return (
        probs / sampling._exponential(coin.streams, sampling._steps(probs.shape[1], probs.device))
    ).argmax(-1)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40)), min_size=1, max_size=4
    ),
    st.integers(0, 9),
)
def test_the_bits_are_those_of_splitmix64(rows, j):
    seeds, positions = torch.tensor([s for s, _ in rows]), torch.tensor([p for _, p in rows])
    for role in (TEXT, draft_role(j)):
        assert uniforms_of(Keyed(seeds, positions, role), "pick", 3).tolist() == [
            [stream(s, p, role, i) for i in range(3)] for s, p in rows
        ]
    assert uniforms_of(Keyed(seeds, positions), "accept", j + 1).tolist() == [
        [stream(s, p, accept_role(i), None) for i in range(j + 1)] for s, p in rows
    ]


def test_the_published_sequence():
    """SplitMix64 from state 0 begins with these (Vigna's reference gives the same)."""
    states = torch.arange(1, 4) * GOLDEN
    assert [z % 2**64 for z in sampling._mix(states).tolist()] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


def test_every_key_has_a_stream_of_its_own():
    roles = [TEXT, *map(draft_role, range(50)), *map(accept_role, range(50))]
    assert len(set(roles)) == len(roles)
    keys = torch.cartesian_prod(
        torch.arange(-4, 4), torch.arange(8)
    )  # seeds and positions that are near each other
    draws = torch.stack([uniforms_of(Keyed(*keys.T, role), "pick", 4) for role in roles])
    assert (
        draws.unique().numel() == draws.numel() == 101 * 64 * 4
    )  # a chance coincidence: 2 in ten million
    decisions = uniforms_of(
        Keyed(*keys.T), "accept", 50
    )  # where the stream of accept_role(j) begins
    assert (
        torch.cat((draws.flatten(), decisions.flatten())).unique().numel()
        == draws.numel() + 50 * 64
    )


def test_a_row_is_a_function_of_its_own_key():
    generator = torch.Generator().manual_seed(1)
    seeds, positions = (
        torch.randint(-(2**63), 2**63 - 1, (7,), generator=generator),
        torch.randint(0, 5000, (7,), generator=generator),
    )
    for trial in range(20):
        prob, probs = torch.rand(7, 5, generator=generator), torch.rand(7, 40, generator=generator)
        probs[probs < 0.7] = 0  # each row has its own support
        probs[:, 3] += 0.1
        coin = Keyed(seeds, positions + trial, draft_role(2))
        alone = [
            Keyed(seeds[b : b + 1], positions[b : b + 1] + trial, draft_role(2)) for b in range(7)
        ]
        assert torch.equal(
            coin.accept(prob),
            torch.cat([one.accept(prob[b : b + 1]) for b, one in enumerate(alone)]),
        )
        assert torch.equal(
            coin.accept(prob)[:, :2], coin.accept(prob[:, :2])
        )  # however many are asked for
        assert torch.equal(
            coin.pick(probs), torch.cat([one.pick(probs[b : b + 1]) for b, one in enumerate(alone)])
        )
        assert torch.equal(coin.pick(probs), everywhere(coin, probs))  # however it is computed
        assert torch.equal(coin.pick(probs), coin.pick(torch.cat((probs, torch.zeros(7, 9)), 1)))


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 6), st.integers(1, 50), st.integers(-(2**63), 2**63 - 1), st.data())
def test_a_coin_of_some_rows_changes_nothing(B, V, seed, data):
    """Each row with a role of its own, as in a round: text, draft 0, draft 1, …"""
    seeds, positions, roles = (
        torch.tensor([seed] * B),
        torch.arange(B) // 2,
        torch.tensor([TEXT, draft_role(0), draft_role(1)] * 2)[:B],
    )
    rows = data.draw(
        st.one_of(
            st.just(slice(None)),
            st.builds(slice, st.integers(0, B - 1), st.none(), st.integers(1, 3)),
            st.lists(st.integers(0, B - 1), min_size=1, max_size=B),
        )
    )
    probs = torch.rand(B, V, generator=torch.Generator().manual_seed(V))
    coin = Keyed(seeds, positions, roles)
    alone = [Keyed(seeds[b : b + 1], positions[b : b + 1], int(roles[b])) for b in range(B)]
    assert coin[rows].pick(probs[rows]).tolist() == [
        int(alone[b].pick(probs[b : b + 1])) for b in torch.arange(B)[rows].tolist()
    ]
    assert torch.equal(
        coin[rows].accept(probs[rows]),
        torch.cat([alone[b].accept(probs[b : b + 1]) for b in torch.arange(B)[rows].tolist()]),
    )


@pytest.mark.parametrize("size", [4, 2**15])
def test_a_wide_row_draws_noise_only_where_it_matters(size):
    """Rows too wide for noise everywhere: the same picks, and none of a token without probability."""
    generator = torch.Generator().manual_seed(3)
    for keep in (0.001, 0.5, 1.0):
        probs = torch.rand(3, size, generator=generator)
        probs[:, 1:][torch.rand(3, size - 1, generator=generator) > keep] = 0
        coin = Keyed(torch.arange(3), torch.arange(3))
        picked = coin.pick(probs)
        assert (
            torch.equal(picked, everywhere(coin, probs))
            and (probs.gather(1, picked[:, None]) > 0).all()
        )
    assert coin.pick(torch.zeros(3, size)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("u", [0.0, 2.0**-52, 1 - 2.0**-52])
def test_the_edges_of_the_uniform(u, dtype, monkeypatch):
    monkeypatch.setattr(
        sampling, "_uniform", lambda bits: torch.full(bits.shape, u, dtype=torch.float64)
    )
    coin = Keyed(torch.tensor([1]), torch.tensor([1]))
    assert coin.accept(torch.tensor([[0.0, 1.0]], dtype=dtype)).tolist() == [
        [False, True]
    ]  # u < prob, strictly: also for u = 0
    for probs, only in (
        ([0.0, 1.0, 0.0], 1),
        ([1.0, 0.0, 0.0], 0),
        ([0.0, 0.0, 1e-38], 2),
        ([0.0, 0.4, 0.6], 2),
    ):
        row = torch.tensor([probs], dtype=dtype)
        assert coin.pick(row).item() == everywhere(coin, row).item() == only


@pytest.mark.parametrize("bits, u", EXTREME.values(), ids=EXTREME)
def test_extreme_bits_give_a_uniform_below_1_and_finite_noise(bits, u, monkeypatch):
    monkeypatch.setattr(sampling, "_mix", lambda z: torch.full_like(z, bits))
    coin = Keyed(torch.tensor([5]), torch.tensor([6]))
    assert uniforms_of(coin, "pick", 3).tolist() == [[u] * 3] and 0 <= u < 1
    assert coin.pick(torch.tensor([[0.0, 0.3, 0.7]])).item() == 2
    noise = sampling._exponential(coin.streams, torch.arange(3))
    assert 0 < noise.min() and torch.isfinite(noise).all() and noise.dtype == torch.float64


@settings(deadline=None, max_examples=40)
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
    coin = Keyed(torch.arange(len(rows)) + seed, torch.arange(len(rows)) * 3)
    for picked in (coin.pick(probs), everywhere(coin, probs)):
        assert picked.dtype == torch.int64 and (probs.gather(1, picked[:, None]) > 0).all()


def chi_square(drawn: torch.Tensor, law: torch.Tensor) -> float:
    """How far the counts of the indices in `drawn` are from n · law; what has no probability must not occur."""
    counts, expected = torch.bincount(drawn, minlength=len(law)).double(), len(drawn) * law.double()
    assert len(counts) == len(law) and not counts[law == 0].any()
    return float(((counts - expected)[law > 0] ** 2 / expected[law > 0]).sum())


@pytest.mark.parametrize("walk", ["positions", "seeds"])
def test_the_law_of_picks_and_of_decisions(walk):
    """Bounds that a true coin exceeds once in a million, along the texts and across the requests."""
    n, probs = 200_000, torch.tensor([0.5, 0.25, 0.0, 0.15, 0.1])
    seeds, positions = (
        (torch.full((n,), 7), torch.arange(n))
        if walk == "positions"
        else (torch.arange(n), torch.full((n,), 7))
    )
    first, second = (
        Keyed(seeds, positions, role).pick(probs.expand(n, 5)) for role in (TEXT, draft_role(0))
    )
    taken = Keyed(seeds, positions).accept(torch.tensor([0.3, 0.9]).expand(n, 2)).long()
    taken_law = [torch.tensor([1 - p, p]) for p in (0.3, 0.9)]
    assert chi_square(first, probs) < 31 and chi_square(second, probs) < 31  # 3 degrees of freedom
    for a, b, law_a, law_b, bound in [
        (first, second, probs, probs, 58),
        (taken[:, 0], taken[:, 1], *taken_law, 31),
        (first, taken[:, 0], probs, taken_law[0], 41),
        (second, taken[:, 0], probs, taken_law[0], 41),
        (first[:-1], first[1:], probs, probs, 58),
    ]:  # pairs: each is independent of the other
        assert chi_square(a * len(law_b) + b, (law_a[:, None] * law_b).flatten()) < bound


def test_a_wide_flat_draw():
    """Every token of a vocabulary is drawn equally often, the last as the first."""
    n, V = 60_000, 64
    picked = Keyed(torch.full((n,), -3), torch.arange(n)).pick(
        torch.full((1, V), 1 / V).expand(n, V)
    )
    assert chi_square(picked, torch.full((V,), 1 / V)) < 130  # 63 degrees of freedom
