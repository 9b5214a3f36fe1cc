"""Distillation: train a small Llama to imitate a larger one, so that its drafts are accepted.

Speculative decoding accepts a drafted token with probability α = Σ_x min(p(x), q(x)), p the
target's distribution and q the draft's. So a draft learns all of p, on text and on texts that are
sampled from the target; its last steps minimize 1 − α:

    loss = KL(p ‖ q) = mean over tokens of Σ_x p(x) (log p(x) − log q(x)),    α ≥ 1 − √(KL / 2)

(the bound is Pinsker's). The optimizers are PyTorch's: Muon for the layers' matrices, AdamW for
embeddings, norms and biases. A matrix's gradient is dominated by a few directions; Muon takes the
momentum M = U S Vᵀ and moves the matrix by U Vᵀ, the same distance in every direction: 15 products
for each matrix and step, in bfloat16 on a GPU.

    python -m train.distill                                    a draft for tiny, from its own texts
    python -m train.distill --target NAME --data FILE…         a draft learns from a target
    python -m train.distill --from-scratch --data FILE…        a model and its vocabulary (bpe.py)
    python -m train.distill --from NAME --kv-heads N …         fewer K/V heads (gqa.py)

Train at the length of use: tiny's draft, trained on 256 tokens, had α = 0.68 up to token 256 and
α = 0.35 at token 512. Invariant: step i depends on the training state and i alone (stories.py), so
a killed run resumes exactly from its checkpoint. Its flags are kept, too, and a run that would go
on with others is refused. Not covered: several GPUs, texts that do not fit in memory.

Hinton et al. 2015 (arXiv:1503.02531); Zhou et al. 2023 (2310.08461); Eldan & Li 2023, TinyStories
(2305.07759). Muon: Jordan et al. 2024 (kellerjordan.github.io/posts/muon).

    B texts of a batch · N tokens of a crop · T = B N tokens of a step · V vocabulary
"""

if __name__ == "__main__":  # slow imports follow: a signal ends them in silence
    from app.shell import begin

    begin()

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from app.shell import (
    Parser,
    alone_in,
    check_folder,
    is_out_of_memory,
    say,
    status,
)
from batcher import Batcher
from checkpoint.config import Config
from checkpoint.files import new_file, read_json, write_json
from checkpoint.hub import find_folder, find_model
from checkpoint.save import copy_files, save_model
from errors import UserError
from kernels import find_device
from kvcache import AttentionMetadata, KVCache
from model import Llama
from request import Request, Settings
from runner import ModelRunner
from speculative import Drawing
from tokenizer import Tokenizer
from train import bpe
from train.gqa import merge_heads
from train.stories import Corpus, hold_out, read_stories

RUN = "run.json"
FREE = ("--out", "--device", "--steps", "--epochs")  # a run may go on with others of these

# ---- The loss, and what a draft is worth ---------------------------------------------------------


