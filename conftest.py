"""What the tests share: small random models in folders of their own, such as a user might have."""
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from config import Config
from model import Llama

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"                # before anybody imports Triton: its kernels are then run as Python

CHATML = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SMALL = dict(vocab_size=261, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             head_dim=6, max_position_embeddings=96, tie_word_embeddings=True, eos_token_ids=(256,))


def byte_alphabet() -> list[str]:
    """The 256 printable characters that stand for bytes in a byte-level vocabulary (GPT-2's)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    odd = [b for b in range(256) if b not in plain]
    return [chr(b) if b in plain else chr(256 + odd.index(b)) for b in range(256)]


def write_tokenizer(folder: Path, template: str | None = None) -> None:
    """Every byte is a token, and there are three control tokens."""
    added = [dict(id=256 + i, content=text, special=True, normalized=False, lstrip=False, rstrip=False, single_word=False)
             for i, text in enumerate(SPECIALS)]
    split = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
    vocab = {c: b for b, c in enumerate(byte_alphabet())}
    tokenizer = dict(version="1.0", added_tokens=added, normalizer=None, pre_tokenizer=split, post_processor=None, decoder=split,
                     model=dict(type="BPE", dropout=None, unk_token=None, continuing_subword_prefix=None, end_of_word_suffix=None,
                                fuse_unk=False, byte_fallback=False, ignore_merges=False, vocab=vocab, merges=[]))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIALS[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | ({"chat_template": template} if template else {})))


def write_model(folder: Path, template: str | None = None, seed: int = 0, generation: dict[str, Any] | None = None, scale: float = 12.0,
                **config: Any) -> Path:
    """A model folder with random weights, large enough (`scale`) that its logits differ; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    llama = Llama(Config(**{**SMALL, **config}), seed=seed)
    tensors = {name: (place * (1 if "norm" in name else scale)).contiguous() for name, place in llama.places().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(llama.config.to_dict()))
    (folder / "generation_config.json").write_text(json.dumps(generation or {}))
    write_tokenizer(folder, template)
    return folder


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model: no chat template."""
    return write_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def instruct(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a chat template."""
    return write_model(tmp_path_factory.mktemp("instruct"), template=CHATML, eos_token_ids=(256, 258))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Products this small are up to thirty times slower on two threads of a busy machine than on one."""
    torch.set_num_threads(1)
