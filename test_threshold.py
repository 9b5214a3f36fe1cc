"""What is kept by threshold is what is kept by sorting; and the kernel finds what the plain bisection finds."""
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton exists for Linux only")
import threshold
from crosscompile import SHARED, apart
from sampling import _keep_top, probabilities
from test_sampling import NEUTRAL, SETTING, is_clear
from threshold import by_bits, by_levels, keep_top

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"                                        # a CPU runs the kernels in the interpreter


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Pieces so small that a short row has several."""
    monkeypatch.setattr(threshold, "PIECE", 64)


@pytest.fixture
def plainly(monkeypatch):
    """By bits: in the interpreter the kernel takes seconds."""
    monkeypatch.setattr(threshold, "by_levels", by_bits)


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=DEVICE)[:, None]


ROW = st.lists(st.one_of(st.integers(-24, 24).map(lambda n: n / 8), st.sampled_from([0.0, -torch.inf, -800.0, 30.0])), min_size=1, max_size=12)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(ROW, st.fixed_dictionaries(SETTING)), min_size=1, max_size=3))
def test_the_law_of_sampling(rows):
    """Rows of ties, zeros, one-hots and temperature 0, each with its own settings, are filtered to the last bit as by sorting."""
    rows = [(row, {k: NEUTRAL[k] if v is None else v for k, v in setting.items()}) for row, setting in rows if max(row) > -torch.inf]
    assume(rows and all(is_clear(row, **setting) for row, setting in rows))
    width = max(len(row) for row, _ in rows)
    logits = torch.tensor([row + [-torch.inf] * (width - len(row)) for row, _ in rows], dtype=torch.float64)
    columns = {name: torch.tensor([s[name] for _, s in rows], dtype=torch.float64) for name in NEUTRAL}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threshold, "by_levels", by_bits)
        patch.setattr("sampling._keep_top", keep_top)
        out = probabilities(logits.to(DEVICE), **{name: values.to(DEVICE) for name, values in columns.items()}).cpu()
    assert torch.equal(out, probabilities(logits, **columns))


@pytest.mark.parametrize("V", [1, 65, 200])
def test_flat_and_steep_rows(V, plainly):
    torch.manual_seed(V)
    logits = torch.stack((torch.zeros(V), torch.randint(-3, 4, (V,)).float(), 8 * torch.randn(V))).double()
    probs = logits.softmax(-1).to(DEVICE)
    for k, p in ((None, 0.3717), (V // 2, 0.7773), (V + 5, 0.999999)):
        k, p = (None if s is None else column(s, s, s) for s in (k, p))
        assert torch.equal(keep_top(probs, k, p).cpu(), _keep_top(probs.cpu(), *(None if s is None else s.cpu() for s in (k, p))))


def test_exactly_so_many_of_equals_the_first(plainly):
    flat = torch.full((1, 8), 0.125, dtype=torch.float64, device=DEVICE)
    for k in range(1, 9):
        assert (keep_top(flat, column(k), None)[0] > 0).tolist() == [True] * k + [False] * (8 - k)
    for p, kept in [(1e-300, 1), (0.125, 1), (0.126, 2), (0.75, 6), (0.876, 8), (1, 8)]:            # eighths are exact
        assert (keep_top(flat, None, column(p))[0] > 0).tolist() == [True] * kept + [False] * (8 - kept)
    assert (keep_top(flat, column(4), column(0.5))[0] > 0).tolist() == [True] * 2 + [False] * 6                         # half of what top-k left


@settings(deadline=None, max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(B=st.integers(0, 2), V=st.integers(1, 200), mass=st.booleans(), seed=st.integers(0, 99))
def test_the_kernel_finds_what_the_bisection_finds(B, V, mass, seed):
    torch.manual_seed(seed)
    probs = (torch.randint(0, 9, (B, V)).double() / 2.0**16).to(DEVICE)                                                 # sums are exact
    target = torch.where(torch.rand(B, 1) < 0.2, torch.inf, torch.rand(B, 1) * (probs.sum(-1, keepdim=True).cpu() if mass else V)).double().to(DEVICE)
    target = (target if mass else target.floor()).clamp(min=2.0**-16 if mass else 1)
    keys = probs.view(torch.int64)
    assert torch.equal(by_levels(keys, target, mass), by_bits(keys, target, mass))


def test_both_filters_by_the_kernel():
    probs = torch.tensor([[0.125, 0.25, 0.25, 0.25, 0.125]] * 20, dtype=torch.float64, device=DEVICE).view(1, 100) / 32   # in two pieces
    assert (keep_top(probs, column(30), column(0.5))[0] > 0).nonzero().flatten().tolist() == [i for i in range(100) if i % 5 in (1, 2, 3)][:15]


def table() -> list[list[int]]:
    return [[arch, *threshold.compiled(128256, mass, arch)] for arch, mass in ((90, True), (80, False))]


@pytest.mark.meanwhile(apart, "test_threshold", "table")
def test_nothing_spills(meanwhile):
    for arch, registers, spills, shared in meanwhile():
        assert spills == 0 and registers <= 168 and shared <= SHARED[arch]       # Triton 3.6 takes 150, 3.7 118


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_graph_of_it():
    """Captured once, it filters whatever the row and the settings are then."""
    logits, k, p = torch.randn(4, 128256, device=DEVICE), column(0, 50, 0, 7), column(0.9, 1, 0.5, 0.7)
    run = lambda: keep_top(logits.double().softmax(-1), k, p)
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    logits.normal_(), k.fill_(40), p.fill_(0.8)
    graph.replay()
    assert torch.equal(out.cpu() > 0, _keep_top(logits.cpu().double().softmax(-1), k.cpu(), p.cpu()) > 0)
