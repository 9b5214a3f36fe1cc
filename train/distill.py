"""Distillation: train a small Llama to imitate a larger one, so that its drafts are accepted.

Speculative decoding accepts a drafted token with probability α = Σ_x min(p(x), q(x)), p the
target's distribution and q the draft's. So a draft learns all of p, on text and on texts that are
sampled from the target; its last steps minimize 1 − α:

    loss = KL(p ‖ q) = mean over tokens of Σ_x p(x) (log p(x) − log q(x)),    α ≥ 1 − √(KL / 2)

(the bound is Pinsker's).

    python -m train.distill                                    a draft for tiny, from its own texts
    python -m train.distill --target NAME --data FILE…         a draft learns from a target
    python -m train.distill --from-scratch --data FILE…        a model and its vocabulary (bpe.py)
    python -m train.distill --from NAME --kv-heads N …         fewer K/V heads (gqa.py)

Train at the length of use: tiny's draft, trained on 256 tokens, had α = 0.68 up to token 256 and
α = 0.35 at token 512. A killed run goes on where it was (run.py). Not covered: texts that do not
fit in memory.

Hinton et al. 2015 (arXiv:1503.02531); Zhou et al. 2023 (2310.08461); Eldan & Li 2023, TinyStories
(2305.07759).

    B texts of a batch · N tokens of a crop · T = B N tokens of a step · V vocabulary
"""

if __name__ == "__main__":  # slow imports follow: a signal ends them in silence
    from app.shell import begin

    begin()

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import torch
import torch.nn.functional as F
from torch import Tensor

from app.shell import Parser, say, status
from batcher import Batcher
from checkpoint.config import Config
from checkpoint.hub import find_folder
from checkpoint.save import copy_files, save_model
from devices import find_device
from errors import UserError
from kvcache import AttentionMetadata, KVCache
from model import Llama
from request import Request, Settings
from runner import ModelRunner
from speculative import Drawing
from tokenizer import Tokenizer
from train import bpe
from train.gqa import merge_heads
from train.run import (
    CHECKPOINT,
    Hyperparameters,
    Run,
    begin_run,
    check_out,
    count,
    make_optimizers,
    share,
)
from train.stories import Corpus, hold_out, read_stories

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


class Training(Run):
    """A student, its target (None: the text alone), and the texts that it learns from.

    text: stories from files. sampled: texts from the target."""

    def __init__(
        self,
        student: Llama,
        text: Corpus | None,
        target: Llama | None,
        sampled: Corpus | None,
        recipe: Hyperparameters,
    ):
        super().__init__(student, recipe, make_optimizers(student, (0.02, 0.004), decay=0.5))
        self.text = text
        self.target = target
        self.sampled = sampled

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
        metadata = AttentionMetadata.without_cache(recipe.batch, recipe.length, device)
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
    if name is None and not (out / "tokenizer.json").exists():
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
    out = Path(args.out)
    check_out(out, args.flags)
    stories = read_stories(args.data) if args.data else []
    if not stories and args.target is None:
        raise UserError(
            "there is no text to learn from: give some with --data, or name a --target, which "
            "generates texts"
        )
    args.device = find_device(args.device)
    target = None
    if args.target is not None:
        target = Llama.load(args.target, args.device, torch.float32, trainable=True)
    begin_run(out, args.flags)
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
    if not (out / CHECKPOINT).exists():
        say(shown("before", evaluate(student, held_out, target)))
    training = Training(student, text, target, sampled=sampled, recipe=recipe)
    training.run(out)
    say(shown("after", evaluate(student, held_out, target)))
    if args.tokenizer is not None:
        copy_files(find_folder(args.tokenizer), out)
    save_model(student, out)


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
    args.flags = {name: str(value) for name, value in vars(args).items()}
    args.tokenizer = args.target or args.start  # whose it is; None: a new one
    is_alone = args.target is None
    args.tells = not is_alone and args.own > 0  # whether the target tells texts to learn from
    useless = [  # where, which flags, why
        (args.start, "vocab layers width mlp heads", "with --from, which has them"),
        (not args.from_scratch, "vocab", "except with --from-scratch: a student has its target's"),
        (is_alone, "own tales overlap", "without a --target"),
        (not is_alone and not args.data, "own", "without --data: all texts are the target's"),
        (args.own == 0, "tales", "with --own 0"),
        (args.start and not args.tells, "seed", "with --from, if no --target generates texts"),
    ]
    for is_useless, names, why in useless:
        if is_useless:
            p.unused(args, names, why)
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    return status(
        lambda: distill(args),
        interrupted=f"stopped; the same command goes on from what {args.out} holds",
    )


if __name__ == "__main__":
    sys.exit(main())
