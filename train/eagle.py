"""Train an EAGLE-3 head (eagle.py) for a target, on texts that the target tells.

    python -m train.eagle                                      a head for tiny
    python -m train.eagle --target NAME --data FILE --out …    on its answers to the prompts in FILE

The head learns the target's distribution p from the target's features, step after step as it will
draft: in step s it reads its own z of step s − 1 in the place of features, and the text's next
token (training-time test, section 3.2 of the paper). Row t of step s predicts token t + 2 + s:

    loss = Σ_s 0.8^s · mean over rows of −Σ_x p(x) log q_s(x)        p on the head's vocabulary,
                                                                     normalized there
    in the last steps of training 1 − α in its place,     α_s = Σ_x min(p(x), q_s(x))
                                        (p not normalized: what the head cannot draft is rejected)

Rows of a prompt are read, but only the target's own tokens, and what would follow the last, are
predicted. The head begins with the target's last norm and rows of logits.

In step s a row attends to the rows of step 0 up to its own, and to its own row of each later step:
what the cache will hold when that draft is made.

Texts are kept in OUT/texts.jsonl, so a killed run (run.py) tells none again.
With --autocast the products of training are in bfloat16, Muon's too; weights, losses, the telling
of texts and the evaluation stay as they were.
The folder is in the speculators layout, without the embedding, which is the target's.
Not covered: several GPUs; features that are stored, to be read again.

Li et al. 2025, EAGLE-3 (arXiv:2503.01840).

    B texts of a batch · N tokens of the longest · T = B N · n features · V, Vd vocabularies
"""

from __future__ import annotations

if __name__ == "__main__":  # slow imports follow: a signal ends them in silence
    from app.shell import begin

    begin()

import argparse
import json
import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from app.requests import read_requests
from app.shell import Parser, say, status
from checkpoint.eagle import EagleConfig
from checkpoint.hub import find_model
from checkpoint.load import open_checkpoint
from checkpoint.progress import progress_bar
from checkpoint.save import save_folder
from devices import find_device
from eagle import EagleHead
from errors import UserError
from generate import Engine
from kernels import HeadNorm, Ops, rotated
from kvcache import AttentionMetadata
from loading import Model
from model import Llama, Rope
from request import Request, Settings
from settings import Options
from train.run import Hyperparameters, Run, begin_run, check_out, count, make_optimizers, share
from train.stories import hold_out, read_file

DECAY = 0.8  # of the loss, from one unrolled step to the next

# ---- Texts that the target tells -----------------------------------------------------------------


def requests_for(model: Model, args: argparse.Namespace) -> list[Request]:
    """For the lines of a file; without one, texts that begin as texts do, or after the end of one.

    The temperature is 1, unless a line says otherwise.
    """
    chosen = Settings(temperature=1.0, seed=args.seed, max_tokens=args.length)
    if args.data is None:
        ends = model.eos_token_ids
        start = model.tokenizer.prompt("") or [min(ends)]
        return [Request(start, replace(chosen, seed=i), ends) for i in range(args.texts)]
    requests = []
    options = Options(max_len=args.length)

    def check(request: Request) -> None:
        for name in ("stop", "gamma", "logprobs", "prompt_logprobs"):
            if getattr(request.settings, name) not in ((), None):
                raise UserError(f"{name} is not supported: leave it out")

    lines = read_file(str(args.data)).split("\n")
    for line in read_requests(lines, model, chosen, options, None, None, check):
        if line.error is not None:
            problem = str(line.error).replace("--max-len", "--length")  # its name here
            raise UserError(f"{args.data}, line {line.number}: {problem}")
        requests.append(line.request)
    return requests[: args.texts]


def told_before(file: Path) -> dict[int, list[int]]:
    """The texts in a file of `tell_texts`, by their numbers; none if there is no file."""
    texts = {}
    lines = file.read_text(encoding="utf-8").split("\n") if file.exists() else []
    for line in lines:
        with suppress(ValueError):  # a part of a line, which a killed run has left
            i, tokens = json.loads(line)
            texts[i] = tokens
    return texts


def tell_texts(model: Model, requests: Sequence[Request], file: Path, length: int) -> list[list]:
    """The texts of these requests, from a file as far as it has them; the rest is made, and
    appended to it."""
    texts = told_before(file)
    index = {}
    for i, request in enumerate(requests):
        if texts.get(i, [])[: len(request.tokens)] != request.tokens:
            index[request] = i
    batch = min(64, max(1, len(index)))
    engine = Engine(model, None, Options(max_len=length, max_batch=batch), tokens=batch * length)
    bar = progress_bar(desc="telling", total=len(index), unit="text")
    with file.open("a") as lines, bar:
        for request, _ in engine.batcher.run(list(index)):
            if request.finish_reason:
                texts[index[request]] = request.tokens
                lines.write("\n" + json.dumps([index[request], request.tokens]))
                lines.flush()
                bar.update()
    return [texts[i] for i in range(len(requests))]


