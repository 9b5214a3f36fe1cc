"""The self-test notices wrong C: what compilers might make of a line is planted there."""

import ctypes
import warnings
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

import cpu
from cpu import CPU, native, selftest
from cpu.compiled import cache_folder, compile_library
from cpu.testing import has_tiles

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"no C here: {native.why_not()}")

HEAD = """
int planted;
#define SWAPPED(x) ({ __typeof__(x) z = (x); z[0] = (x)[1]; z[1] = (x)[0]; z; })
"""
# What stands once in the source; what is wrong there if WRONG, and ... is what stands there; the
# operation that is told.
PLANTS = [
    ("INLINE vec step_f32(const char *w, int c) {", "... if (WRONG) w += 4;", "float32"),
    ("INLINE vec step_nf4(const char *w, int c) {", "... if (WRONG) w += 4;", "nf4"),
    ("INLINE vec step_f8(const char *w, int c) {", "... if (WRONG) w += 1;", "fp8"),
    ("INLINE ints step_i8(const char *w, int c) {", "... if (WRONG) w += 2;", "weights: 8"),
    ("INLINE ints step_i4(const char *w, int c) {", "... if (WRONG) c ^= 1;", "weights: 4"),
    ("ints both = *(const ints *)w;", "... if (WRONG) both = SWAPPED(both);", "bfloat16"),
    (
        "*y = fused(total",
        "if (WRONG && T == 5 && COLUMNS_##sort * STEPS_##kind == 8) total = SWAPPED(total); ...",
        "weights: 4",  # which with 33 rows is unfolded
    ),
    ("to[c * VECS] = step_##kind(w, c);", "if (!(WRONG)) ...", "look-up (weights: float32)"),
    ("if (!a->scale) return each(1);", "... if (WRONG) return (vec){0};", "weights: 8"),
    ("s -= (zero & ~far) * x->sum;", "if (!(WRONG)) ...", "weights: 4"),
    ("return fused(number(zero & far)", "if (WRONG) sum *= 0; ...", "8, zeros"),
    (
        "if (!a->zero) return",
        "if (WRONG && !a->zero) return number(s) * x->scale; ...",
        "4, one zero",
    ),
    ("if (a->float_zeros)\n", "if (WRONG && a->float_zeros) return number(s); ...", "4, fractions"),
    ("to[k] = x[w->order ? w->order[k] : k];", "... if (WRONG) to[0] = 0;", "8, input 8"),
    ("return rintf(x / step.f) * step.f;", "if (WRONG) return x; ...", "fp8, input 8"),
    ("y[t * N + n] += w->bias[n];", "if (!(WRONG)) ...", "float32"),
    ("] = value * scale;", "] = WRONG ? 0 : value * scale;", "look-up (weights: float32)"),
    ("squares = fused(z, z, squares);", "if (!(WRONG)) ...", "RMSNorm"),
    ("z += load_some(delta", "z += (WRONG ? NAN : 0) + load_some(delta", "RMSNorm"),
    ("if (kind == F32) return", "if (WRONG && kind == F32) return (vec){0}; ...", "(16, 8)"),
    ("if (kind == BF16) return", "if (WRONG && kind == BF16) return (vec){0}; ...", "(4, 16)"),
    ("return (kind == I8 ? load_i8(p)", "if (WRONG && kind == I4) zero += 4; ...", "(4, 16)"),
    ("(kind == I4 ? 0.25f : 1);", "... if (WRONG && kind == I8) scale = 0;", "(16, 8)"),
    ("all[i] = exponentials(p + i * M, seen[i]);", "... if (WRONG) all[0] = 1;", "attention"),
    ("all[i] = exponentials(p + i * keys_wide", "if (WRONG) continue; ...", "attention"),
    ("y[i + half] = two * cos[i] + one * sin[i];", "... if (WRONG) y[i] = one;", "attention"),
    ("all = total;", "... if (WRONG) all = 1;", "softmax"),
    ("float all = total;", "... if (WRONG) all = NAN;", "softmax"),  # NotFinite
    ("x = room, room = swap;", "if (!(WRONG)) ...", "filters"),
    ("{ best = score[i]; picked = at + i; }", "... if (WRONG) picked = 0;", "pick"),
    ("ended[b] = j;", "... if (WRONG) ended[b] = 0;", "verify"),
    ("j > 0 && w[j] != 1;", "j > 0 && (WRONG || w[j] != 1);", "verify"),
    ("// Not divided by its mass", "if (WRONG) w[j] = 1; ...", "verify"),
]
PLANTS_IN_TILES = [
    ("= eight >> 4 & 0x0F0F0F0F;", "... if (WRONG) to[64] = 0;", "weights: 4"),
    ("= widen_u16(two) | widen_u16(next) << 16;", "... if (WRONG) *to = 0;", "weights: 8"),
    ("ints nearest = nearest_bf16(all);", "... if (WRONG) nearest = (ints)all;", "bfloat16"),
    ("two[t] = (ints){0}", "two[t] = WRONG ? (ints){0} : (ints){0}", "bfloat16"),
]


