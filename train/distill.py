"""Distillation: train a small Llama to imitate a larger one, so that its drafts are accepted.

Speculative decoding accepts a drafted token with probability α = Σ_x min(p(x), q(x)), p the target's distribution and
q the draft's. So a draft learns all of p, on text and on the target's own texts; its last steps minimize 1 − α:

    loss = KL(p ‖ q) = mean over tokens of Σ_x p(x) (log p(x) − log q(x)),        and α ≥ 1 − √(KL / 2)  (Pinsker)

    python -m train.distill                                                     a draft for tiny, from its own texts
    python -m train.distill --target NAME --data FILE... --out DIR              a new draft learns from a target
    python -m train.distill --target NAME --alone ...                           for comparison: from the text alone
    python -m train.distill --from-scratch --data FILE... --out DIR             a model, and its vocabulary (bpe.py)
    python -m train.distill --from NAME --kv-heads N --data FILE... --out DIR   fewer K/V heads (gqa.py), trained on

Train at the length of use: tiny's draft, trained on 256 tokens, had α = 0.68 up to token 256 and α = 0.35 at token 512.
Invariant: step i depends on the training state and i alone (stories.py): a killed run resumes exactly from its
checkpoint. Not covered: several GPUs, texts that do not fit in memory.

Hinton et al. 2015 (arXiv:1503.02531); Zhou et al. 2023 (2310.08461); Eldan & Li 2023, TinyStories (2305.07759).
"""

if __name__ == "__main__":  # slow imports follow: a signal ends them in silence
    from app.shell import begin

    begin()

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import mean

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from app.shell import Parser, say, status, whole
from batcher import Batcher
from checkpoint.config import Config
from checkpoint.hub import find_folder
from errors import UserError
from kernels import Step, find_device
from kvcache import KVCache
from model import Llama
from request import Request, Settings
from speculative import Decoder
from tokenizer import Tokenizer
from train import bpe
from train.gqa import cache_bytes, merge_heads
from train.muon import Optimizer, has_bfloat16
from train.stories import Corpus, hold_out, read_stories


def sample_corpus(llama: Llama, count: int, length: int, end: int, seed: int) -> Corpus:
    """`count` texts of `length` tokens that the model makes at temperature 1, all in one batch (batcher.py)."""
    requests = [
        Request([end], Settings(1.0, seed=(seed << 32) + i, max_tokens=length))
        for i in range(count)
    ]
    for _ in Batcher(
        Decoder(llama, KVCache.of(llama, length, count), llama.config.vocab_size), count
    ).run(requests):
        pass
    return Corpus(
        torch.tensor([token for request in requests for token in (*request.tokens[1:], end)]), end
    )


