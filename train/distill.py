"""Distillation: train a small Llama to imitate a larger one, so that what it drafts is accepted.

Speculative decoding keeps a drafted token with probability α = Σ_x min(p(x), q(x)), p the target's distribution and q the draft's.
So a draft is good when q is near p, and it can be trained for that: not on the one token that came next in a text, but on all of
p, on text and on what the target itself tells:

    loss = KL(p ‖ q) = mean over tokens of Σ_x p(x) (log p(x) − log q(x)),        and α ≥ 1 − √(KL / 2)  (Pinsker)

and, in the last steps, on 1 − α itself: KL pulls wherever p is, which is what learning needs; 1 − α is what counts in the end.
The same loop does all there is to do here; it differs in where the student starts and what it learns from:

    python -m train.distill --target NAME --data FILE... --out DIR              a new draft learns from a target
    python -m train.distill --target NAME --alone ...                           the control: it learns from the text alone
    python -m train.distill --from-scratch --data FILE... --out DIR             a model, and its vocabulary (bpe.py), from text
    python -m train.distill --from NAME --kv-heads N --data FILE... --out DIR   fewer K/V heads (gqa.py): merged, then trained on

and with no flags at all a draft for the embedded model learns from 32 texts that this model tells.

  - Train at the length that will be used. Positions it never saw are foreign to a model: a draft trained on 256 tokens was accepted with
    0.68 up to there, and with 0.35 at 512 (measured on the pair in this repository).
  - The rate (of muon.py) is constant, then falls to zero over the last `--decay` of the steps.
  - Step i depends on the weights and i alone (stories.py), so a run that was killed goes on from its checkpoint exactly as if it
    had not been. α is measured on what is held out: every tenth story.

Not covered: several GPUs, texts that do not fit in memory.

Hinton et al. 2015 (arXiv:1503.02531); Zhou et al. 2023, DistillSpec (2310.08461); Eldan & Li 2023,
TinyStories (2305.07759).

    B sequences of a step · N tokens of each · T = B · N · V vocabulary · H, G, D query heads, K/V heads, head size
"""
from shell import begin

begin(__name__)                                         # what follows takes its time: a signal ends it in silence

import argparse
import json
import math
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from batcher import Batcher
from config import Config
from engine import check_device
from model import Llama
from request import Request, Settings
from shell import Parser, say, status, whole
from speculative import Decoder
from tokenizer import Tokenizer
from train import bpe
from train.gqa import cache_bytes, merge_heads
from train.muon import Optimizer, has_bfloat16
from train.stories import Text, hold_out, read_stories
from weights import find


# ---- The step of B equally long sequences -------------------------------------------------------------------------------------

class Batch:
    """B sequences of N tokens, each from its beginning, without a cache."""

    def __init__(self, tokens: Tensor):
        self.B, N = tokens.shape
        self.positions = torch.arange(N, device=tokens.device).repeat(self.B)                                   # [T]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:                # [T, H, D], [T, G, D] -> [T, H, D]
        q, k, v = (x.to(v.dtype).unflatten(0, (self.B, -1)).transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))           # [B, H, N, D]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(0, 1)


def precision(device: torch.device) -> Any:
    """Products in bfloat16 where the machine has instructions for it, around weights in float32."""
    return torch.autocast(device.type, torch.bfloat16) if has_bfloat16(device) else nullcontext()


def tell(llama: Llama, count: int, length: int, end: int, seed: int) -> Text:
    """What a model tells at temperature 1: `count` texts of `length` tokens, made together (batcher.py)."""
    requests = [Request([end], Settings(1.0, seed=(seed << 32) + i, max_tokens=length)) for i in range(count)]
    cache = llama.cache(length, count)
    for _ in Batcher(Decoder(llama, cache, llama.config.vocab_size), count).run(requests):
        pass
    return Text(torch.tensor([token for request in requests for token in (*request.tokens[1:], end)]), end)


# ---- What is measured ---------------------------------------------------------------------------------------------------------

