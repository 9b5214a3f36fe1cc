"""`probabilities` against a reference that sorts and loops; the coin against its own definition, and at its edges."""
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import sampling
from sampling import TEXT, Keyed, accept_role, check_settings, draft_role, probabilities

LOGITS = st.lists(st.one_of(st.integers(-240, 240).map(lambda n: n / 8), st.sampled_from([0.0, 1.0, -math.inf])), min_size=1, max_size=12)
SETTING = dict(temperature=st.sampled_from([0, 1e-6, 0.3, 1, 2.5, 1e6]), top_k=st.sampled_from([None, 0, 1, 2, 3, 11, 400]),
               top_p=st.sampled_from([None, 1e-9, 0.1, 0.5, 0.9, 0.999, 1]), min_p=st.sampled_from([None, 0, 0.05, 0.5, 1]))


def reference(logits: list[float], temperature: float, top_k: int | None, top_p: float | None, min_p: float | None) -> list[float]:
    """The definition, in plain Python."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if temperature == 0:
        order, weight = order[:1], {order[0]: 1.0}
    else:
        weight = {i: math.exp((logits[i] - logits[order[0]]) / temperature) for i in order}
    order = order[:top_k or None]
    total, reached, kept = sum(weight[i] for i in order), 0.0, []
    for i in order:
        if top_p is not None and top_p < 1 and kept and reached >= top_p * total:
            break
        assume(top_p is None or not kept or abs(reached - top_p * total) > 1e-9 * total)         # a tie of roundings proves nothing
        kept.append(i)
        reached += weight[i]
    kept = [i for i in kept if min_p is None or weight[i] >= min_p * weight[order[0]]]
    return [weight[i] / sum(weight[j] for j in kept) if i in kept else 0.0 for i in range(len(logits))]


@settings(deadline=None, max_examples=300)
@given(LOGITS, st.fixed_dictionaries(SETTING), st.sampled_from([torch.float32, torch.float64]))
def test_probabilities_are_those_of_the_definition(logits, setting, dtype):
    assume(max(logits) > -math.inf)
    probs = probabilities(torch.tensor(logits, dtype=dtype), **setting)
    assert probs.dtype == dtype and probs.shape == (len(logits),)
    expected = torch.tensor(reference(logits, **setting), dtype=torch.float64)
    torch.testing.assert_close(probs.double(), expected, atol=1e-12 if dtype == torch.float64 else 1e-6, rtol=1e-6)
    assert ((probs > 0) <= (expected > 0)).all()
    assert abs(probs.double().sum().item() - 1) < 1e-6


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.lists(st.integers(-3, 3), min_size=7, max_size=7), st.fixed_dictionaries(SETTING)), min_size=1, max_size=4))
def test_a_row_with_its_own_settings_does_not_depend_on_its_neighbours(rows):
    neutral = dict(temperature=1, top_k=0, top_p=1, min_p=0)
    chosen = [{k: neutral[k] if v is None else v for k, v in setting.items()} for _, setting in rows]
    columns = {name: torch.tensor([c[name] for c in chosen], dtype=torch.float64) for name in neutral}
    logits = torch.tensor([row for row, _ in rows], dtype=torch.float64)
    together = probabilities(logits, **columns)
    for row, alone, out in zip(logits, chosen, together):
        torch.testing.assert_close(out, probabilities(row, **alone), atol=1e-15, rtol=1e-12)
    assert probabilities(logits.view(1, -1, 7), 0.5).shape == (1, len(rows), 7)


def test_top_k_keeps_exactly_k_of_equals_the_first_ones():
    assert probabilities(torch.zeros(9), top_k=4).tolist() == [0.25] * 4 + [0.0] * 5
    assert probabilities(torch.tensor([1.0, 3, 3, 3, 0]), top_k=2).tolist() == [0, 0.5, 0.5, 0, 0]
    assert probabilities(torch.tensor([1.0, 3, 3, 3, 0]), temperature=0).tolist() == [0, 1, 0, 0, 0]


@pytest.mark.parametrize("size", [255, 256, 257, 5000])
def test_flat_rows_that_need_more_than_the_first_candidates(size):
    flat = torch.zeros(2, size, dtype=torch.float64)
    probs = probabilities(flat, top_p=torch.tensor([0.9, 0.0001]))
    assert (probs[0] > 0).sum() in (math.ceil(0.9 * size), math.ceil(0.9 * size) + 1) and (probs[1] > 0).sum() == 1
    assert (probabilities(flat[0], top_k=size - 1) > 0).tolist() == [True] * (size - 1) + [False]
    assert (probabilities(flat, top_k=torch.tensor([0, 300]), top_p=torch.tensor([1.0, 1.0])) > 0).sum(-1).tolist() == [size, min(300, size)]


@pytest.mark.parametrize("setting", [
    dict(temperature=-0.1), dict(temperature=math.nan), dict(temperature=math.inf), dict(temperature="1"), dict(temperature=True),
    dict(top_k=-1), dict(top_k=2.5), dict(top_k=math.nan), dict(top_p=0), dict(top_p=1.01), dict(top_p=math.nan), dict(min_p=-1), dict(min_p=1.5)])
def test_a_setting_out_of_range_is_named(setting):
    (name, value), = setting.items()
    with pytest.raises(ValueError, match=f"{name} is {value!r}: it must be"):
        probabilities(torch.zeros(3), **setting)
    with pytest.raises(ValueError):
        check_settings(**setting)


# ---- The coin

def splitmix(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def stream(seed: int, position: int, role: int, column: int) -> float:
    """A uniform by the definition, in Python's integers."""
    golden = 0x9E3779B97F4A7C15
    key = splitmix(splitmix(splitmix((seed + golden) % 2**64) ^ (position % 2**64)) ^ role)
    return (splitmix((key + (column + 1) * golden) % 2**64) >> 12) / 2**52