@pytest.fixture(scope="module")
def plant() -> Iterator[Callable[[int], native.Loaded]]:
    """Makes the library that `native` uses wrong by this plant, or right by 0: compiled once, with
    all of them."""
    source = native.source()
    for n, (line, wrong, _) in enumerate(PLANTS + PLANTS_IN_TILES, 1):
        assert source.count(line) == 1, line
        wrong = wrong.replace("...", line).replace("WRONG", f"planted == {n}")
        source = source.replace(line, wrong)

    def compiled(sources: list[str], flags: Sequence[str], linked: Sequence[str]) -> ctypes.CDLL:
        return compile_library(sources, [*flags, "-O0"], linked)  # quickly

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "translation_units", lambda: [HEAD + source])
        patch.setattr(native, "compile_library", compiled)
        library = native.build_library()
        loaded = native.Loaded(library)
        patch.setattr(native, "load_library", lambda: loaded)

        has_tiles = native.LONG.in_dll(library, "has_tiles")
        are_there = has_tiles.value

        def put(n: int) -> native.Loaded:
            loaded.library = library
            has_tiles.value = are_there and n not in range(1, len(PLANTS) + 1)
            ctypes.c_int.in_dll(library, "planted").value = n
            return loaded

        yield put


def test_each_wrong_operation_is_told(plant):
    plant(0)
    assert selftest.first_wrong(CPU()) == ""
    plants = PLANTS + PLANTS_IN_TILES * has_tiles()
    for n, (line, _, operation) in enumerate(plants, 1):
        plant(n)
        assert operation in selftest.first_wrong(CPU()), line


def test_the_number_of_threads_is_what_it_was(monkeypatch):
    """Whatever else ran on the machine during the self-test."""
    before = torch.get_num_threads()
    monkeypatch.setattr(selftest, "first_wrong", lambda *_: torch.set_num_threads(before + 1) or "")
    cpu.ops.__wrapped__()
    assert torch.get_num_threads() == before


def test_wrong_c_is_not_used_and_one_line_says_so(plant):
    logits = torch.randn(2, 70)
    softmax = [n for n, (*_, operation) in enumerate(PLANTS, 1) if operation == "softmax"]
    for planted in (0, *softmax):
        loaded = plant(planted)
        with warnings.catch_warnings(record=True) as told:
            ops = cpu.ops.__wrapped__()
        probs = ops.probabilities(logits, temperature=0.7)
        torch.testing.assert_close(probs, (logits / 0.7).softmax(-1))
        assert (loaded.library is None) == (planted > 0)
        lines = [str(warning.message) for warning in told]
        assert lines == [f"{native.WITHOUT_C}: {loaded.why_not}"] * (planted > 0)
    assert loaded.why_not.startswith("as compiled here, softmax is wrong: set CC to another")
    assert str(cache_folder()) in loaded.why_not
