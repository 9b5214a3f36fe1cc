"""Files that the `gguf` package writes, and what we read there.

    python .ci/gguf_reference.py            (with gguf and transformers)

For each type: metadata and weights equal those that went in, within 1e-6 of the largest weight.
Types that the package cannot quantize (Q4_K, Q5_K, Q6_K) have random blocks. Random models of Qwen,
with the package's names, have the logits and greedy tokens that transformers gives the same file.
"""

import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
import torch
from checks import require
from random_models import BASE, CASES, greedy, greedy_of, make
from transformers import AutoModelForCausalLM, PreTrainedModel, logging

sys.path.insert(0, str(Path(__file__).parent.parent))

from checkpoint.gguf import GGUF, TYPES
from checkpoint.gguf_blocks import BLOCK_FORMATS, unpack
from model import Llama

logging.set_verbosity_error()
logging.disable_progress_bar()

ROWS = 48
COLUMNS = 768
METADATA = {
    "a.uint32": (gguf.GGUFWriter.add_uint32, 2**32 - 1),
    "a.uint64": (gguf.GGUFWriter.add_uint64, 2**64 - 1),
    "a.int32": (gguf.GGUFWriter.add_int32, -(2**31)),
    "a.int64": (gguf.GGUFWriter.add_int64, -(2**63)),
    "a.uint16": (gguf.GGUFWriter.add_uint16, 65535),
    "a.int16": (gguf.GGUFWriter.add_int16, -32768),
    "a.uint8": (gguf.GGUFWriter.add_uint8, 255),
    "a.int8": (gguf.GGUFWriter.add_int8, -128),
    "a.float32": (gguf.GGUFWriter.add_float32, 0.15625),
    "a.float64": (gguf.GGUFWriter.add_float64, 0.1),
    "a.bool": (gguf.GGUFWriter.add_bool, True),
    "a.string": (gguf.GGUFWriter.add_string, "Grüße, 世界 😀\n"),
    "strings": (gguf.GGUFWriter.add_array, ["", "▁the", "Ġthe", "\u0000"]),
    "integers": (gguf.GGUFWriter.add_array, [1, -2, 3]),
    "floats": (gguf.GGUFWriter.add_array, [0.5, -1.25]),
    "booleans": (gguf.GGUFWriter.add_array, [True, False]),
}


def k_blocks(type: str, draw: np.random.Generator) -> np.ndarray:
    """Random blocks of a K type, with scales of an ordinary size: uint8[ROWS, bytes of a row]."""
    form = BLOCK_FORMATS[type]
    num_blocks = ROWS * COLUMNS // form.weights
    blocks = draw.integers(0, 256, (num_blocks, form.nbytes), dtype=np.uint8)
    num_halves = 1 if type == "Q6_K" else 2
    halves = draw.normal(0, 0.01, (num_blocks, num_halves)).astype(np.float16).view(np.uint8)
    if type == "Q6_K":
        blocks[:, -2:] = halves
    else:
        blocks[:, :4] = halves
    return blocks.reshape(ROWS, -1)


def quantized(type: str, draw: np.random.Generator) -> np.ndarray:
    """Random weights, or blocks: uint8[ROWS, bytes of a row]."""
    if type.endswith("_K"):
        return k_blocks(type, draw)
    w = draw.normal(0, 1, (ROWS, COLUMNS)).astype(np.float32)
    w[1] = 0
    return gguf.quants.quantize(w, gguf.GGMLQuantizationType[type])


def write(file: Path, blocks: dict[str, np.ndarray], plain: dict[str, np.ndarray]) -> None:
    """A file with all metadata and tensors."""
    writer = gguf.GGUFWriter(file, "llama")
    for key, (add, value) in METADATA.items():
        add(writer, key, value)
    for type, data in blocks.items():
        writer.add_tensor(type, data, raw_dtype=gguf.GGMLQuantizationType[type])
    for type, data in plain.items():
        writer.add_tensor(type, data, raw_dtype=gguf.GGMLQuantizationType[type])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def largest_error(type: str, ours: torch.Tensor, data: np.ndarray) -> float:
    """The largest difference from the package's weights, as a share of the largest weight."""
    theirs = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[type])
    reference = torch.from_numpy(np.array(theirs, np.float32))
    return ((ours.float() - reference).abs().max() / reference.abs().max()).item()


def write_qwen(file: Path, kind: str, model: PreTrainedModel) -> None:
    """A model in float32, as llama.cpp's converter would name and order it."""
    c = model.config
    writer = gguf.GGUFWriter(file, kind)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_vocab_size(c.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([str(token) for token in range(c.vocab_size)])
    writer.add_token_types([1] * c.vocab_size)
    if kind == "qwen3":
        writer.add_key_length(c.head_dim)
        writer.add_value_length(c.head_dim)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], c.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@torch.inference_mode()
def compare_qwen(kind: str, seed: int, folder: Path) -> None:
    """Beside transformers' own reading of the file."""
    file = folder / f"{kind}.gguf"
    # Of Qwen 3's heads transformers reads no size here: it takes 128.
    changes = {"head_dim": 128} if kind == "qwen3" else {}
    write_qwen(file, kind, make(kind, seed, **changes))
    reference = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name)
    tokens = torch.randint(BASE["vocab_size"], (60,))
    llama = Llama.load(file, "cpu", torch.float32)
    expected = reference(tokens[None]).logits[0]
    error = ((llama(tokens) - expected).abs().max() / expected.abs().max()).item()
    is_same = greedy(llama, tokens[:9]) == greedy_of(reference, tokens[:9])
    told = f"{kind}: logits differ by {error:.1e} from those of transformers, greedy tokens do not"
    require(error < 1e-4 and is_same, told)


def main() -> None:
    draw = np.random.default_rng(0)
    blocks = {type: quantized(type, draw) for type in BLOCK_FORMATS}
    plain = {
        "F32": draw.normal(0, 1, (3, 4, 5)).astype(np.float32),
        "F16": draw.normal(0, 1, (7,)).astype(np.float16),
    }
    plain["BF16"] = gguf.quants.quantize(plain["F32"], gguf.GGMLQuantizationType.BF16)
    known = {type.value: type.name for type in gguf.GGMLQuantizationType}
    is_table = all(known.get(i, str(i)) == name for i, name in enumerate(TYPES))
    require(is_table, f"the names of {len(TYPES)} types")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        write(file, blocks, plain)
        opened = GGUF.open(file)
        expected = {key: value for key, (_, value) in METADATA.items()}
        read = {key: opened.metadata.get(key) for key in expected}
        require(read == expected, f"metadata: {len(METADATA)} kinds of values")
        require(opened.tensors.keys() == blocks.keys() | plain.keys(), "all tensors are listed")
        for type, data in blocks.items():
            raw = opened.read(type)
            error = largest_error(type, unpack(type, raw).dequantize(), data)
            is_right = error < 1e-6 and np.array_equal(raw.numpy(), data)
            require(is_right, f"{type}: off by {error:.1e} of the largest weight")
        for type, data in plain.items():
            error = largest_error(type, opened.read(type), data)
            require(error == 0, f"{type}: off by {error:.1e}")
        for seed, kind in enumerate(case for case in CASES if case.startswith("qwen")):
            compare_qwen(kind, seed, Path(folder))


if __name__ == "__main__":
    main()