@given(st.lists(st.tuples(st.integers(-2**63, 2**63 - 1), st.integers(0, 2**40)), min_size=1, max_size=4), st.integers(0, 9))
def test_the_bits_are_those_of_splitmix64(rows, role):
    coin = Keyed(torch.tensor([s for s, _ in rows]), torch.tensor([p for _, p in rows]), role)
    got = coin._uniform(role, torch.arange(3))
    assert got.tolist() == [[stream(seed, position, role, column) for column in range(3)] for seed, position in rows]
    assert sampling._mix(torch.tensor([1])).item() % 2**64 == splitmix(1)


def test_the_published_sequence():
    """SplitMix64 from state 0 begins with these (Vigna's reference gives the same)."""
    states = torch.arange(1, 4) * sampling.GOLDEN
    assert [z % 2**64 for z in sampling._mix(states).tolist()] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_roles_never_coincide():
    roles = [TEXT, *map(draft_role, range(50)), *map(accept_role, range(50))]
    assert len(set(roles)) == len(roles)
    seeds, positions = torch.arange(6), torch.zeros(6, dtype=torch.int64)
    draws = torch.stack([Keyed(seeds, positions, role)._uniform(role, torch.arange(4)) for role in roles])
    assert draws.unique().numel() == draws.numel()
    decisions = [Keyed(seeds, positions, TEXT)._uniform(torch.tensor([accept_role(j)]), torch.tensor([0])) for j in range(3)]
    assert torch.equal(torch.cat(decisions, 1), _uniforms_of_accept(Keyed(seeds, positions), 3))


def _uniforms_of_accept(coin: Keyed, k: int) -> torch.Tensor:
    """What `accept` compares with, found by asking it."""
    seen = []
    original = coin._uniform
    coin._uniform = lambda *args: seen.append(original(*args)) or seen[-1]
    coin.accept(torch.zeros(len(coin.place), k))
    return seen[0]


@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-52])
def test_the_edges_of_the_uniform(u, monkeypatch):
    monkeypatch.setattr(Keyed, "_uniform", lambda self, roles, columns: torch.full((1, len(columns)), u, dtype=torch.float64))
    coin = Keyed(torch.tensor([1]), torch.tensor([1]))
    accepted = coin.accept(torch.tensor([[0.0, 1.0]], dtype=torch.float64))
    assert accepted.tolist() == [[False, True]]                      # u < prob, strictly: also for u = 0
    assert coin.pick(torch.tensor([[0.0, 0.4, 0.0, 0.6]])).item() == 3
    assert coin.pick(torch.tensor([[0.0, 1.0, 0.0]])).item() == 1


@settings(deadline=None)
@given(st.lists(st.lists(st.sampled_from([0.0, 0.0, 1e-30, 0.2, 0.7]), min_size=5, max_size=5), min_size=1, max_size=7), st.integers(0, 999))
def test_pick_never_takes_probability_0_and_rows_are_their_own(rows, seed):
    probs = torch.tensor(rows, dtype=torch.float64)
    assume(bool((probs > 0).any(-1).all()))
    seeds, positions = torch.arange(len(rows)) + seed, torch.arange(len(rows)) * 3
    picked = Keyed(seeds, positions).pick(probs)
    assert (probs.gather(1, picked[:, None]) > 0).all()
    alone = [Keyed(seeds[b:b + 1], positions[b:b + 1]).pick(probs[b:b + 1]).item() for b in range(len(rows))]
    assert picked.tolist() == alone
    dense = Keyed(seeds, positions)._uniform(TEXT, torch.arange(5)) + 2.0**-53       # as a GPU does it, for every column
    assert (probs / -dense.log()).argmax(-1).tolist() == alone


def test_frequencies():
    n = 200_000
    seeds, positions = torch.full((n,), 7), torch.arange(n)
    probs = torch.tensor([0.5, 0.25, 0.0, 0.15, 0.1])
    counts = torch.bincount(Keyed(seeds, positions).pick(probs.expand(n, 5)), minlength=5).double()
    kept = probs > 0
    chi2 = ((counts - n * probs)[kept] ** 2 / (n * probs[kept])).sum()
    assert counts[2] == 0 and chi2 < 30                              # 3 degrees of freedom: one in a million
    taken = Keyed(seeds, positions).accept(torch.tensor([0.3, 0.9]).expand(n, 2)).double()
    assert (taken.mean(0) - torch.tensor([0.3, 0.9])).abs().max() < 0.006
    both = (taken[:, 0] * taken[:, 1]).mean()                        # decisions are independent of each other
    assert abs(both - 0.27) < 0.006