def divergence(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """The mean of KL(p ‖ q) over rows. p_logits, q_logits: [T, V] -> []."""
    p, q = p_logits.float().log_softmax(-1), q_logits.float().log_softmax(-1)
    return F.kl_div(q, p, log_target=True, reduction="sum") / len(p)


def acceptance(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """α = Σ min(p, q) of each row: the probability that a token drafted from q is accepted. [T, V] -> [T]."""
    return torch.minimum(p_logits.float().softmax(-1), q_logits.float().softmax(-1)).sum(-1)


@torch.no_grad()
def evaluate(
    student: Llama, text: Corpus, target: Llama | None = None, length: int = 512, count: int = 40
) -> dict[str, float]:
    """On held-out text, in the models' own dtype: bits per token, bits per byte, and α against the target."""
    bits, alphas = [], []
    for window in text.windows(length, count).to(student.device):  # int64[N + 1]
        q = student(window[:-1])
        bits.append(F.cross_entropy(q.float(), window[1:]).item() / math.log(2))
        alphas += [acceptance(target(window[:-1]), q).mean().item()] if target is not None else []
    bytewise = {"bits/byte": mean(bits) * len(text.tokens) / text.bytes} if text.bytes else {}
    return {"bits/token": mean(bits)} | bytewise | ({"acceptance": mean(alphas)} if alphas else {})


def show(when: str, found: dict[str, float]) -> None:
    print(
        f"{when}: " + ", ".join(f"{name} {value:.4f}" for name, value in found.items()), flush=True
    )


@dataclass(frozen=True)
class Hyperparameters:
    """What a run can choose. A resumed run may choose otherwise."""

    steps: int = 100
    batch: int = 8
    length: int = 512
    warmup: int = 40
    decay: float = 0.5  # share of the steps, at the end, in which the rate falls to 0
    own: float = 0.5  # share of the steps on the target's own texts
    overlap: float = 0.25  # share of the steps, at the end, with the loss 1 − α

    def factor(self, step: int) -> float:
        """The share of the full learning rate at this step: up to 1, constant, then down to 0."""
        return min(
            1.0, (step + 1) / self.warmup, (self.steps - step) / max(1.0, self.decay * self.steps)
        )


class Training:
    """A student, its target, the texts that it learns from, and its optimizer. told: the texts that the target made."""

    def __init__(
        self,
        student: Llama,
        text: Corpus | None,
        target: Llama | None,
        told: Corpus | None,
        recipe: Hyperparameters,
    ):
        self.student, self.target, self.text, self.told = (
            student.requires_grad_(),
            target,
            text,
            told,
        )
        self.recipe, self.optimizer, self.steps = recipe, Optimizer(student), 0

    def step(self) -> float:
        """One training step -> its loss: in nats a token, or 1 − α in the last steps."""
        r, i, device = self.recipe, self.steps, self.student.device
        own = self.told is not None and (self.text is None or int((i + 1) * r.own) > int(i * r.own))
        crops = (
            (self.told if own else self.text).crops(r.batch, r.length, i).to(device)
        )  # [B, N + 1]
        tokens, step = crops[:, :-1].flatten(), Step.alone(r.batch, r.length, device)
        with torch.autocast(
            device.type, torch.bfloat16, enabled=has_bfloat16(device)
        ):  # weights stay float32
            logits = self.student(tokens, step)
            with torch.no_grad():
                goal = None if self.target is None else self.target(tokens, step)
        if goal is None:
            loss = F.cross_entropy(logits.float(), crops[:, 1:].flatten())
        else:
            loss = (
                divergence(goal, logits)
                if i < (1 - r.overlap) * r.steps
                else 1 - acceptance(goal, logits).mean()
            )
        loss.backward()
        self.optimizer.step(r.factor(i), i)
        self.steps += 1
        return loss.item()

    def run(self, checkpoint: Path, every: float = 20) -> None:
        """Train to the last step. every: seconds between checkpoints."""
        start, first, saved, said, recent, r = (
            time.time(),
            self.steps,
            time.time(),
            0.0,
            [],
            self.recipe,
        )
        while self.steps < r.steps:
            recent.append(self.step())
            now, last = time.time(), self.steps == r.steps
            if now - said > 10 or last:
                speed = (self.steps - first) * r.batch * r.length / (now - start)
                say(
                    f"step {self.steps:5} of {r.steps}  loss {mean(recent):.4f}  {speed:,.0f} tokens/s"
                )
                said, recent = now, []
            if now - saved > every or last:
                self.save(checkpoint)
                saved = now

    def state(self) -> dict[str, Tensor]:
        """The tensors of a checkpoint: weights and the optimizer's state."""
        return {
            f"weight.{name}": p.detach() for name, p in self.optimizer.places.items()
        } | self.optimizer.state

    def save(self, file: Path) -> None:
        """Write a checkpoint. If that fails, the old file stays as it was."""
        tensors = {name: tensor.contiguous() for name, tensor in self.state().items()}
        with whole(file) as new:
            save_file(tensors, new, metadata={"steps": str(self.steps)})

    @torch.no_grad()
    def resume(self, file: Path) -> None:
        """Resume from a checkpoint. ValueError if it is damaged, or of a model of another shape."""
        state = self.state()
        try:
            with safe_open(file, framework="pt") as stored:
                shapes = {name: stored.get_slice(name).get_shape() for name in stored.keys()}
                if {name: list(tensor.shape) for name, tensor in state.items()} != shapes:
                    raise UserError(
                        f"{file} is the checkpoint of a model of another shape: delete it, or give the "
                        "flags it was made with"
                    )
                for name, tensor in state.items():
                    tensor.copy_(stored.get_tensor(name))
                self.steps = int(stored.metadata()["steps"])
        except SafetensorError as error:
            raise UserError(
                f"{file} is no whole checkpoint ({error}): delete it to begin anew"
            ) from None


def new_model(config: Config, seed: int, device: torch.device | str = "cpu") -> Llama:
    """A model with random weights, the same on every device. o_proj and down_proj start small."""
    llama = Llama(config, device, seed=None)
    llama.fill(Llama(config, seed=seed).places().items())
    for linear in (linear for layer in llama.layers for linear in (layer.o, layer.down)):
        linear.weight.data.mul_(0.3)
    return llama


def save_model(llama: Llama, folder: Path) -> None:
    """Write a model folder, in bfloat16."""
    tensors = {
        name: place.detach().to(torch.bfloat16).contiguous()
        for name, place in llama.places().items()
    }
    with whole(folder / "model.safetensors") as new:
        save_file(tensors, new, metadata={"format": "pt"})
    config = llama.config.to_dict() | {"torch_dtype": "bfloat16"}
    generation = dict(do_sample=True, temperature=0.7, eos_token_id=config["eos_token_id"])
    for name, data in (("config.json", config), ("generation_config.json", generation)):
        with whole(folder / name) as new:
            new.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def student_tokenizer(
    args: argparse.Namespace, out: Path, stories: Sequence[str]
) -> tuple[Tokenizer, int]:
    """The tokenizer in `out`, which is a copy of a model's or learned from the stories; and its end-of-text token."""
    name = args.tokenizer or args.target or args.start
    if name is not None:
        if find_folder(name).resolve() != out.resolve():
            bpe.copy_files(find_folder(name), out, bpe.FILES)
    elif not (out / "tokenizer.json").exists():
        say(f"learning {args.vocab} tokens from {len(stories):,} stories")
        bpe.save_tokenizer(out, bpe.learn(stories, args.vocab - 1), args.context)
    tokenizer = Tokenizer.load(out)
    if end := tokenizer.specials.get(bpe.END):
        return tokenizer, end
    if name is None or not (ends := Config.load(find_folder(name)).eos_token_ids):
        raise UserError(
            f"{name}: its tokenizer has no {bpe.END}, and its config.json names no end-of-text token"
        )
    return tokenizer, ends[0]


def new_student(args: argparse.Namespace, tokenizer: Tokenizer, end: int, held: Corpus) -> Llama:
    """The student before training: random weights, or an existing model, its key/value heads merged if asked."""
    if args.start is None:
        if args.width % args.heads and args.head_dim is None:
            raise UserError(
                f"--width {args.width} is not a multiple of --heads {args.heads}: change one, or give "
                "--head-dim"
            )
        vocab = (
            args.vocab if args.target is None and args.tokenizer is None else tokenizer.vocab_size
        )
        return new_model(
            Config(
                vocab_size=vocab,
                hidden_size=args.width,
                intermediate_size=args.mlp or 2 * args.width,
                num_hidden_layers=args.layers,
                num_attention_heads=args.heads,
                rms_norm_eps=1e-5,
                eos_token_ids=(end,),
                num_key_value_heads=args.kv_heads or max(1, args.heads // 2),
                tie_word_embeddings=True,
                head_dim=args.head_dim or args.width // args.heads,
                max_position_embeddings=args.context,
            ),
            args.seed,
            args.device,
        )
    student = Llama.load(args.start, args.device, torch.float32, trainable=True)
    if args.kv_heads:
        heads, length = student.config.num_key_value_heads, student.config.max_position_embeddings
        show(f"before the merge ({heads} key/value heads)", evaluate(student, held))
        before, student = cache_bytes(student, length), merge_heads(student, args.kv_heads)
        print(
            f"cache of {length} tokens in bfloat16: {before:,} bytes with {heads} heads, "
            f"{cache_bytes(student, length):,} with {args.kv_heads}"
        )
    return student


def load_target(args: argparse.Namespace, tokenizer: Tokenizer) -> Llama:
    """The target, frozen. ValueError if its vocabulary or its context does not suit the student."""
    target = Llama.load(args.target, args.device, torch.float32, trainable=True).requires_grad_(
        False
    )
    c, size = (
        target.config,
        tokenizer.vocab_size
        if args.start is None
        else Config.load(find_folder(args.start)).vocab_size,
    )
    if c.vocab_size != size:
        raise UserError(
            f"{args.start or 'the tokenizer'} has {size} tokens and {args.target} {c.vocab_size}: "
            "a draft must share its target's vocabulary"
        )
    if args.length >= c.max_position_embeddings:
        raise UserError(
            f"--length {args.length}: {args.target} was made for at most {c.max_position_embeddings} "
            "tokens; give fewer"
        )
    return target


def distill(args: argparse.Namespace) -> None:
    """Read the texts, load the target, make the student; evaluate, train, evaluate, save."""
    args.device = find_device(args.device)
    out, stories = Path(args.out), read_stories(args.data) if args.data else []
    if not stories and (args.target is None or args.alone or not args.own):
        raise UserError(
            "there is no text to learn from: give some with --data, or let a --target tell texts, "
            "with --own above 0 and without --alone"
        )
    out.mkdir(parents=True, exist_ok=True)
    heard, unheard = hold_out(stories)
    tokenizer, end = student_tokenizer(args, out, heard)
    target, text, told = load_target(args, tokenizer) if args.target else None, None, None
    if stories:
        say(f"encoding {len(stories):,} stories")
        text, held = Corpus.encode(heard, tokenizer, end), Corpus.encode(unheard, tokenizer, end)
        say(f"{len(text.tokens):,} tokens to learn from, {len(held.tokens):,} held out")
    else:
        held = sample_corpus(target, 12, args.length + 1, end, args.seed + 1)
    if target is not None and args.own and not args.alone:
        say(f"the target tells {args.tales} texts")
        told = sample_corpus(target, args.tales, args.length + 1, end, args.seed)
    student = new_student(args, tokenizer, end, held)
    show("before", evaluate(student, held, target))
    recipe = Hyperparameters(
        **{field.name: getattr(args, field.name) for field in fields(Hyperparameters)}
    )
    training = Training(student, text, None if args.alone else target, told, recipe)
    if (checkpoint := out / "training.safetensors").exists():
        training.resume(checkpoint)
        say(f"going on after step {training.steps} ({checkpoint})")
    training.run(checkpoint)
    show("after", evaluate(student, held, target, count=args.windows))
    save_model(student, out)
    say(
        f"{out} holds a model of {sum(p.numel() for p in student.places().values()):,} parameters; "
        f"{checkpoint.name} is no longer needed, except to go on with more --steps"
    )


USUAL = Hyperparameters()
NUMBERS: dict[str, tuple[int | None, str]] = dict(
    vocab=(4096, "tokens of a new vocabulary"),
    layers=(1, ""),
    width=(128, ""),
    heads=(4, ""),
    kv_heads=(None, "half"),
    head_dim=(None, "width / heads"),
    mlp=(None, "2 · width"),
    context=(1024, "longest text"),
    seed=(1, ""),
    steps=(USUAL.steps, ""),
    batch=(USUAL.batch, "crops a step"),
    length=(USUAL.length, "tokens of a crop"),
    warmup=(USUAL.warmup, "steps"),
    tales=(32, "texts that the target tells"),
    windows=(40, "held-out pieces of 512 tokens, measured at the end"),
)
SHARES = dict(
    decay=(USUAL.decay, "share of the steps, at the end, in which the rate falls to 0"),
    own=(USUAL.own, "share of the steps on the target's own texts"),
    overlap=(
        USUAL.overlap,
        "share of the steps, at the end, that raise α itself instead of lowering KL",
    ),
)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    p = Parser(
        "python -m train.distill",
        "Train a small Llama to imitate a larger one, or from text alone.",
    )
    add = p.add_argument
    add(
        "--target",
        help="the model to imitate: an alias, a Hub id or a folder (tiny, unless --from-scratch or --from)",
    )
    add(
        "--from",
        dest="start",
        metavar="NAME",
        help="the student starts as this model (default: random weights)",
    )
    add(
        "--from-scratch",
        action="store_true",
        help="learn from the text alone, with a vocabulary of its own",
    )
    add(
        "--alone",
        action="store_true",
        help="learn from the text alone; α is measured against the target: the control",
    )
    add(
        "--data",
        nargs="+",
        metavar="FILE",
        help=f"stories, each ended by a line {bpe.END}; every tenth is held out",
    )
    add(
        "--out",
        default="draft",
        help="folder of the student, its tokenizer and its checkpoint (draft)",
    )
    add("--tokenizer", metavar="NAME", help="with --from-scratch: the vocabulary of this model")
    add("--device", metavar="NAME", help="default: a GPU if there is one")
    for name, (default, about) in (NUMBERS | SHARES).items():
        add(
            f"--{name.replace('_', '-')}",
            type=float if name in SHARES else int,
            default=default,
            help=f"{about} ({default})" if default is not None else about,
        )
    args = p.parse_args(arguments)
    for name in NUMBERS:
        least, most = (-(2**31), 2**31 - 1) if name == "seed" else (1, 2**20)
        if (value := getattr(args, name)) is not None and not least <= value <= most:
            p.error(f"--{name.replace('_', '-')} is {value}: it must be from {least:,} to {most:,}")
    if not all(0 <= getattr(args, name) <= 1 for name in SHARES):
        p.error(
            f"--decay {args.decay}, --own {args.own} and --overlap {args.overlap} are shares: from 0 to 1"
        )
    if args.from_scratch and (args.target or args.start):
        p.error("--from-scratch takes neither --target nor --from")
    if args.start:
        p.unused(
            args,
            "layers width heads head_dim mlp context",
            "with --from, a model that has its shape",
        )
    if args.target is None and args.start is None and not args.from_scratch:
        args.target = "tiny"
    if args.target:
        p.unused(args, "vocab tokenizer", "with the target's vocabulary")
    else:
        p.unused(args, "alone", "without a --target")
    if args.tokenizer:
        p.unused(args, "vocab", "with the vocabulary of --tokenizer")
    if args.alone or not args.target:
        p.unused(args, "tales own overlap", "where no target is imitated")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    return status(
        lambda: distill(args),
        SafetensorError,
        interrupted=f"stopped; the same command goes on from the last checkpoint in {args.out}",
    )


if __name__ == "__main__":
    sys.exit(main())