class Text(NamedTuple):
    """A text that the target has told."""

    tokens: list[int]
    start: int  # where the target's own tokens begin


class Batch(NamedTuple):
    """Texts of about one length."""

    tokens: Tensor  # int64[B, N], padded with −1
    starts: Tensor  # int64[B]

    def to(self, device: torch.device) -> Batch:
        return Batch(self.tokens.to(device), self.starts.to(device))


def batches(texts: Sequence[Text], size: int) -> list[Batch]:
    """All texts, `size` in a batch; fewer than `size` that are left are left out."""
    by_length = sorted(texts, key=lambda text: len(text.tokens))
    padded = []
    for i in range(0, len(by_length) - size + 1, size):
        some = by_length[i : i + size]
        tokens = [torch.tensor(text.tokens) for text in some]
        starts = torch.tensor([text.start for text in some])
        padded.append(Batch(torch.nn.utils.rnn.pad_sequence(tokens, True, -1), starts))
    return padded


# ---- The loss ------------------------------------------------------------------------------------


class Unrolled(Ops):
    """Attention of the unrolled steps of one batch: a call is a step."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []  # [B, G, N, D] of each step
        self.values: list[Tensor] = []

    def attend(
        self,
        qkv: Tensor,
        G: int,
        rope: Rope | None,
        metadata: AttentionMetadata,
        layer: int,
        norm: HeadNorm | None = None,
    ) -> Tensor:
        B = len(metadata.sequences)
        q, k, v = rotated(qkv, G, rope, norm)
        R = q.shape[1] // G
        q, k, v = (x.unflatten(0, (B, -1)).transpose(1, 2) for x in (q, k, v))
        self.keys.append(k.repeat_interleave(R, 1))
        self.values.append(v.repeat_interleave(R, 1))
        N = q.shape[2]
        q = q / math.sqrt(q.shape[-1])
        hidden = torch.ones(N, N, dtype=torch.bool, device=q.device).triu(1)
        first = q @ self.keys[0].transpose(2, 3)  # [B, H, N, N]
        scores = [first.masked_fill(hidden, -torch.inf)]
        for keys in self.keys[1:]:
            scores.append((q * keys).sum(-1, keepdim=True))
        weights = torch.cat(scores, -1).softmax(-1)  # [B, H, N, N + later steps]
        out = weights[..., :N] @ self.values[0]
        for s, values in enumerate(self.values[1:]):
            out = out + weights[..., N + s, None] * values
        return out.transpose(1, 2).flatten(0, 1)


def shifted(x: Tensor, count: int) -> Tensor:
    """x[:, count:], filled up with −1: [B, N, …]."""
    missing = torch.full_like(x[:, :count], -1)
    return torch.cat((x[:, count:], missing), 1)


def predicting_rows(batch: Batch, ahead: int) -> Tensor:
    """Indices in [B · N] of the rows that predict the token `ahead` after their own: it is the
    target's, or would follow the text's last."""
    tokens, starts = batch
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    is_own = positions + ahead >= starts[:, None]  # [B, N]
    is_told = shifted(tokens, ahead - 1) >= 0  # the token before it
    return (is_own & is_told).flatten().nonzero()[:, 0]


@torch.no_grad()
def teach(head: EagleHead, batch: Batch) -> tuple[Tensor, Tensor]:
    """What the target knows of a batch: features [T, n, C] and log p of the head's tokens [B, N,
    Vd]. −∞ where the next token is not the target's own."""
    target = head.target
    tokens = batch.tokens
    B, N = tokens.shape
    rows = predicting_rows(batch, 1)
    metadata = AttentionMetadata.without_cache(B, N, target.device)
    features = target.empty_features(head.feature_layers, B * N)
    logits = target(tokens.clamp(min=0).flatten(), metadata, rows, features).float()
    log_p = logits.new_full((B * N, len(head.tokens)), -torch.inf)
    log_p[rows] = logits[:, head.tokens] - logits.logsumexp(-1, keepdim=True)
    return features.values, log_p.view(B, N, -1)


def unroll(
    head: EagleHead, batch: Batch, features: Tensor, num_steps: int
) -> list[tuple[Tensor, Tensor]]:
    """Of each step the logits of the rows that predict the target's own tokens: [rows, Vd], and
    these rows' indices in [B · N]."""
    tokens = batch.tokens
    B, N = tokens.shape
    head = copy(head)
    head.ops = Unrolled()
    metadata = AttentionMetadata.without_cache(B, N, head.device)
    z = head.combine(features)
    steps = []
    for s in range(num_steps):
        step = copy(metadata)
        step.positions = metadata.positions + s
        following = shifted(tokens, 1 + s).flatten()  # [T], −1: there is none
        z = head(z, following.clamp(min=0), step)
        rows = predicting_rows(batch, 2 + s)
        steps.append((head.draft_logits(z[rows]), rows))
    return steps


