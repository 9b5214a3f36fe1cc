"""Model folders, such as a user might have."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from checkpoint.config import Config
from model import Llama
from testing.models import SMALL

CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def byte_alphabet() -> list[str]:
    """The 256 printable characters that stand for bytes in a byte-level vocabulary (GPT-2's)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    odd = [b for b in range(256) if b not in plain]
    return [chr(b) if b in plain else chr(256 + odd.index(b)) for b in range(256)]


BYTE_LEVEL = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)


def tokenizer_json(
    vocab: dict[str, int],
    merges: list[Any],
    pre: dict[str, Any] = BYTE_LEVEL,
    ignore_merges: bool = False,
    special: dict[str, int] = {},
    plain: dict[str, int] = {},
    post: dict[str, Any] | None = None,
) -> dict[str, Any]:
    flags = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    added = []
    for text, id in (special | plain).items():
        added.append(dict(id=id, content=text, special=text in special, **flags))
    names = "dropout unk_token continuing_subword_prefix end_of_word_suffix"
    model = dict.fromkeys(names.split()) | dict(type="BPE", fuse_unk=False, byte_fallback=False)
    model |= dict(ignore_merges=ignore_merges, vocab=vocab, merges=merges)
    return dict(
        version="1.0",
        added_tokens=added,
        normalizer=None,
        pre_tokenizer=pre,
        post_processor=post,
        decoder=BYTE_LEVEL,
        model=model,
    )


def write_tokenizer(folder: Path, template: str | None = None) -> None:
    """Every byte is a token, and there are three control tokens."""
    vocab = {c: b for b, c in enumerate(byte_alphabet())}
    special = {text: 256 + i for i, text in enumerate(SPECIALS)}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIALS[0]}
    if template:
        config["chat_template"] = template
    tokenizer = tokenizer_json(vocab, [], special=special)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_model(
    folder: Path,
    template: str | None = None,
    seed: int = 0,
    generation: dict[str, Any] | None = None,
    scale: float = 12.0,
    dtype: str = "float32",
    **config: Any,
) -> Path:
    """A model folder with random weights, so large (`scale`) that logits differ; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    llama = Llama(Config(**{**SMALL, **config}), seed=seed)
    tensors = {}
    for name, tensor in llama.named_tensors().items():
        scaled = tensor if "norm" in name else tensor * scale
        tensors[name] = scaled.contiguous().to(getattr(torch, dtype))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(llama.config.to_dict()))
    (folder / "generation_config.json").write_text(json.dumps(generation or {}))
    write_tokenizer(folder, template)
    return folder


CHANGES = {  # what damage makes of a tensor
    "short": lambda x: x[:-1].clone(),
    "narrow": lambda x: x[:, :-1].contiguous(),
    "one": lambda x: x[:1].clone(),
    "a number": lambda x: x[0].clone(),
    "reversed": lambda x: x.flip(0),
    "plus_one": lambda x: x + 1,
    "negative": lambda x: x - 2**31,
    "zeros": torch.zeros_like,
    "NaN": lambda x: x * math.nan,
    "brackets": lambda x: torch.full((4096,), ord("["), dtype=torch.uint8),
    "not lowered, 4": lambda x: x + 0x11111111,  # zeros of GPTQ, in words of 8 and of 4
    "not lowered, 8": lambda x: x + 0x01010101,
}


def change_tensors(folder: Path, names: str, change: str) -> None:
    """Tensors whose names end so are missing, or of another dtype, or as CHANGES says; a state in
    JSON gets these fields, or becomes this number."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith(names)]:
        x = tensors.pop(name)
        if change in CHANGES:
            x = CHANGES[change](x)
        elif change[0] in "{1":
            state = json.loads(bytes(x.tolist()))
            new = json.loads(change)
            new = state | new if isinstance(new, dict) else new
            x = torch.tensor([*json.dumps(new).encode()], dtype=torch.uint8)
        elif change != "missing":
            x = x.to(getattr(torch, change))
        if change != "missing":
            tensors[name] = x
    save_file(tensors, file)