def divergence(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """KL(p ‖ q), the mean over rows. Both [T, V]."""
    p, q = p_logits.float().log_softmax(-1), q_logits.float().log_softmax(-1)
    return F.kl_div(q, p, log_target=True, reduction="sum") / len(p)


def acceptance(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """α = Σ min(p, q) of each row: the probability that a token drafted from q is accepted. [T, V] -> [T]."""
    return torch.minimum(p_logits.float().softmax(-1), q_logits.float().softmax(-1)).sum(-1)


@torch.no_grad()
def measure(student: Llama, text: Text, target: Llama | None = None, length: int = 512, count: int = 40) -> dict[str, float]:
    """On held-out text, in the models' own dtype: bits per byte, and α against the target."""
    nats, tokens, alpha = 0.0, 0, 0.0
    for window in text.windows(length, count).to(student.device):                           # [N + 1]
        q = student(window[:-1])
        nats += F.cross_entropy(q.float(), window[1:], reduction="sum").item()
        tokens += len(q)
        if target is not None:
            alpha += acceptance(target(window[:-1]), q).sum().item()
    found = {"bits/token": nats / math.log(2) / tokens}
    if text.bytes:
        found["bits/byte"] = found["bits/token"] * len(text.tokens) / text.bytes
    return found | ({"acceptance": alpha / tokens} if target is not None else {})


def show(when: str, found: dict[str, float]) -> None:
    print(f"{when}: " + ", ".join(f"{name} {value:.4f}" for name, value in found.items()), flush=True)


# ---- Learning -----------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Recipe:
    """How a run goes. All of it may change when a run is resumed."""
    steps: int = 100
    batch: int = 8
    length: int = 512
    warmup: int = 40
    decay: float = 0.5                                                                      # of the steps, at the end
    own: float = 0.5                                                                        # of the steps, on the target's own texts
    overlap: float = 0.25                                                                   # of the steps, at the end, for α itself

    def factor(self, step: int) -> float:
        """Of the learning rate: up to 1, constant, then down to 0."""
        return min(1.0, (step + 1) / self.warmup, (self.steps - step) / max(1.0, self.decay * self.steps))


class Training:
    """A student, what it learns from, and how far it has come."""

    def __init__(self, student: Llama, text: Text | None, target: Llama | None, told: Text | None, recipe: Recipe):
        self.student, self.text, self.target, self.told, self.recipe = student.requires_grad_(), text, target, told, recipe
        self.optimizer, self.steps = Optimizer(student), 0

    def step(self) -> float:
        """One step; its loss, in nats a token, or 1 − α where that is what is trained for."""
        r, i = self.recipe, self.steps
        own = self.told is not None and (self.text is None or int((i + 1) * r.own) > int(i * r.own))
        crops = (self.told if own else self.text).crops(r.batch, r.length, i).to(self.student.device)       # [B, N + 1]
        tokens, after = crops[:, :-1], crops[:, 1:].flatten()
        with precision(self.student.device):
            logits = self.student(tokens.flatten(), Batch(tokens))
            if self.target is not None:
                with torch.no_grad():
                    goal = self.target(tokens.flatten(), Batch(tokens))
        if self.target is None:
            loss = F.cross_entropy(logits.float(), after)
        else:
            loss = divergence(goal, logits) if i < (1 - r.overlap) * r.steps else 1 - acceptance(goal, logits).mean()
        loss.backward()
        self.optimizer.step(r.factor(i), i)
        self.steps += 1
        return loss.item()

    def run(self, checkpoint: Path, every: float = 20) -> None:
        """To the last step, with a checkpoint every so many seconds."""
        start, first, saved, told, recent = time.time(), self.steps, time.time(), 0.0, []
        while self.steps < self.recipe.steps:
            recent.append(self.step())
            now, last = time.time(), self.steps == self.recipe.steps
            if now - told > 10 or last:
                speed = (self.steps - first) * self.recipe.batch * self.recipe.length / (now - start)
                say(f"step {self.steps:5} of {self.recipe.steps}  loss {sum(recent) / len(recent):.4f}  "
                    f"{speed:,.0f} tokens/s")
                told, recent = now, []
            if now - saved > every or last:
                self.save(checkpoint)
                saved = now

    def save(self, file: Path) -> None:
        """All that a run needs to go on; the file is there whole, or as it was before."""
        weights = {f"weight.{name}": place.detach() for name, place in self.optimizer.places.items()}
        tensors = {name: tensor.contiguous() for name, tensor in (weights | self.optimizer.state).items()}
        with whole(file) as new:
            save_file(tensors, new, metadata={"steps": str(self.steps)})

    @torch.no_grad()
    def resume(self, file: Path) -> None:
        """Go on from a checkpoint. ValueError if it is another model's."""
        places = {f"weight.{name}": place for name, place in self.optimizer.places.items()} | self.optimizer.state
        try:
            with safe_open(file, framework="pt") as stored:
                if {name: list(place.shape) for name, place in places.items()} != {name: stored.get_slice(name).get_shape() for name in stored.keys()}:
                    raise ValueError(f"{file} is the checkpoint of a model of another shape: delete it, or give the flags it was made with")
                for name, place in places.items():
                    place.copy_(stored.get_tensor(name))
                self.steps = int(stored.metadata()["steps"])
        except SafetensorError as error:
            raise ValueError(f"{file} is no whole checkpoint ({error}): delete it to begin anew") from None


# ---- Where a student starts ---------------------------------------------------------------------------------------------------

def new_model(config: Config, seed: int) -> Llama:
    """Random weights; what is added to the residual stream starts small."""
    llama = Llama(config, seed=seed)
    for layer in llama.layers:
        for linear in (layer.o_proj, layer.down_proj):
            linear.weight.data.mul_(0.3)
    return llama


def save_model(llama: Llama, folder: Path, temperature: float = 0.7) -> None:
    """A model folder, in bfloat16."""
    tensors = {name: place.detach().to(torch.bfloat16).contiguous() for name, place in llama.places().items()}
    with whole(folder / "model.safetensors") as new:
        save_file(tensors, new, metadata={"format": "pt"})
    config = llama.config.to_dict() | {"torch_dtype": "bfloat16"}
    generation = dict(do_sample=True, temperature=temperature, eos_token_id=config["eos_token_id"])
    for name, data in (("config.json", config), ("generation_config.json", generation)):
        with whole(folder / name) as new:
            new.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


# ---- The command line ---------------------------------------------------------------------------------------------------------

def shape(args: argparse.Namespace, vocab_size: int, end: int) -> Config:
    """The config of a new student."""
    if args.width % args.heads and args.head_dim is None:
        raise ValueError(f"--width {args.width} is not a multiple of --heads {args.heads}: change one, or give --head-dim")
    return Config(vocab_size=vocab_size, hidden_size=args.width, intermediate_size=args.mlp or 2 * args.width, num_hidden_layers=args.layers,
                  num_attention_heads=args.heads, num_key_value_heads=args.kv_heads or max(1, args.heads // 2),
                  head_dim=args.head_dim or args.width // args.heads, max_position_embeddings=args.context, rms_norm_eps=1e-5,
                  tie_word_embeddings=True, eos_token_ids=(end,))


def vocabulary(args: argparse.Namespace, out: Path, stories: Sequence[str]) -> tuple[Tokenizer, int]:
    """The tokenizer of the model that is learnt from or gone on with, or a new one; a copy of it is put in `out`. And its end-of-text."""
    source = args.tokenizer or args.target or args.start
    if source is not None:
        for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"):
            if (find(source) / name).exists() and find(source).resolve() != out.resolve():
                shutil.copy(find(source) / name, out)
    elif not (out / "tokenizer.json").exists():
        say(f"learning {args.vocab} tokens from {len(stories):,} stories")
        bpe.write(out, bpe.learn(stories, args.vocab - 1), args.context)
    tokenizer = Tokenizer.load(out)
    if bpe.END not in tokenizer.specials and not (source and Config.load(find(source)).eos_token_ids):
        raise ValueError(f"{source}: its tokenizer has no {bpe.END}, and its config.json names no end-of-text token")
    return tokenizer, tokenizer.specials.get(bpe.END) or Config.load(find(source)).eos_token_ids[0]


def beginning(args: argparse.Namespace, tokenizer: Tokenizer, end: int, held: Text) -> Llama:
    """The student before it learns: new, or an existing model, with its heads merged if asked."""
    if args.start is None:
        return new_model(shape(args, args.vocab if args.target is None and args.tokenizer is None else tokenizer.vocab_size, end), args.seed)
    student = Llama.load(args.start, args.device, torch.float32, trainable=True)
    if args.kv_heads:
        config, length = student.config, student.config.max_position_embeddings
        show(f"before the merge ({config.num_key_value_heads} key/value heads)", measure(student, held))
        before = cache_bytes(student, length)
        student = merge_heads(student, args.kv_heads)
        print(f"cache of {length} tokens in bfloat16: {before:,} bytes with {config.num_key_value_heads} heads, {cache_bytes(student, length):,} with {args.kv_heads}")
    return student


def fits(args: argparse.Namespace, target: Config, vocab_size: int) -> None:
    """ValueError if this target cannot teach such a student."""
    if target.vocab_size != vocab_size:
        raise ValueError(f"{args.start or 'the tokenizer'} has {vocab_size} tokens and {args.target} {target.vocab_size}: a draft must share its target's vocabulary")
    if args.length >= target.max_position_embeddings:
        raise ValueError(f"--length {args.length}: {args.target} was made for at most {target.max_position_embeddings} tokens; give fewer")


def distill(args: argparse.Namespace) -> None:
    """The whole of it: text, target, student; measure, learn, measure, save."""
    check_device(args.device)
    out, stories = Path(args.out), read_stories(args.data) if args.data else []
    if not stories and args.target is None:
        raise ValueError("there is no --data: only a --target can tell texts of its own to learn from")
    out.mkdir(parents=True, exist_ok=True)
    heard, unheard = hold_out(stories)
    tokenizer, end = vocabulary(args, out, heard)
    target = Llama.load(args.target, args.device, torch.float32, trainable=True).requires_grad_(False) if args.target else None
    if target is not None:
        fits(args, target.config, tokenizer.vocab_size if args.start is None else Config.load(find(args.start)).vocab_size)
    text, held, told = None, None, None
    if stories:
        say(f"encoding {len(stories):,} stories")
        text, held = Text.encode(heard, tokenizer, end), Text.encode(unheard, tokenizer, end)
        say(f"{len(text.tokens):,} tokens to learn from, {len(held.tokens):,} held out")
    if target is not None and args.own and not args.alone:
        say(f"the target tells {args.tales} texts")
        told = tell(target, args.tales, args.length + 1, end, args.seed)
    if held is None:
        held = tell(target, 12, args.length + 1, end, args.seed + 1)
    student = beginning(args, tokenizer, end, held).to(args.device)
    show("before", measure(student, held, target))
    recipe = Recipe(args.steps, args.batch, args.length, args.warmup, args.decay, args.own, args.overlap)
    training = Training(student, text, None if args.alone else target, told, recipe)
    if (checkpoint := out / "training.safetensors").exists():
        training.resume(checkpoint)
        say(f"going on after step {training.steps} ({checkpoint})")
    training.run(checkpoint)
    show("after", measure(student, held, target, count=args.windows))
    save_model(student, out)
    say(f"{out} holds a model of {sum(p.numel() for p in student.places().values()):,} parameters; {checkpoint.name} is no longer needed, "
        "except to go on with more --steps")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    p = Parser("python -m train.distill", "Train a small Llama to imitate a larger one, or from text alone.")
    p.add_argument("--target", help="the model to imitate: an alias, a Hub id or a folder (tiny, unless --from-scratch or --from)")
    p.add_argument("--from", dest="start", metavar="NAME", help="the student starts as this model (default: random weights)")
    p.add_argument("--from-scratch", action="store_true", help="no target: learn from the text alone, with a vocabulary of its own")
    p.add_argument("--alone", action="store_true", help="learn from the text alone, though α is measured against the target: the control")
    p.add_argument("--data", nargs="+", metavar="FILE", help=f"texts whose stories end with a line {bpe.END}; every tenth story is held out")
    p.add_argument("--out", default="draft", help="folder of the student, its tokenizer and its checkpoint (draft)")
    p.add_argument("--tokenizer", metavar="NAME", help="with --from-scratch: the vocabulary of this model")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    whole = [("vocab", 4096, "tokens of a new vocabulary"), ("layers", 1, ""), ("width", 128, ""), ("heads", 4, ""), ("kv-heads", None, "half"),
             ("head-dim", None, "width / heads"), ("mlp", None, "2 · width"), ("context", 1024, "longest text"), ("steps", 100, ""),
             ("batch", 8, "crops a step"), ("length", 512, "tokens of a crop"), ("warmup", 40, "steps"), ("seed", 1, ""),
             ("tales", 32, "texts that the target tells"), ("windows", 40, "held-out pieces of 512 tokens that are measured at the end")]
    for name, default, about in whole:
        p.add_argument(f"--{name}", type=int, default=default, help=f"{about} ({default})" if default is not None else about)
    p.add_argument("--decay", type=float, default=0.5, help="share of the steps, at the end, in which the rate falls to 0 (0.5)")
    p.add_argument("--own", type=float, default=0.5, help="share of the steps on the target's own texts (0.5)")
    p.add_argument("--overlap", type=float, default=0.25, help="share of the steps, at the end, that raise α itself instead of lowering KL (0.25)")
    args = p.parse_args(arguments)
    for name in ("vocab", "layers", "width", "heads", "kv_heads", "head_dim", "mlp", "context", "steps", "batch", "length", "warmup", "tales", "windows"):
        if (value := getattr(args, name)) is not None and not 1 <= value <= 2**20:
            p.error(f"--{name.replace('_', '-')} is {value}: it must be from 1 to {2**20:,}")
    if not -2**31 <= args.seed < 2**31:
        p.error(f"--seed is {args.seed}: it must be a whole number of at most 32 bits")
    if not all(0 <= share <= 1 for share in (args.decay, args.own, args.overlap)):
        p.error(f"--decay {args.decay}, --own {args.own} and --overlap {args.overlap} are shares: from 0 to 1")
    if args.from_scratch and (args.target or args.start):
        p.error("--from-scratch takes neither --target nor --from")
    if args.target is None and args.start is None and not args.from_scratch:
        args.target = "tiny"
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    return status(lambda: distill(args), SafetensorError,
                  interrupted=f"stopped; the same command goes on from the last checkpoint in {args.out}")


if __name__ == "__main__":
    sys.exit(main())
