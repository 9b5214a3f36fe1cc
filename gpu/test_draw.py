"""Sampling on a GPU, in the interpreter, is sampling.py's: what is kept, to the tie, its weight,
the pick.
"""

import math

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")
import sampling
from gpu import GPU, draw
from sampling import Keyed, probabilities

pytestmark = pytest.mark.gpu
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # a CPU runs kernels in the interpreter
NAMES = ("temperature", "top_k", "top_p", "min_p")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Pieces so small that a short row has three, and tiles so small that a piece has several."""
    monkeypatch.setattr(draw, "PIECE", 8)
    monkeypatch.setattr(draw, "TILE", 16)


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=DEVICE)


def drawn(logits: torch.Tensor, **setting: float | torch.Tensor | None) -> torch.Tensor:
    """By the kernels."""
    return draw.draw_probabilities(logits.to(DEVICE), **setting).cpu()


def assert_alike(logits: torch.Tensor, **setting: float | torch.Tensor | None) -> None:
    on_cpu = {name: s.cpu() if isinstance(s, torch.Tensor) else s for name, s in setting.items()}
    got = drawn(logits, **setting)
    wanted = probabilities(logits.cpu(), **on_cpu)
    assert torch.equal(got > 0, wanted > 0)
    rtol = 1e-12 if logits.dtype == torch.float64 else 1e-6
    torch.testing.assert_close(got, wanted, rtol=rtol, atol=0)


# ---- Probabilities


def test_softmax_without_filters():
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        logits = (4 * torch.randn(3, 24)).to(dtype)[:, :21]  # rows that lie apart
        logits[1, 8:16] = -torch.inf
        logits[0, [3, 5, 18]] = 99
        logits[2, 5] = 30000
        assert_alike(logits)
        assert_alike(logits, temperature=column(0.0, 1.5, 1e-300))
        assert drawn(logits[:1], temperature=0)[0].nonzero().tolist() == [[3]]  # first of three


def test_flat_and_steep_rows():
    """Where the likely candidates are all, where they are enough, and where they are not."""
    torch.manual_seed(21)
    flat = torch.zeros(21)
    few = torch.randint(-3, 4, (21,)).float()
    steep = 8 * torch.randn(21)
    ramp = torch.arange(21) * -1.0
    rows = [
        (few, 1, 10, 0.7773, 0),
        (few, 2, 20, 1, 0.2),
        (ramp, 1, 0, 0.999999, 0),
        (steep, 1, 20, 0.999999, 0),
        (flat, 1, 26, 1, 1e-6),
        (few, 1, 0, 0.3717, 1),
        (ramp, 0, 3, 0.5, 0.3),
    ]
    logits, *values = zip(*rows)
    setting = {name: column(*numbers) for name, numbers in zip(NAMES, values)}
    assert_alike(torch.stack(logits).double(), **setting)


def test_exactly_so_many_of_equals_the_first():
    def counts(V: int = 16, **setting: float | torch.Tensor) -> list[int]:
        """Of each row of V equals: how many are left, and these are the first."""
        B = max(len(s) if isinstance(s, torch.Tensor) else 1 for s in setting.values())
        keeps = drawn(torch.zeros(B, V, dtype=torch.float64), **setting) > 0
        assert torch.equal(keeps, keeps.long().sum(1, keepdim=True) > torch.arange(V))
        return keeps.sum(1).tolist()

    assert counts(top_k=column(7, 8, 9)) == [7, 8, 9]
    assert counts(top_p=column(1e-300, 0.0625, 0.063, 1)) == [1, 1, 2, 16]  # sixteenths: exact
    assert counts(top_k=8, top_p=0.5) == [4]  # half of what top-k leaves
    assert counts(10, top_p=0.1 + 0.1 + 0.1) == [3]  # divided by 0.1 it is 3.0000000000000004


def poisoned(
    buffers: list[torch.Tensor], *shape: int, **where: torch.dtype | torch.device
) -> torch.Tensor:
    """As torch.empty, amid numbers that must stay: NaN, or 77."""
    count = math.prod(shape)
    fill = torch.nan if where.get("dtype", torch.float32).is_floating_point else 77
    buffers.append(torch.full((count + 64,), fill, **where))
    return buffers[-1][32 : 32 + count].view(shape)


def test_everything_is_written_and_nothing_outside(monkeypatch):
    """Whatever lay in the results and in the scratch before."""
    buffers: list[torch.Tensor] = []
    monkeypatch.setattr(torch, "empty", lambda *shape, **where: poisoned(buffers, *shape, **where))
    logits = torch.tensor([[1.0, 2, 2, -torch.inf, 0, 2, 1, 3, 3, 1, 0, 0, 2]] * 2)
    logits = (logits * torch.tensor([[1.0], [-1.0]])).nan_to_num(posinf=4.0).to(DEVICE)
    assert_alike(logits, top_k=4, top_p=0.83)
    assert_alike(logits, temperature=0.5)
    rng = Keyed(torch.arange(2, device=DEVICE), torch.arange(2, device=DEVICE))
    assert torch.equal(draw.draw_token(logits.exp(), rng.streams), by_definition(rng, logits.exp()))
    for buffer in buffers:
        around = torch.cat((buffer[:32], buffer[-32:]))
        assert (around.isnan() if buffer.is_floating_point() else around == 77).all()
    assert len(buffers) == 6 + 2 + 1


@pytest.mark.parametrize("filters, launches", [({}, 2), (dict(top_p=0.5, min_p=0.1), 5)])
def test_so_many_launches(filters, launches, monkeypatch):
    """And two for the pick. (They are counted, not made.)"""
    counted: list[object] = []

    def launch(*args: object, **options: object) -> None:
        counted.append(args)

    for name in ("_peaks", "_weigh", "_gather", "_edge", "_cut", "_race", "_winner"):
        monkeypatch.setattr(draw, name, {(3, 2): launch, (3,): launch})
    probs = draw.draw_probabilities(torch.randn(3, 11, device=DEVICE), **filters)
    assert len(counted) == launches
    draw.draw_token(probs, torch.zeros(3, 1, dtype=torch.int64, device=DEVICE))
    assert len(counted) == launches + 2


@pytest.mark.filterwarnings("ignore:All-NaN|invalid value|divide by zero")
def test_logits_that_are_not_finite_give_no_token():
    """Whatever else is in the row; and the rows beside it are as they were."""
    bad = [[math.nan] * 10, [-math.inf] * 10, [1.0] * 4 + [math.inf] * 2 + [1.0] * 4]
    fine = torch.randn(2, 10, generator=torch.Generator().manual_seed(0))
    logits = torch.cat((fine, torch.tensor(bad)))
    rng = Keyed(torch.arange(5, device=DEVICE), torch.arange(5, device=DEVICE))
    for setting in (dict(temperature=0), dict(top_k=3, top_p=0.9, min_p=0.1)):
        probs = drawn(logits, **setting)
        wanted = drawn(fine, **setting)
        assert probs[2:].isnan().all() and torch.equal(probs[:2], wanted)
        picked = draw.draw_token(probs.to(DEVICE), rng.streams).tolist()
        assert picked[2:] == [-1] * 3
        assert picked[:2] == by_definition(rng[:2], wanted.to(DEVICE)).tolist()


def test_no_rows():
    assert drawn(torch.zeros(0, 5), top_k=3).shape == (0, 5)
    streams = torch.zeros(0, 1, dtype=torch.int64, device=DEVICE)
    assert draw.draw_token(torch.zeros(0, 5, device=DEVICE), streams).shape == (0,)


# ---- The pick


def by_definition(rng: Keyed, probs: torch.Tensor) -> torch.Tensor:
    return sampling.pick(probs.double(), rng.streams)


def test_a_gpu_samples_by_these_kernels(monkeypatch):
    """But for a setting that they do not know."""
    names = []
    for name in ("draw_probabilities", "draw_token"):
        function = getattr(draw, name)

        def spy(*args, function=function, name=name, **settings):
            names.append(name)
            return function(*args, **settings)

        monkeypatch.setattr(draw, name, spy)
    ops = GPU()
    rng = Keyed(torch.arange(1, device=DEVICE), torch.arange(1, device=DEVICE), draw=ops.pick)
    for dtype, result in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        probs = ops.probabilities(torch.zeros(1, 5, device=DEVICE, dtype=dtype), top_k=2)
        assert probs.dtype == result
        assert rng.pick(probs).tolist() == by_definition(rng, probs).tolist()
    assert names == ["draw_probabilities", "draw_token"] * 2
    monkeypatch.setattr(sampling, "probabilities", lambda logits, **settings: settings)
    assert ops.probabilities(torch.zeros(1, 5), top_k=2, fifth=1) == dict(top_k=2, fifth=1)
    assert names == ["draw_probabilities", "draw_token"] * 2


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_graph_of_it(monkeypatch):
    """Captured once, it filters and picks whatever the row and the settings are then."""
    monkeypatch.undo()
    logits = torch.randn(4, 128256, device=DEVICE)
    ops = GPU()
    settings = dict(top_k=column(0, 50, 0, 7), top_p=column(0.9, 1, 0.5, 0.7))
    rng = Keyed(torch.arange(4, device=DEVICE), torch.arange(4, device=DEVICE), draw=ops.pick)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        probs = ops.probabilities(logits, temperature=0.7, **settings)
        return probs, rng.pick(probs)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        probs, picked = run()
    logits.normal_().mul_(3)
    settings["top_k"].fill_(40)
    settings["top_p"].fill_(0.8)
    graph.replay()
    on_cpu = {name: value.cpu() for name, value in settings.items()}
    wanted = probabilities(logits.cpu(), temperature=0.7, **on_cpu)
    assert torch.equal(probs.cpu() > 0, wanted > 0)
    assert torch.equal(picked.cpu(), Keyed(torch.arange(4), torch.arange(4)).pick(wanted))
