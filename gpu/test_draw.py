"""A GPU's sampling, in the interpreter, is a CPU's: what is kept, to the tie, what it weighs, and what is picked."""

import math

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton exists for Linux only")
import sampling
from gpu import GPU, draw
from gpu.crosscompile import SHARED
from gpu.test_crosscompile import apart
from sampling import Keyed, probabilities
from test_sampling import NEUTRAL, SETTING, is_clear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # a CPU runs the kernels in the interpreter


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Pieces so small that a short row has several, and tiles so small that a piece has."""
    monkeypatch.setattr(draw, "PIECE", 8)
    monkeypatch.setattr(draw, "TILE", 16)


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=DEVICE)


def drawn(logits: torch.Tensor, **setting: float | torch.Tensor | None) -> torch.Tensor:
    """By the kernels."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    values = (setting.get(name) for name in ("temperature", "top_k", "top_p", "min_p"))
    return draw.draw_probabilities(logits.to(DEVICE), *values, dtype).cpu()


def alike(logits: torch.Tensor, **setting: float | torch.Tensor | None) -> None:
    there = {name: s.cpu() if isinstance(s, torch.Tensor) else s for name, s in setting.items()}
    found, wanted = drawn(logits, **setting), probabilities(logits.cpu(), **there)
    assert torch.equal(found > 0, wanted > 0)
    torch.testing.assert_close(
        found, wanted, rtol=1e-12 if logits.dtype == torch.float64 else 1e-6, atol=0
    )


# ---- Probabilities

ROW = st.lists(
    st.one_of(
        st.integers(-24, 24).map(lambda n: n / 8), st.sampled_from([0.0, -torch.inf, -800.0, 30.0])
    ),
    min_size=1,
    max_size=20,
)


@settings(
    deadline=None, max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.tuples(ROW, st.fixed_dictionaries(SETTING)), min_size=1, max_size=3))
def test_the_law_of_sampling(rows):
    """Rows of ties, zeros, one-hots and temperature 0, each with its own settings, are filtered as by sorting."""
    rows = [
        (row, {k: NEUTRAL[k] if v is None else v for k, v in setting.items()})
        for row, setting in rows
        if max(row) > -torch.inf
    ]
    assume(rows and all(is_clear(row, **setting) for row, setting in rows))
    width = max(len(row) for row, _ in rows)
    logits = torch.tensor(
        [row + [-torch.inf] * (width - len(row)) for row, _ in rows], dtype=torch.float64
    )
    alike(logits, **{name: column(*(s[name] for _, s in rows)) for name in NEUTRAL})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_without_filters(dtype):
    torch.manual_seed(0)
    logits = (4 * torch.randn(3, 24)).to(dtype)[:, :21]  # rows that lie apart
    logits[1, 8:16], logits[0, 3], logits[0, 5], logits[0, 18], logits[2, 5] = (
        -torch.inf,
        99,
        99,
        99,
        30000,
    )
    alike(logits)
    alike(logits, temperature=column(0.0, 1.5, 1e-300))
    for temperature in (0.3, 0) if dtype == torch.float32 else ():
        alike(logits, temperature=temperature)
    assert drawn(logits[:1], temperature=0)[0].nonzero().tolist() == [[3]]  # the first of three


def test_flat_and_steep_rows():
    """Each with its own settings: where what is likely is all there is, where it is enough, and where it is not."""
    torch.manual_seed(21)
    flat, few, steep = torch.zeros(21), torch.randint(-3, 4, (21,)).float(), 8 * torch.randn(21)
    ramp = torch.arange(21) * -1.0
    rows = [
        (few, 1, 10, 0.7773, 0),
        (flat, 1, 10, 0.7773, 0),
        (steep, 1, 10, 0.7773, 0),
        (steep, 1, 20, 1, 0),
        (ramp, 1, 20, 1, 0.2),
        (few, 2, 20, 1, 0.2),
        (ramp, 1, 0, 0.999999, 0),
        (steep, 1, 20, 0.999999, 0),
        (flat, 1, 26, 1, 1e-6),
        (few, 1, 0, 0.3717, 1),
        (ramp, 0, 3, 0.5, 0.3),
        (ramp, 0.5, 2, 0.9, 0),
    ]
    logits, *settings = zip(*rows)
    alike(
        torch.stack(logits).double(), **dict(zip(NEUTRAL, (column(*values) for values in settings)))
    )
    alike(
        torch.zeros(2, 1).double(), top_k=column(0, 6), top_p=0.7773, min_p=column(1, 1e-6)
    )  # of one candidate


