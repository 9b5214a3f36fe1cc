"""EAGLE heads beside the `speculators` package: random heads, each flag, a Llama's layer and one of
Qwen 3, chains of three steps.

    python .ci/eagle_reference.py

The package saves a head; we load it, and draft after a text. Its own pass over the same features
and tokens must give the same logits, to 1e-4 of the largest.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import torch
from checks import require
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import AutoConfig

from checkpoint.config import Config
from checkpoint.load import load_eagle
from eagle import EagleHead
from kvcache import KVCache
from model import Llama
from testing.models import SMALL

V = SMALL["vocab_size"]
DRAFTED = torch.arange(0, V, 2)
LAYERS = [0, 1, 2]
STEPS = 3
FLAGS = ({}, {"norm_before_residual": True}, {"norm_before_fc": True}, {"fc_norm": True})
FLAGS += ({"norm_output": True}, {"norm_output": True, "norm_before_residual": True})
CASES = [("llama", flags) for flags in FLAGS] + [("qwen3", flags) for flags in FLAGS[:2]]


def theirs(kind: str, flags: dict) -> Eagle3DraftModel:
    """A random head of the package's, with a layer of this model_type."""
    layer = AutoConfig.for_model(
        kind,
        vocab_size=V,
        hidden_size=SMALL["hidden_size"],
        intermediate_size=28,
        num_hidden_layers=1,
        num_attention_heads=SMALL["num_attention_heads"],
        num_key_value_heads=SMALL["num_key_value_heads"],
        head_dim=SMALL["head_dim"],
        max_position_embeddings=96,
        attn_implementation="eager",
    )
    layer._attn_implementation = "eager"
    proposals = [GreedyTokenProposalConfig(speculative_tokens=STEPS)]
    verifier = VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=len(DRAFTED),
        eagle_aux_hidden_state_layer_ids=LAYERS,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=proposals,
            default_proposal_method="greedy",
            verifier=verifier,
        ),
        **flags,
    )
    model = Eagle3DraftModel(config)
    is_drafted = torch.zeros(V, dtype=torch.bool)
    is_drafted[DRAFTED] = True
    model.load_vocab_mappings(is_drafted, DRAFTED - torch.arange(len(DRAFTED)))
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape)
        weight.data.copy_(1 + noise / 4 if "norm" in name else noise / 3)
    return model.eval()


@torch.no_grad()
def compare(kind: str, flags: dict, folder: Path) -> float:
    """The largest difference of logits, over the largest logit."""
    model = theirs(kind, flags)
    model.save_pretrained(folder)
    config = Config(**SMALL | {"num_hidden_layers": 3, "model_type": kind})
    target = Llama(config, seed=1).pack_weights()
    head = load_eagle(EagleHead, folder, target, 16)
    text = torch.randint(V, (12 + STEPS,))
    n = 12  # rows of true features
    features = torch.randn(n, len(LAYERS), SMALL["hidden_size"])
    logits = []
    wanted = []
    lm_head = model.lm_head
    lm_head.register_forward_hook(lambda module, inputs, output: wanted.append(output[0]))
    # Its input_ids are shifted already: row t has the token after t. Steps of the chain read the
    # text's own tokens, as in training: what row n − 1 drafts is a chain after the whole text.
    document = torch.zeros(1, n + STEPS, dtype=torch.int64)
    padded = torch.cat((features, torch.zeros(STEPS, *features.shape[1:])))
    following = torch.cat((text[1:], text[:1]))
    model(
        hidden_states=padded.flatten(1)[None],
        input_ids=following[None],
        document_ids=document,
        ttt_steps=STEPS,
    )
    cache = KVCache(target.kv_spec(draft_layers=1), 40)
    seq, _ = cache.open(())
    z = head(head.combine(features), following[:n], cache.extend([(seq, text[:n])]))[-1:]
    for step in range(STEPS):
        logits.append(head.draft_logits(z)[0])
        token = following[n + step, None]
        z = head(z, token, cache.extend([(seq, token)]))
    difference = torch.stack(logits) - torch.stack([rows[n - 1] for rows in wanted[:STEPS]])
    return (difference.abs().max() / torch.stack(logits).abs().max()).item()


def main() -> None:
    torch.manual_seed(0)
    for kind, flags in CASES:
        with tempfile.TemporaryDirectory() as folder:
            error = compare(kind, flags, Path(folder))
        shown = flags or "no flags"
        told = f"EAGLE head of speculators, {kind}, {shown}: logits differ by {error:.1e}"
        require(error <= 1e-4, told)


if __name__ == "__main__":
    main()