def losses(
    head: EagleHead, batch: Batch, num_steps: int, autocast: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """Cross-entropy and acceptance, a mean for each step. autocast: with products in bfloat16."""
    with torch.autocast(head.device.type, torch.bfloat16, enabled=autocast):
        features, log_p = teach(head, batch)
        steps = unroll(head, batch, features, num_steps)
    entropies = []
    alphas = []
    for s, (logits, rows) in enumerate(steps):
        wanted = shifted(log_p, 1 + s).flatten(0, 1)[rows]  # of the token after the row's
        log_q = logits.float().log_softmax(-1)
        p = wanted.softmax(-1)
        entropy = -(p * log_q).sum(-1)
        num_rows = max(1, len(entropy))  # texts that end early may have none
        entropies.append(entropy.sum() / num_rows)
        overlap = torch.minimum(wanted.exp(), log_q.exp())
        alphas.append(overlap.sum() / num_rows)
    return entropies, alphas


# ---- Training ------------------------------------------------------------------------------------


class HeadTraining(Run):
    """A head as the student, and batches of texts, in any order. num_steps: of the chain."""

    def __init__(
        self,
        head: EagleHead,
        texts: Sequence[Batch],
        recipe: Hyperparameters,
        num_steps: int,
        autocast: bool = False,
    ):
        super().__init__(head, recipe, make_optimizers(head, (0.06, 0.002), decay=0.1))
        self.texts = texts
        self.num_steps = num_steps
        self.autocast = autocast

    def batch(self) -> Batch:
        """Every batch once in each epoch, in another order."""
        epoch, i = divmod(self.steps, len(self.texts))
        generator = torch.Generator().manual_seed(epoch)
        order = torch.randperm(len(self.texts), generator=generator)
        return self.texts[order[i]]

    def loss(self, batch: Batch) -> Tensor:
        """Nats a token of each step of the chain, or 1 − α in the last steps of training."""
        recipe = self.recipe
        terms, alphas = losses(self.student, batch, self.num_steps, self.autocast)
        if self.steps >= (1 - recipe.overlap) * recipe.steps:
            terms = [1 - alpha for alpha in alphas]
        return sum(DECAY**s * term for s, term in enumerate(terms))


@torch.no_grad()
def evaluate_head(head: EagleHead, texts: Sequence[Batch], num_steps: int) -> str:
    """On held-out texts: the acceptance of each draft, if those before it were accepted. It is a
    mean over the rows of all batches."""
    sums = torch.zeros(num_steps)
    num_rows = torch.zeros(num_steps)
    for batch in texts:
        _, alphas = losses(head, batch.to(head.device), num_steps)
        counts = torch.tensor([len(predicting_rows(batch, 2 + s)) for s in range(num_steps)])
        sums += counts * torch.stack(alphas).cpu()
        num_rows += counts
    alphas = sums / num_rows.clamp(min=1)
    tokens_a_round = 1 + alphas.cumprod(0).sum().item()
    by_step = " ".join(f"{alpha:.3f}" for alpha in alphas.tolist())
    return f"acceptance {by_step}; tokens a round of {num_steps} drafts: {tokens_a_round:.2f}"


# ---- The head: made, saved -----------------------------------------------------------------------


def commonest(texts: Sequence[Text], V: int, size: int) -> Tensor:
    """The tokens that occur most often, in the order of their ids: int64[Vd]. Those that do not
    occur come last, by their ids."""
    told = torch.tensor([token for text in texts for token in text.tokens])
    by_count = told.bincount(minlength=V).sort(descending=True, stable=True).indices
    return by_count[:size].sort().values


@torch.no_grad()
def new_head(target: Llama, tokens: Tensor, mlp: int | None, seed: int) -> EagleHead:
    """A head of the target's width. It begins with the target's last norm and rows of logits, and
    with random weights otherwise. tokens: its vocabulary, int64[Vd]."""
    c = target.config
    L = c.num_hidden_layers
    layer = replace(
        c,
        num_hidden_layers=1,
        intermediate_size=mlp or c.intermediate_size,
        tie_word_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
        model_type="llama",
        quantization=None,
    )
    layers = sorted({min(2, L - 1), L // 2, max(0, L - 3)})  # the authors' choice
    config = EagleConfig(layer, len(tokens), c.hidden_size, feature_layers=tuple(layers))
    head = EagleHead(config, target, target.device, seed=seed)
    offsets = tokens - torch.arange(len(tokens))
    head.offsets.copy_(offsets)
    head.norm.copy_(target.norm)
    rows = target.ops.embed(tokens.to(target.device), target.head, target.dtype)
    head.head.weight.copy_(rows)
    return head


def save_head(head: EagleHead, folder: Path, target: str) -> None:
    """Write a head's folder in the speculators layout, in bfloat16."""
    is_drafted = torch.zeros(head.eagle.layer.vocab_size, dtype=torch.bool)
    is_drafted[head.tokens.cpu()] = True
    config = head.eagle.to_dict(target, head.target.config.architecture)
    save_folder(head, folder, config, t2d=is_drafted)


# ---- The command line ----------------------------------------------------------------------------


def train(args: argparse.Namespace) -> None:
    """Let the target tell its texts; make the head, train, evaluate, save."""
    out = Path(args.out)
    check_out(out, args.flags)
    device = find_device(args.device)
    if args.autocast:
        stored, _ = open_checkpoint(find_model(args.target))
        if stored.quantization is not None:
            raise UserError(
                f"{args.target} has quantized weights, and --autocast needs plain ones: "
                "leave it out"
            )
    model = Model.load(args.target, device, torch.float32, args.bits)
    most = model.llama.config.max_position_embeddings
    if not 1 < args.length <= most:
        raise UserError(f"--length is {args.length}: it must be from 2 to {most} positions")
    requests = requests_for(model, args)
    if len(requests) // 10 < args.batch:
        raise UserError(
            f"{len(requests)} texts are too few for a batch of {args.batch}, where every tenth is "
            f"held out: give {10 * args.batch} (--texts, and lines of --data), or a smaller --batch"
        )
    begin_run(out, args.flags)
    told = tell_texts(model, requests, out / "texts.jsonl", args.length)
    texts = [Text(text, request.num_prompt_tokens) for text, request in zip(told, requests)]
    if not args.data and not model.tokenizer.prompt(""):
        texts = [Text(text[1:], 0) for text in told]  # without the end of the last
    num_tokens = sum(len(text.tokens) for text in texts)
    say(f"{len(texts):,} texts, {num_tokens:,} tokens")
    target = model.llama
    if args.autocast:  # its products are PyTorch's, of plain weights
        del model, target  # before it is loaded again
        target = Llama.load(args.target, device, torch.float32, trainable=True)
    learned, held_out = hold_out(texts)
    vocabulary = commonest(learned, target.config.vocab_size, args.vocab)
    head = new_head(target, vocabulary, args.mlp, args.seed)
    per_epoch = batches(learned, args.batch)
    num_steps = args.epochs * len(per_epoch)
    recipe = Hyperparameters(steps=num_steps, decay=1.0, overlap=args.overlap)
    training = HeadTraining(head, per_epoch, recipe, num_steps=args.unroll, autocast=args.autocast)
    training.run(out)
    say(evaluate_head(head, batches(held_out, args.batch), args.unroll))
    save_head(head, out, args.target)


def parse_command(arguments: Sequence[str] | None) -> argparse.Namespace:
    p = Parser("python -m train.eagle", "Train an EAGLE-3 head for a target.")
    add = p.add_argument
    add("--target", default="tiny", metavar="NAME", help="an alias, a Hub id or a folder (tiny)")
    add(
        "--data",
        type=Path,
        metavar="FILE",
        help="requests that the target answers, as for generate.py --prompts (default: it tells "
        "texts from their beginning)",
    )
    add("--out", default="eagle", metavar="FOLDER", help="of the head and its checkpoint (eagle)")
    add("--bits", type=int, default=16, choices=(16, 8, 4), help="of the target's weights (16)")
    add(
        "--autocast",
        action="store_true",
        help="train with products in bfloat16, for machines with instructions for them (AMX, say); "
        "the target is loaded anew, and --bits is only for its texts",
    )
    add("--device", metavar="NAME", help="default: a GPU if there is one")
    counts = [
        ("--seed", 1, "of the head's first weights, and of each line of --data (1)"),
        ("--texts", 512, "texts that the target tells, at most; every tenth is held out (512)"),
        ("--length", 512, "tokens of a text, at most (512)"),
        ("--batch", 8, "texts of a step (8)"),
        ("--epochs", 1, "times that each text is read (1)"),
        ("--unroll", 3, "steps of the chain in a training step (3)"),
        ("--vocab", 8192, "tokens that the head can draft: the commonest (8192)"),
        ("--mlp", None, "intermediate_size (the target's)"),
    ]
    for flag, default, text in counts:
        add(flag, type=count, default=default, help=text)
    add(
        "--overlap",
        type=share,
        default=0.25,
        help="share of the steps, at the end, that raise α itself (0.25)",
    )
    args = p.parse_args(arguments)
    args.flags = {name: str(value) for name, value in vars(args).items()}
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_command(arguments)
    return status(
        lambda: train(args),
        interrupted=f"stopped; the same command goes on from what {args.out} holds",
    )


if __name__ == "__main__":
    sys.exit(main())
