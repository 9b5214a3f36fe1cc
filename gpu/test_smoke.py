"""The one test of gpu/ in the default run: the others take minutes (-m gpu_interpreter)."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")
from checkpoint.config import Config
from checkpoint.formats import Quantization
from checkpoint.load import fill_model
from gpu import GPU
from gpu.test_graphs import recorded
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
    cache = PagedCache.of(llama, 8, 4, bits=(8, 4))
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
