"""A step of all kernels: the one test of gpu/ in the default run, as the others take minutes (-m
gpu). And the same step with each part of gpu/ turned off."""

from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")
from triton.runtime.interpreter import InterpretedFunction

from checkpoint.config import Config
from checkpoint.formats import Quantization
from checkpoint.load import fill_model
from errors import UserError
from gpu import GPU, tuning
from gpu.testing import recorded
from kernels import Ops
from model import Llama
from paged import PagedCache

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CONFIG = Config(
    vocab_size=67,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=64,
)


def texts(ops: Ops) -> tuple[torch.Tensor, torch.Tensor]:
    """A prompt, then two tokens by one recording: logits [T, V], and tokens picked from them."""
    llama = Llama(CONFIG.quantized(Quantization(8)), DEVICE, seed=None, ops=ops)
    fill_model(llama, Llama(CONFIG, DEVICE, seed=1).named_tensors().items())
    llama.pack_weights()
    cache = PagedCache(llama.kv_spec(bits=(8, 4)), 8, 4)
    seq, _ = cache.open(())
    logits = []
    for tokens in ([1, 2, 3, 4, 5], [6], [7]):
        metadata = cache.extend([(seq, tokens)])
        logits.append(llama(torch.tensor(tokens, device=DEVICE), metadata))
    streams = torch.arange(2, device=DEVICE)[:, None]
    probs = ops.probabilities(torch.cat(logits[1:]) * 100, temperature=0.7, top_p=0.9)
    return torch.cat(logits), ops.pick(probs, streams)


@torch.inference_mode()
def test_recorded_steps_are_those_of_plain_torch():
    """Attention over 8/4-bit keys and values, INT8 products, a filter, the pick."""
    wanted, wanted_tokens = texts(Ops())
    with recorded() as recordings:
        logits, tokens = texts(GPU())
    assert len(recordings) == 2  # 5 tokens; 1 token
    torch.testing.assert_close(logits, wanted, atol=1e-4 * wanted.abs().max().item(), rtol=1e-3)
    assert tokens.tolist() == wanted_tokens.tolist()


ATTENTION = {"_store", "_attend"}
SAMPLING = {"_peaks", "_weigh", "_gather", "_edge", "_cut", "_race", "_winner"}
KERNELS = {  # that are launched no more
    "early": set(),
    "fetch": set(),
    "apart": set(),
    "chunks": set(),
    "graphs": set(),
    "splits": set(),
    "products": {"_product", "_product with SwiGLU"},
    "attention": ATTENTION,
    "sampling": SAMPLING,
    "fused": {"_add_norm", "_product with SwiGLU"},
}
ALL = {"_product", "_product with SwiGLU", "_add_norm", *ATTENTION, *SAMPLING}


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cuda", reason="the interpreter tells what is launched")
@pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning")  # no keys
@pytest.mark.parametrize("part", [*tuning.SWITCHES, ""])
@torch.inference_mode()
def test_results_stay_where_a_part_is_turned_off(part, monkeypatch):
    monkeypatch.setenv("LLAMA_GPU_OFF", part)
    monkeypatch.setattr(tuning, "LEAST_KEYS", 2)  # so that these few are split
    launch = InterpretedFunction.run
    launched = set()
    grids = set()

    def run(kernel: Any, *arguments: Any, grid: Any, **options: Any) -> None:
        launched.add(kernel.fn.__name__ + " with SwiGLU" * options.get("SWIGLU", False))
        grids.add(grid[2:])
        launch(kernel, *arguments, grid=grid, **options)

    assert (GPU().step_budget > Ops.step_budget) == (part != "chunks")
    with mock.patch.object(tuning, "has_sm_90", lambda device: True):
        assert tuning.starts_early(DEVICE) == (part != "early")
        assert tuning.fetches(DEVICE, 1) == (part != "fetch")
    with recorded() as recordings, mock.patch.object(InterpretedFunction, "run", run):
        logits, tokens = texts(GPU())
    assert ALL - launched == KERNELS.get(part, set())
    assert bool(recordings) == (part not in ("graphs", "attention", "sampling"))
    assert (max(grids) > (1,)) == (part not in ("splits", "attention"))
    assert (tuning.plan_product(9, 128, 1024, 8, 0).shares > 1) == (part != "splits")
    wanted, wanted_tokens = texts(Ops())
    torch.testing.assert_close(logits, wanted, atol=1e-4 * wanted.abs().max().item(), rtol=1e-3)
    assert tokens.tolist() == wanted_tokens.tolist()


@pytest.mark.gpu
def test_several_parts_and_a_name_that_is_none(monkeypatch):
    monkeypatch.setenv("LLAMA_GPU_OFF", "graphs, splits")
    assert [part for part in tuning.SWITCHES if not tuning.is_on(part)] == ["graphs", "splits"]
    monkeypatch.setenv("LLAMA_GPU_OFF", "graph")
    with pytest.raises(UserError, match="'graph' is no part of gpu/ that LLAMA_GPU_OFF turns off"):
        GPU()