def divergence(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """The mean of KL(p ‖ q) over rows. p_logits, q_logits: [T, V] -> []."""
    log_p = p_logits.float().log_softmax(-1)
    log_q = q_logits.float().log_softmax(-1)
    return F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")


def acceptance(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """α = Σ min(p, q) of each row: how likely a token drafted from q is accepted. [T, V] -> [T]."""
    p = p_logits.float().softmax(-1)
    q = q_logits.float().softmax(-1)
    return torch.minimum(p, q).sum(-1)


def sample_corpus(
    llama: Llama, count: int, length: int, end: int, seed: int, prefix: Sequence[int] = ()
) -> Corpus:
    """`count` texts of `length` tokens, sampled at temperature 1, all in one batch (batcher.py).
    They follow what begins a prompt, which stays before them, or else an end of text."""
    requests = []
    for i in range(count):
        settings = Settings(temperature=1.0, seed=(seed << 32) + i, max_tokens=length)
        requests.append(Request(prefix or [end], settings))
    cache = KVCache(llama.kv_spec(), length + len(prefix), count)
    runner = ModelRunner(llama, cache, Drawing(llama.config.vocab_size))
    for _ in Batcher(runner, count).run(requests):
        pass
    first = 0 if prefix else 1  # an end of text before it is left out
    texts = [torch.tensor([*request.tokens[first:], end]) for request in requests]
    return Corpus(torch.cat(texts), end)


def longest(student: Llama, target: Llama | None) -> int:
    """The positions that both models have."""
    return min(llama.config.max_position_embeddings for llama in (student, target or student))


@torch.no_grad()
def evaluate(
    student: Llama, text: Corpus, target: Llama | None = None, length: int = 512, count: int = 40
) -> dict[str, float]:
    """On held-out text, in the models' dtype: bits a token, bits a byte, α against the target.
    length: of a window of text, at most; a model may have fewer positions."""
    bits = []
    alphas = []
    length = min(length, longest(student, target))
    for window in text.windows(length, count).to(student.device):  # int64[N + 1]
        q_logits = student(window[:-1])  # [N, V]
        bits.append(F.cross_entropy(q_logits.float(), window[1:]).item() / math.log(2))
        if target is not None:
            alphas.append(acceptance(target(window[:-1]), q_logits).mean().item())
    scores = {"bits/token": mean(bits)}
    if text.bytes:
        scores["bits/byte"] = mean(bits) * len(text.tokens) / text.bytes
    if alphas:
        scores["acceptance"] = mean(alphas)
    return scores


def shown(when: str, scores: dict[str, float]) -> str:
    """The scores in a line."""
    values = [f"{name} {value:.4f}" for name, value in scores.items()]
    return f"{when}: {', '.join(values)}"


# ---- Training ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hyperparameters:
    """What a run can choose."""

    steps: int = 100
    batch: int = 8
    length: int = 512
    warmup: int = 40
    decay: float = 0.5  # share of the steps, at the end, in which the rate falls to 0
    sampled: float = 0.5  # share of the steps on texts that are sampled from the target
    overlap: float = 0.25  # share of the steps, at the end, with the loss 1 − α

    def factor(self, step: int) -> float:
        """The share of the full learning rate at this step: up to 1, constant, then down to 0."""
        rising = (step + 1) / self.warmup
        falling = (self.steps - step) / max(1.0, self.decay * self.steps)
        return min(1.0, rising, falling)


def parameters(model: Llama) -> list[Tensor]:
    """What training changes: all weights of a plain model, each once. (q_proj, k_proj and v_proj
    are views of one.)"""
    tensors = model.named_tensors().values()
    wholes = [part if part._base is None else part._base for part in tensors]
    return list({id(whole): whole for whole in wholes if whole.is_floating_point()}.values())


def make_optimizers(
    student: Llama, rates: tuple[float, float], decay: float
) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, with this weight decay; AdamW for all others. rates: Muon's,
    then AdamW's."""
    matrix_rate, other_rate = rates
    tables = (student.embed.weight, student.head.weight)
    matrices = []
    others = []
    for weight in parameters(student):
        is_table = any(weight is table for table in tables)
        group = matrices if weight.dim() == 2 and not is_table else others
        group.append(weight.requires_grad_())
    return [
        torch.optim.Muon(matrices, lr=matrix_rate, weight_decay=decay),
        torch.optim.AdamW(others, lr=other_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


class InFloat32(TorchFunctionMode):
    """Within, what is rounded to bfloat16 on a CPU is copied as float32. PyTorch's Muon rounds so
    before its products, which are slow on a CPU without instructions for bfloat16."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple = (), named: dict | None = None
    ) -> Any:
        if function is Tensor.bfloat16 and arguments[0].device.type == "cpu":
            return arguments[0].to(torch.float32, copy=True)
        return function(*arguments, **(named or {}))


class Training:
    """A student, its target (None: the text alone), and the texts that it learns from.

    text: stories from files. sampled: texts from the target."""

    autocast = False  # whether products on a CPU are in bfloat16

    def __init__(
        self,
        student: Llama,
        text: Corpus | None,
        target: Llama | None,
        sampled: Corpus | None,
        recipe: Hyperparameters,
    ):
        self.student = student
        self.text = text
        self.target = target
        self.sampled = sampled
        self.recipe = recipe
        self.steps = 0  # done
        self.optimizers = make_optimizers(student, rates=(0.02, 0.004), decay=0.5)

    def corpus(self, step: int) -> Corpus:
        """The texts of this step: of all steps a share `sampled`, evenly, is on the target's."""
        if self.text is None or self.sampled is None:
            return self.text or self.sampled
        share = self.recipe.sampled
        return self.sampled if int((step + 1) * share) > int(step * share) else self.text

    def loss(self, crops: Tensor) -> Tensor:
        """Nats a token, or 1 − α in the last steps. crops: int64[B, N + 1] -> []."""
        recipe = self.recipe
        device = self.student.device
        tokens = crops[:, :-1].flatten()  # [T]
        metadata = AttentionMetadata.without_cache(recipe.batch, recipe.length).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            q_logits = self.student(tokens, metadata)  # [T, V]
            with torch.no_grad():
                p_logits = self.target(tokens, metadata) if self.target else None
        if p_logits is None:
            return F.cross_entropy(q_logits.float(), crops[:, 1:].flatten())
        if self.steps < (1 - recipe.overlap) * recipe.steps:
            return divergence(p_logits, q_logits)
        return 1 - acceptance(p_logits, q_logits).mean()

    def batch(self) -> Tensor:
        """The texts of the next step: int64[B, N + 1]."""
        recipe = self.recipe
        return self.corpus(self.steps).crops(recipe.batch, recipe.length, self.steps)

    def step(self) -> float:
        """One training step -> its loss."""
        recipe = self.recipe
        rounding = nullcontext() if self.autocast else InFloat32()
        loss = self.loss(self.batch().to(self.student.device))
        loss.backward()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = recipe.factor(self.steps) * optimizer.defaults["lr"]
            with rounding:
                optimizer.step()
            optimizer.zero_grad()
        self.steps += 1
        return loss.item()

    def run(self, checkpoint: Path) -> None:
        """Train to the last step, from a checkpoint, if there is one, with one every 20 seconds."""
        if checkpoint.exists():
            self.resume(checkpoint)
            say(f"going on after step {self.steps} ({checkpoint})")
        steps = self.recipe.steps
        saved = time.monotonic()
        losses = []
        while self.steps < steps:
            losses.append(self.step())
            if self.steps == steps or time.monotonic() - saved > 20:
                say(f"step {self.steps:5} of {steps}  loss {mean(losses):.4f}")
                self.save(checkpoint)
                saved = time.monotonic()
                losses = []

    def save(self, file: Path) -> None:
        """Write a checkpoint. If that fails, the old file stays as it was."""
        state = dict(
            steps=self.steps,
            config=self.student.config.to_dict(),
            weights=self.student.named_tensors(),
            optimizers=[optimizer.state_dict() for optimizer in self.optimizers],
        )
        with new_file(file) as new:
            try:
                torch.save(state, new)
            except RuntimeError as error:
                if "unexpected pos" not in str(error):
                    raise
                raise OSError(f"{file} cannot be written: is the disk full?") from None

    @torch.no_grad()
    def resume(self, file: Path) -> None:
        """Resume from a checkpoint. UserError if it is of a model of another shape."""
        state = read_checkpoint(file, self.student.device)
        if state["config"] != self.student.config.to_dict():
            raise UserError(
                f"{file} is the checkpoint of a model of another shape: "
                "delete it, or give the flags it was made with"
            )
        for name, weight in self.student.named_tensors().items():
            weight.copy_(state["weights"][name])
        for optimizer, stored in zip(self.optimizers, state["optimizers"]):
            optimizer.load_state_dict(stored)
        self.steps = state["steps"]


def read_checkpoint(file: Path, device: torch.device) -> dict[str, Any]:
    """What `Training.save` has written. UserError if the file is anything else."""
    try:
        state = torch.load(file, device, weights_only=True)
    except Exception as error:  # of damaged files PyTorch raises whatever it meets
        if is_out_of_memory(error):
            raise
        state = None
    if not isinstance(state, dict) or state.keys() != {"steps", "config", "weights", "optimizers"}:
        raise UserError(
            f"{file} is not a whole checkpoint: delete it to train from the beginning, or name "
            "another --out"
        )
    return state


def has_run(out: Path) -> bool:
    """Whether a folder holds something of a run to go on with."""
    return (out / "training.pt").exists() or (out / "texts.jsonl").exists()  # train/eagle.py's


def check_out(name: str, sources: Sequence[str | None]) -> None:
    """UserError unless a student can be written to the folder --out, and a model that was not
    trained there is not lost. sources: models that are read."""
    out = Path(name)
    if not name:
        raise UserError("--out is empty: name a folder")
    check_folder(out)
    if (out / "config.json").exists() and not has_run(out):
        raise UserError(
            f"--out {out} holds a model, and nothing of a run to go on with (training.pt): name "
            "another folder, or remove the model"
        )
    for source in sources:
        if source and out.exists() and find_model(source).resolve() == out.resolve():
            raise UserError(f"--out {out} holds {source}, which is read: name another folder")


@contextmanager
def begin_run(out: Path, flags: dict[str, str]) -> Iterator[None]:
    """Hold the folder --out, in which RUN keeps the flags of its run. UserError if it holds a run
    that began with others. flags: of `Parser.flags`."""
    out.mkdir(parents=True, exist_ok=True)
    with alone_in(out):
        file = out / RUN
        if not has_run(out):
            write_json(file, flags)
        began = read_json(file) if file.exists() else {}
        for flag, value in flags.items():
            if flag not in FREE and began.get(flag, value) != value:
                raise UserError(
                    f"--out {out} holds a run with another {flag} ({began[flag]}): give the flags "
                    "it began with, or name another folder"
                )
        yield


# ---- Models: made, loaded, saved -----------------------------------------------------------------


@torch.no_grad()
def new_model(config: Config, seed: int, device: torch.device | str = "cpu") -> Llama:
    """A model with random weights. o_proj and down_proj start small."""
    llama = Llama(config, device, seed=seed)
    for layer in llama.layers:
        layer.o.weight.mul_(0.3)
        layer.down.weight.mul_(0.3)
    return llama


def student_tokenizer(
    args: argparse.Namespace, out: Path, stories: Sequence[str]
) -> tuple[Tokenizer, int]:
    """The tokenizer of a model, or that in `out`, learned from stories; its end of text."""
    name = args.tokenizer
    folder = out if name is None else find_folder(name)
    if name is None and (out / "tokenizer.json").exists():
        say(f"{out} has a tokenizer already: --vocab is not looked at")
    elif name is None:
        say(f"learning {args.vocab} tokens from {len(stories):,} stories")
        bpe.save_tokenizer(out, bpe.learn(stories, args.vocab - 1))
    tokenizer = Tokenizer.load(folder)
    if bpe.END in tokenizer.specials:
        return tokenizer, tokenizer.specials[bpe.END]
    ends = () if name is None else Config.load(folder).eos_token_ids
    if not ends:
        raise UserError(
            f"{name or out} names no token that ends a text: its tokenizer needs {bpe.END}, or its "
            "config.json an eos_token_id"
        )
    return tokenizer, ends[0]


def new_student(args: argparse.Namespace, vocab_size: int, end: int) -> Llama:
    """The student before training: random weights, or a model, its K/V heads merged if asked."""
    if args.start is not None:
        student = Llama.load(args.start, args.device, torch.float32, trainable=True)
        return merge_heads(student, args.kv_heads) if args.kv_heads else student
    config = Config(
        vocab_size=vocab_size,
        hidden_size=args.width,
        intermediate_size=args.mlp or 2 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        rms_norm_eps=1e-5,
        eos_token_ids=(end,),
        num_key_value_heads=args.kv_heads or max(1, args.heads // 2),
        tie_word_embeddings=True,
        head_dim=args.width // args.heads,
        max_position_embeddings=1024,
    )
    return new_model(config, args.seed, args.device)


# ---- The command line ----------------------------------------------------------------------------


def distill(args: argparse.Namespace) -> None:
    """Make the tokenizer and the student, read the texts; evaluate, train, evaluate, save. What is
    told is a message, not a result: the folder is written whether or not anybody reads."""
    check_out(args.out, (args.target, args.start))
    stories = read_stories(args.data) if args.data else []
    if not stories and args.target is None:
        raise UserError(
            "there is no text to learn from: give some with --data, or name a --target, which "
            "tells texts"
        )
    args.device = find_device(args.device)
    target = None
    if args.target is not None:
        target = Llama.load(args.target, args.device, torch.float32, trainable=True)
    with begin_run(Path(args.out), args.flags):
        train_student(args, stories, target)


def train_student(args: argparse.Namespace, stories: Sequence[str], target: Llama | None) -> None:
    """Make the student, in a folder that nobody else writes to."""
    out = Path(args.out)
    train_stories, held_out_stories = hold_out(stories)
    tokenizer, end = student_tokenizer(args, out, train_stories)
    vocab_size = target.config.vocab_size if target else tokenizer.vocab_size
    student = new_student(args, vocab_size, end)
    if target is not None and student.config.vocab_size != vocab_size:
        raise UserError(
            f"{args.start} has {student.config.vocab_size} tokens and {args.target} {vocab_size}: "
            "a draft must share its target's vocabulary"
        )
    most = longest(student, target)
    if args.length >= most:
        raise UserError(f"--length is {args.length}: it must be below {most} positions")
    prefix = tokenizer.prompt("")
    text = None
    sampled = None
    if stories:
        text = Corpus.encode(train_stories, tokenizer, end)
        held_out = Corpus.encode(held_out_stories, tokenizer, end)
    else:
        held_out = sample_corpus(target, 12, args.length + 1, end, args.seed + 1, prefix)
    if args.tells:
        sampled = sample_corpus(target, args.tales, args.length + 1, end, args.seed, prefix)
    recipe = Hyperparameters(
        steps=args.steps,
        batch=args.batch,
        length=args.length,
        decay=args.decay,
        sampled=args.own,
        overlap=args.overlap,
    )
    checkpoint = out / "training.pt"
    if not checkpoint.exists():
        say(shown("before", evaluate(student, held_out, target)))
    training = Training(student, text, target, sampled=sampled, recipe=recipe)
    training.run(checkpoint)
    say(shown("after", evaluate(student, held_out, target)))
    if args.tokenizer is not None:
        copy_files(find_folder(args.tokenizer), out)
    save_model(student, out)


def count(text: str) -> int:
    """The type of a flag that counts something, or is a seed."""
    value = int(text)
    if not 1 <= value <= 2**20:
        raise argparse.ArgumentTypeError(f"it is {value}: it must be from 1 to {2**20:,}")
    return value


def share(text: str) -> float:
    """The type of a flag that is a share of something."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"it is {value}: a share is from 0 to 1")
    return value


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    p = Parser(
        "python -m train.distill",
        "Train a small Llama to imitate a larger one, or from text alone.",
    )
    add = p.add_argument
    add(
        "--target",
        metavar="NAME",
        help="the model to imitate: an alias, a Hub id or a folder "
        "(tiny, unless --from-scratch or --from)",
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
    add("--device", metavar="NAME", help="default: a GPU if there is one")
    counts = [
        ("--seed", 1, "of the first weights, and of the texts that the target tells (1)"),
        ("--vocab", 4096, "tokens of a new vocabulary (4096)"),
        ("--layers", 1, "num_hidden_layers (1)"),
        ("--width", 128, "hidden_size (128)"),
        ("--mlp", None, "intermediate_size (2 · width)"),
        ("--heads", 4, "num_attention_heads (4)"),
        ("--kv-heads", None, "num_key_value_heads (half of --heads)"),
        ("--steps", 100, "of all runs together (100)"),
        ("--batch", 8, "crops a step (8)"),
        ("--length", 512, "tokens of a crop (512)"),
        ("--tales", 32, "texts that the target tells (32)"),
    ]
    for flag, default, text in counts:
        add(flag, type=count, default=default, help=text)
    shares = [
        ("--own", 0.5, "on texts that the target tells (0.5)"),
        ("--decay", 0.5, "at the end, in which the rate falls to 0 (0.5)"),
        ("--overlap", 0.25, "at the end, that raise α itself instead of lowering KL (0.25)"),
    ]
    for flag, default, text in shares:
        add(flag, type=share, default=default, help=f"share of the steps {text}")
    args = p.parse_args(arguments)
    if args.from_scratch and (args.target or args.start):
        p.error("--from-scratch takes neither --target nor --from")
    if args.target is None and args.start is None and not args.from_scratch:
        args.target = "tiny"
    args.tokenizer = args.target or args.start  # whose it is; None: a new one
    is_alone = args.target is None
    args.tells = not is_alone and args.own > 0  # whether the target tells texts to learn from
    useless = [  # where, which flags, why
        (args.start, "vocab layers width mlp heads", "with --from, which has them"),
        (not args.from_scratch, "vocab", "but with --from-scratch: a student has its target's"),
        (is_alone, "own tales overlap", "without a --target"),
        (not is_alone and not args.data, "own", "without --data: all texts are the target's"),
        (args.own == 0, "tales", "with --own 0"),
        (args.start and not args.tells, "seed", "with --from, if no --target tells texts"),
    ]
    for is_useless, names, why in useless:
        if is_useless:
            p.unused(args, names, why)
    args.flags = p.flags(args)
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    return status(
        lambda: distill(args),
        interrupted=f"stopped; the same command goes on from what {args.out} holds",
    )


if __name__ == "__main__":
    sys.exit(main())
