"""Small random models made by transformers, one for each thing that a config can ask for.

Needs transformers. `python .ci/random_models.py` writes test_data/: the models and the logits that
transformers gives them, which test_model.py compares ours with, offline. transformers_reference.py
makes others, live.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvcache import KVCache
from model import Llama

BASE = dict(
    vocab_size=43,
    hidden_size=24,
    intermediate_size=36,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
)
LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
CASES: dict[str, dict[str, Any]] = {
    "mha": dict(num_key_value_heads=4),
    "gqa2-tied": dict(tie_word_embeddings=True),
    "gqa4-mqa": dict(num_key_value_heads=1, rope_theta=500.0),
    "gqa4": dict(num_attention_heads=8, num_key_value_heads=2, head_dim=4),
    "llama3-scaling": dict(rope_scaling=LLAMA3, rope_theta=10000.0, head_dim=12),
    "linear-scaling": dict(rope_scaling=dict(rope_type="linear", factor=3.0)),
    "head-dim": dict(head_dim=10, num_attention_heads=6, num_key_value_heads=3),
    "biases": dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "sharded": dict(num_hidden_layers=3),
    "qwen2": dict(model_type="qwen2", tie_word_embeddings=True, rope_theta=1e6),
    "qwen3": dict(model_type="qwen3", head_dim=10, rope_theta=1e6, sliding_window=8),
    "yarn": dict(model_type="qwen2", rope_scaling=YARN, head_dim=12),
}
TOKENS = 60  # past the original length of the scaled model


def make(case: str, seed: int, **changes: Any) -> PreTrainedModel:
    """A model whose logits are of order 1 and depend on every weight: norms and biases are random
    too."""
    torch.manual_seed(seed)
    config = dict(model_type="llama") | BASE | CASES[case] | changes
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(1 if "norm" in name else 0, 0.2 if p.dim() == 1 else 1.5 * p.shape[1] ** -0.5)
    return model


def save(case: str, model: PreTrainedModel, folder: Path) -> None:
    """As the Hub would hold it: one file, or shards with an index."""
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder, max_shard_size="16KB" if case == "sharded" else "1GB")
    (folder / "generation_config.json").unlink(missing_ok=True)


def move_rope(folder: Path, place: str) -> None:
    """Put the rotary settings where configs of another age have them."""
    config = json.loads((folder / "config.json").read_text())
    rope = {
        **(config.pop("rope_scaling", None) or {}),
        **(config.pop("rope_parameters", None) or {}),
    }
    rope.setdefault("rope_theta", config.pop("rope_theta", 10000.0))
    if place == "rope_parameters":
        config["rope_parameters"] = rope
    else:
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = {
            ("type" if k == "rope_type" and place == "type" else k): v for k, v in rope.items()
        }
        if rope.get("rope_type", "default") == "default":
            config["rope_scaling"] = None
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def greedy(llama: Llama, prompt: torch.Tensor, n: int = 20) -> list[int]:
    """The prompt, and n tokens after it: the most probable ones, by a cache."""
    cache = KVCache(llama.kv_spec(), len(prompt) + n)
    seq, _ = cache.open(())
    tokens = prompt.tolist()
    new = tokens
    for _ in range(n):
        logits = llama(torch.tensor(new), cache.extend([(seq, new)]), slice(-1, None))
        new = [int(logits.argmax())]
        tokens = tokens + new
    return tokens


def greedy_of(reference: PreTrainedModel, prompt: torch.Tensor, n: int = 20) -> list[int]:
    """The same by transformers."""
    reference.generation_config.eos_token_id = None
    how = dict(max_new_tokens=n, do_sample=False, attention_mask=torch.ones_like(prompt)[None])
    return reference.generate(prompt[None], **how)[0].tolist()


def main() -> None:
    root = Path(__file__).parent.parent / "test_data"
    expected = {}
    for seed, case in enumerate(CASES):
        model = make(case, seed)
        save(case, model, root / case)
        move_rope(root / case, ("rope_parameters", "rope_scaling", "type")[seed % 3])
        tokens = torch.randint(
            0, BASE["vocab_size"], (TOKENS,), generator=torch.Generator().manual_seed(seed)
        )
        with torch.no_grad():
            expected |= {
                f"{case}.tokens": tokens,
                f"{case}.logits": model(tokens[None]).logits[0].contiguous(),
            }
    save_file(expected, root / "expected.safetensors")


if __name__ == "__main__":
    sys.exit(main())