def test_exactly_so_many_of_equals_the_first():
    def kept(**setting: float | torch.Tensor) -> list[int]:
        """Of each row of 16 equals, two pieces: how many are left, and these are the first."""
        found = (
            drawn(
                flat.expand(
                    max(len(s) if isinstance(s, torch.Tensor) else 1 for s in setting.values()), 16
                ),
                **setting,
            )
            > 0
        )
        assert torch.equal(found, found.long().sum(1, keepdim=True) > torch.arange(16))
        return found.sum(1).tolist()

    flat = torch.zeros(1, 16, dtype=torch.float64)
    assert kept(top_k=column(7, 8, 9, 16)) == [7, 8, 9, 16]
    assert kept(top_p=column(1e-300, 0.0625, 0.063, 0.94, 1)) == [
        1,
        1,
        2,
        16,
        16,
    ]  # sixteenths are exact
    assert kept(top_k=8, top_p=0.5) == [4]  # half of what top-k left


def poisoned(
    made: list[torch.Tensor], *shape: int, **where: torch.dtype | torch.device
) -> torch.Tensor:
    """As torch.empty, amid numbers that must stay: NaN, or 77."""
    count = math.prod(shape)
    fill = torch.nan if where.get("dtype", torch.float32).is_floating_point else 77
    made.append(torch.full((count + 64,), fill, **where))
    return made[-1][32 : 32 + count].view(shape)


def test_everything_is_written_and_nothing_outside(monkeypatch):
    """Whatever lay in the results and in the scratch before."""
    made: list[torch.Tensor] = []
    monkeypatch.setattr(torch, "empty", lambda *shape, **where: poisoned(made, *shape, **where))
    logits = torch.tensor([[1.0, 2, 2, -torch.inf, 0, 2, 1, 3, 3, 1, 0, 0, 2]] * 2)
    logits = (logits * torch.tensor([[1.0], [-1.0]])).nan_to_num(posinf=4.0).to(DEVICE)
    alike(logits, top_k=4, top_p=0.83)
    alike(logits, min_p=0.3)
    alike(logits, temperature=0.5)
    coin = Keyed(torch.arange(2, device=DEVICE), torch.arange(2, device=DEVICE))
    assert torch.equal(draw.draw_token(logits.exp(), coin.streams), plainly(coin, logits.exp()))
    for buffer in made:
        around = torch.cat((buffer[:32], buffer[-32:]))
        assert (around.isnan() if buffer.is_floating_point() else around == 77).all()
    assert len(made) == 6 + 6 + 2 + 1


@pytest.mark.parametrize(
    "filters, launches", [({}, 2), (dict(top_p=0.5), 5), (dict(top_k=3, top_p=0.5, min_p=0.1), 5)]
)
def test_so_many_launches(filters, launches, monkeypatch):
    """And two for the pick. (They are counted, not made.)"""
    counted: list[object] = []
    for name in ("_peaks", "_weigh", "_gather", "_edge", "_cut", "_race", "_winner"):
        launch = lambda *args: counted.append(args)
        monkeypatch.setattr(draw, name, {(3, 2): launch, (3,): launch})
    values = (filters.get(name) for name in ("top_k", "top_p", "min_p"))
    probs = draw.draw_probabilities(torch.randn(3, 11, device=DEVICE), None, *values, torch.float32)
    assert len(counted) == launches
    draw.draw_token(probs, torch.zeros(3, 1, dtype=torch.int64, device=DEVICE))
    assert len(counted) == launches + 2


@pytest.mark.filterwarnings("ignore:All-NaN|invalid value|divide by zero")
@pytest.mark.parametrize(
    "temperature, filters", [(0, {}), (1, {}), (0, dict(top_p=0.9)), (1, dict(top_k=3, min_p=0.1))]
)
def test_of_logits_that_are_not_finite_no_token_is_drawn(temperature, filters):
    """Whatever else is in the row; and the rows beside it are as they were."""
    bad = [
        [math.nan] * 10,
        [-math.inf] * 10,
        [1.0] * 4 + [math.inf] * 2 + [1.0] * 4,
        [1.0] * 9 + [math.nan],
    ]
    logits, fine = (
        torch.zeros(6, 10),
        torch.randn(2, 10, generator=torch.Generator().manual_seed(0)),
    )
    logits[:2], logits[2:] = fine, torch.tensor(bad)
    probs, wanted = (
        drawn(logits, temperature=temperature, **filters),
        drawn(fine, temperature=temperature, **filters),
    )
    assert probs[2:].isnan().all() and torch.equal(probs[:2], wanted)
    coin = Keyed(torch.arange(6, device=DEVICE), torch.arange(6, device=DEVICE))
    picked = draw.draw_token(probs.to(DEVICE), coin.streams).tolist()
    assert picked[2:] == [-1] * 4 and picked[:2] == plainly(coin[:2], wanted.to(DEVICE)).tolist()


