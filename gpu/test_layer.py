"""A layer of Llama 3.1 8B in every width, and whole texts, beside plain torch: on a GPU.

Where there is none, a small layer in Triton's interpreter; and the texts are C's.

The logits of a step are compared with those of `kernels.Ops` in float32, of the same stored weights
and over the same cache:

    ‖out − wanted‖ / ‖wanted‖  ≤  ε + √(ε s)

ε is what rounding to the dtype leaves. Where numbers are rounded to a grid with steps of s (in
standard deviations), as keys, values and the inputs of W8A8 are, a difference of ε moves a share of
ε / s of them to the next step, by s.
"""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")
from generate import Engine
from gpu import GPU
from gpu.test_contract import COMPILED
from gpu.testing import DEVICE, recorded
from kernels import Ops
from loading import Model, load_draft
from measure.gpu_parts import HEAD_NORMS, SHAPES, WAYS, open_texts, random_model
from measure.sizes import GPU_SIZES, QUICK
from model import Llama
from paged import PagedCache
from quant import FORMATS, WIDTHS
from request import Settings
from settings import Options

pytestmark = pytest.mark.gpu
ROUNDING = {torch.bfloat16: 2.5e-2, torch.float32: 1e-4}  # ε: twice that of plain bfloat16
GRIDS = {  # s
    "8": 0.03,  # 254 steps for 7 deviations
    "8/4": 0.35,  # 15 steps for 5
    "4": 0.35,
    "W8A8": 4 * 0.03,  # four products, one after the other
    "FP8 W8A8": 4 * 0.09,
}
SIZES = GPU_SIZES if COMPILED else replace(QUICK, device=str(DEVICE))
SHAPE = replace(SHAPES["8B"] if COMPILED else SHAPES["tiny"], num_hidden_layers=1)
PASTS = (0, 90, 700)  # tokens before a step
STEPS = [[1], [8], [16], [17], [100]]  # new tokens of each sequence: with a past these are all
STEPS += [[1] * 8, [8] * 4, [16] * 4, [1] * 65, [40] * 3, [1, 60, 3]]  # variants of all kernels
CHECKED = [*product(PASTS, STEPS)]
if not COMPILED:
    SHAPE = replace(SHAPE, vocab_size=96)
    CHECKED = [(90, [1]), (0, [1, 20, 3])]
# No kernel reads both weights and keys, so each width of one goes with 16 bits of the other.
KINDS = [*product(("16 bits", HEAD_NORMS), WIDTHS, (SIZES.dtype,))]
KINDS += [("16 bits", "16", torch.float32), *product([*WAYS][1:], ("16",), (SIZES.dtype,))]


@pytest.mark.parametrize("way, kv_bits, dtype", KINDS)
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # padding is not read
@torch.inference_mode()
def test_a_layer_in_every_width(way, kv_bits, dtype, monkeypatch):
    """Launch by launch; and by a recording that other tokens made, of a rounded shape."""
    monkeypatch.setitem(SHAPES, "a layer", SHAPE)
    llama = random_model("a layer", way, SIZES, dtype, GPU())
    plain = random_model("a layer", way, SIZES, torch.float32, Ops())
    limit = ROUNDING[dtype]
    limit += math.sqrt(limit * (GRIDS.get(kv_bits, 0.0) + GRIDS.get(way, 0.0)))
    wrong = []
    with recorded() as recordings:
        for past, step in CHECKED:
            torch.manual_seed(0)
            metadata = open_texts(llama.kv_spec(bits=WIDTHS[kv_bits]), step, past)
            tokens = torch.randint(1, SHAPE.vocab_size, metadata.positions.shape, device=DEVICE)
            llama(tokens - 1, metadata)
            outputs = [llama.forward(tokens, metadata, None), llama(tokens, metadata)]
            wanted = plain.forward(tokens, metadata, None)
            errors = [((x.float() - wanted).norm() / wanted.norm()).item() for x in outputs]
            if not all(error <= limit for error in errors):  # NaN is wrong
                wrong.append((past, step, errors))
    assert recordings and not wrong, limit


@pytest.mark.parametrize("draft", [None, "tiny-draft"])
@pytest.mark.parametrize("bits, kv_bits", [*product((16,), WIDTHS), *product(FORMATS, ("16",))])
def test_greedy_texts_are_plain_torchs(bits, kv_bits, draft):
    """Two machines add in another order, so a near-tie may fall otherwise: plain torch on a CPU
    reads each text, and every token must have the best logit, or nearly so. Keys and values of 4
    bits have few steps: a sum in another order moves one of 100,000 numbers to the next step, and
    then logits by up to 0.01."""
    model = Model.load("tiny", DEVICE, torch.float32, bits)
    settings = Settings(temperature=0.0, seed=0, max_tokens=32, gamma=3)
    requests = [model.request(text, settings, chat=False) for text in ("Once", "One day, Tom")]
    options = Options(max_len=64, max_batch=2, kv_bits=kv_bits)
    drafts = load_draft(draft, model, torch.float32)
    for _ in Engine(model, drafts, options, tokens=128).batcher.run(requests):
        pass
    plain = Llama.load("tiny", "cpu", torch.float32, bits=bits, ops=Ops())
    for request in requests:
        cache = PagedCache(plain.kv_spec(bits=WIDTHS[kv_bits]), len(request.tokens))
        seq, _ = cache.open(())
        logits = plain(torch.tensor(request.tokens), cache.extend([(seq, request.tokens)]))
        made = torch.tensor(request.tokens[request.num_prompt_tokens :])
        logits = logits[-len(made) - 1 : -1]
        below = logits.amax(1) - logits[range(len(made)), made]
        assert len(made) == 32 and below.max() <= (1e-2 if "4" in kv_bits else 1e-3)