def test_no_rows():
    assert drawn(torch.zeros(0, 5), top_k=3).shape == (0, 5)
    probs, streams = (
        torch.zeros(0, 5, device=DEVICE),
        torch.zeros(0, 1, dtype=torch.int64, device=DEVICE),
    )
    assert draw.draw_token(probs, streams).shape == (0,)


# ---- The coin


def plainly(coin: Keyed, probs: torch.Tensor) -> torch.Tensor:
    """The definition."""
    noise = sampling._exponential(coin.streams, sampling._steps(probs.shape[1], probs.device))
    return (probs.double() / noise).argmax(-1)


@settings(
    deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    B=st.integers(1, 4),
    V=st.integers(1, 40),
    seed=st.integers(-(2**63), 2**63 - 1),
    role=st.integers(0, 9),
    each=st.booleans(),
    double=st.booleans(),
    kept=st.floats(0, 1),
)
def test_a_pick_is_the_coins_own(B, V, seed, role, each, double, kept):
    generator = torch.Generator().manual_seed(seed % 1000)
    weights = torch.rand(B, V + 3, generator=generator).pow(4)
    probs = torch.where(torch.rand(B, V + 3, generator=generator) < kept, weights, 0)
    probs = probs.to(DEVICE, torch.float64 if double else torch.float32)[
        :, :V
    ]  # rows that lie apart
    roles = torch.arange(role, role + B, device=DEVICE) if each else role
    coin = Keyed(
        torch.full((B,), seed, device=DEVICE), torch.arange(B, device=DEVICE) + 2**40, roles
    )
    assert torch.equal(draw.draw_token(probs, coin.streams), plainly(coin, probs))


def test_on_a_gpu_sampling_is_this(monkeypatch):
    """`probabilities` and `pick` of a GPU's operations come here, in the dtype of sampling.py."""
    asked, ops = [], GPU()
    for name in ("draw_probabilities", "draw_token"):
        own = getattr(draw, name)
        monkeypatch.setattr(
            draw, name, lambda *args, own=own, name=name: asked.append(name) or own(*args)
        )
    coin = Keyed(torch.arange(1, device=DEVICE), torch.arange(1, device=DEVICE), picks=ops.pick)
    for dtype, result in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        probs = ops.probabilities(torch.zeros(1, 5, device=DEVICE, dtype=dtype), top_k=2)
        assert probs.dtype == result and coin.pick(probs).tolist() == plainly(coin, probs).tolist()
    assert asked == ["draw_probabilities", "draw_token"] * 2


# ---- On a GPU


def table() -> list[list[object]]:
    return [
        [arch, name, *report]
        for V, logits, arch in ((128256, "bf16", 90), (49152, "fp32", 80))
        for name, report in draw.compile_sampling(V, logits, arch).items()
    ]


@pytest.mark.meanwhile(apart, "gpu.test_draw", "table")
def test_nothing_spills(meanwhile):
    for arch, name, registers, spills, shared in meanwhile():
        most = 8 if name == "_edge" else 0  # around a division
        assert spills <= most and registers <= 168 and shared <= SHARED[arch], name


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_graph_of_it(monkeypatch):
    """Captured once, it filters and picks whatever the row and the settings are then."""
    monkeypatch.undo()
    logits, ops = torch.randn(4, 128256, device=DEVICE), GPU()
    k, p, m = column(0, 50, 0, 7), column(0.9, 1, 0.5, 0.7), column(0, 0, 0.01, 0)
    coin = Keyed(torch.arange(4, device=DEVICE), torch.arange(4, device=DEVICE), picks=ops.pick)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        probs = ops.probabilities(logits, 0.7, k, p, m)
        return probs, coin.pick(probs)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        probs, picked = run()
    logits.normal_().mul_(3), k.fill_(40), p.fill_(0.8)
    graph.replay()
    wanted = probabilities(logits.cpu(), 0.7, k.cpu(), p.cpu(), m.cpu())
    assert torch.equal(probs.cpu() > 0, wanted > 0)
    assert torch.equal(picked.cpu(), Keyed(torch.arange(4), torch.arange(4)).pick(wanted))
