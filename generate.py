"""Text from a prompt: the command line, and `generate(...)` for Python.

    python generate.py "Once upon a time"                        continue a text with the model in this repository
    python generate.py --draft tiny-draft "Once upon a time"     the same, with a smaller model guessing ahead
    python generate.py --target 8B --draft 1B "Why is the sky blue?"
    python generate.py --target 1B                               chat
    python generate.py --prompts FILE.jsonl                      a request a line, many at a time

Everything here is composition (engine.py). There is one kind of work (speculative.py): what of a text is not in the cache yet is
read, in chunks; then tokens are drafted and verified, or simply drawn. A prompt, the next token, and the next turn of a chat, whose
beginning is in the cache already, are the same thing; and a single prompt is a batch of one (batcher.py).

What a run promises: the same model, prompt, settings and seed give the same text, with and without a cache, in one dtype on one
machine, and with `--verify coupled` also with and without a draft. (bfloat16 rounds coarsely enough for another chunk size, or
another γ, to change a near-tie; float32 all but never.) Without it a draft changes the text, but not its law.

The text goes to standard output as it is made, everything else to standard error. A wrong flag, file or value ends in one line
that names it and the way out, with exit status 2.
"""
from shell import begin

begin(__name__)                                         # what follows takes its time: a signal ends it in silence

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engine import Draft, Engine, Show, Writer, check_device, load_draft, silent
from kvcache import CacheFull
from kvquant import WIDTHS
from phases import profiled
from pretrained import Model
from prompts import Line, read_requests
from request import MAX_TOKENS, Message, Request, Result, Settings
from shell import Parser, Terminated, line, say, status, write
from weights import EMBEDDED

MOST = 2**16                                            # texts asked for at a time
COLORS = {"accepted": 32, "corrected": 31, "bonus": 36}


def generate(prompt: str | list[Message], target: str | Path | Model = "tiny", *, temperature: float | None = None,
             top_k: int | None = None, top_p: float | None = None, min_p: float | None = None, seed: int | None = None,
             max_tokens: int = MAX_TOKENS, stop: Sequence[str] = (), system: str | None = None, chat: bool | None = None,
             max_len: int | None = None, use_cache: bool = True, kv: str = "paged", kv_memory: float | None = None,
             draft: Draft = None, gamma: int | None = None, verify: str = "exact", bits: int = 16, kv_bits: str | int = 16, device: str | None = None,
             dtype: torch.dtype | None = None, show: Callable[[str], None] = lambda piece: None) -> dict[str, Any]:
    """Continue or answer `prompt` (a text, or chat messages) and return the result as `--json` prints it.

    target: an alias, a Hub id, a folder, or a loaded `Model`, which saves loading it again; draft: the same, "ngram", or "self". Settings
    left None are the model's own. chat: use the model's template; None: where it has one. gamma: tokens drafted a round; None: chosen
    as it goes, by the clock. verify: "exact", or "coupled": the text then depends on target and seed alone. kv: "paged", or "contiguous".
    kv_memory: bytes for keys and values, or, up to 1, a share of what is free. bits: 8 or 4 rounds the target's weights. kv_bits: 8, 4, or
    "8/4" for 8-bit keys and 4-bit values. show: called with the text as it grows. Raises ValueError, FileNotFoundError or CacheFull, each naming the value, the rule and the way out.
    """
    if verify not in ("exact", "coupled"):
        raise ValueError(f"verify is {verify!r}: it must be exact or coupled")
    settings = Settings(temperature, top_k, top_p, min_p, seed, max_tokens, tuple([stop] if isinstance(stop, str) else stop), gamma)
    model = target if isinstance(target, Model) else Model.load(target, device, dtype, bits)
    tokens = model.encode(prompt, system, chat)
    length = model.room(len(tokens), max_tokens, max_len, kv_bits)
    request = Request(tokens, replace(model.complete(settings), max_tokens=length - len(tokens)), model.ends)
    engine = Engine(model, load_draft(draft, model, dtype), length, length, 1, verify == "coupled", use_cache, kv, kv_memory, kv_bits=kv_bits)
    return next(engine.serve([Writer(model, request, prompt, lambda piece, whose: show(piece))])).to_dict()


# ------------------------------------------------------------------------------------------------------------------------------
# The command line

def as_json(result: dict[str, Any]) -> str:
    """In one line that standard output can hold, whatever its encoding: half a surrogate pair, say, spelled out."""
    text = json.dumps(result, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(result)
    return text + "\n"


def gamma(text: str) -> int | str:
    if text != "auto" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"it is {text!r}, and must be auto or a whole number of at least 0")
    return text if text == "auto" else int(text)


def parser() -> argparse.ArgumentParser:
    p = Parser("generate.py", "Continue a text, answer, or chat, with a Llama.")
    p.add_argument("prompt", nargs="?", help="text to continue or to answer; '-' reads standard input; nothing, at a terminal: chat")
    p.add_argument("--target", default="tiny", metavar="NAME",
                   help="1B, 3B, 8B, 70B (Llama 3.x Instruct, from the Hub), a Hub id, a folder, or tiny, which is in this repository (default)")
    p.add_argument("--draft", metavar="NAME", help="a smaller model of the same family that guesses ahead, named like --target (tiny-draft is in this "
                   "repository); or ngram: what followed the last few tokens earlier in the text; or self: the target's own weights in 4 bits")
    p.add_argument("--gamma", type=gamma, metavar="N|auto", help="tokens drafted a round; auto (default): what pays best by the measured cost and "
                   "acceptance, 0 included. auto measures time, so it promises the text's law, not the same text for the same seed")
    p.add_argument("--verify", choices=["exact", "coupled"], help="exact (default): rejection sampling. coupled: draft and target use the same noise, "
                   "and the text depends on the target and the seed alone; fewer drafts are accepted")
    for name, kind, text in [("temperature", float, "0 always takes the most probable token"), ("top-k", int, "keep the k most probable"),
                             ("top-p", float, "keep the fewest that hold this share"), ("min-p", float, "keep those with this share of the largest"),
                             ("seed", int, "the same seed gives the same text")]:
        p.add_argument(f"--{name}", type=kind, metavar=kind.__name__.upper(), help=f"{text}; unset: the model's generation_config.json"
                       if name != "seed" else f"{text}; unset: a new one, which is told")
    p.add_argument("--max-tokens", type=int, default=MAX_TOKENS, metavar="N", help=f"make at most N tokens (default {MAX_TOKENS})")
    p.add_argument("--max-len", type=int, metavar="N", help="prompt and answer together, at most (default: as much as memory allows, up to the model's limit)")
    p.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given several times")
    p.add_argument("--system", metavar="TEXT", help="a system message, for chat templates")
    p.add_argument("--n", type=int, default=1, metavar="N", help="make N texts, with seeds SEED, SEED+1, …")
    how = p.add_mutually_exclusive_group()
    how.add_argument("--raw", action="store_true", help="continue the prompt as it is")
    how.add_argument("--chat", action="store_true", help="use the model's chat template (default where it has one)")
    p.add_argument("--prompts", metavar="FILE", help="make a text for each line of this file: {\"prompt\": …} and any of the settings by name; results as JSONL")
    p.add_argument("--max-batch", type=int, default=16, metavar="N", help="at most N texts at a time, of --prompts or --n (default 16)")
    p.add_argument("--kv", choices=["paged", "contiguous"], default="paged", help="keys and values in blocks, on demand (default), or reserved rows")
    p.add_argument("--kv-bits", choices=list(WIDTHS), default="16", help="store keys and values in 8 or 4 bits, or keys in 8 and values in 4")
    p.add_argument("--kv-memory", type=float, metavar="SIZE", help="memory for keys and values: bytes, or, up to 1, a share of what is free "
                   "(default: what the texts in flight can need, up to 0.8)")
    p.add_argument("--no-prefix-cache", action="store_true", help="read every prompt from its beginning, also where another began alike")
    p.add_argument("--no-cache", action="store_true", help="recompute everything for each token, to feel the difference")
    p.add_argument("--bits", type=int, choices=[16, 8, 4], default=16, help="round the target's weights to 8 or 4 bits as they are loaded (quant.py does it with care)")
    p.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:1, … (default: a GPU if there is one)")
    p.add_argument("--dtype", choices=["float64", "float32", "bfloat16", "float16"], help="compute in this type (default: the checkpoint's)")
    p.add_argument("--color", action="store_true", help="show whose each token is: drafted and accepted, corrected, or the bonus after a full round")
    p.add_argument("--profile", metavar="FILE", help="write a trace for ui.perfetto.dev, its phases named, and tell where the time went (loading is not in it)")
    p.add_argument("--json", action="store_true", help="print each result as one JSON object, with the tokens and the times")
    return p


def load(args: argparse.Namespace) -> tuple[Model, Draft]:
    dtype = getattr(torch, args.dtype) if args.dtype else None
    model = Model.load(args.target, check_device(args.device), dtype, args.bits)
    return model, load_draft(args.draft, model, dtype)


def check_flags(args: argparse.Namespace) -> None:
    """What does not go together, and what a seed implies."""
    for name, value in (("n", args.n), ("max-batch", args.max_batch)):
        if not 1 <= value <= MOST:
            raise ValueError(f"--{name} is {value}: it must be from 1 to {MOST:,}")
    if args.draft is None:
        for name in ("gamma", "verify", "color"):
            if getattr(args, name) not in (None, False):
                raise ValueError(f"--{name} is about drafted tokens: name a --draft (tiny-draft, 1B, ngram, …)")
    if args.no_cache and (args.draft or args.prompts or args.kv_memory is not None or args.kv != "paged" or args.no_prefix_cache or args.kv_bits != "16"):
        raise ValueError("--no-cache keeps nothing: leave it out, or --draft, --prompts, --kv, --kv-bits, --kv-memory and --no-prefix-cache")
    if args.kv == "contiguous" and (args.kv_memory is not None or args.no_prefix_cache):
        raise ValueError("--kv-memory and --no-prefix-cache are about the paged cache: leave them out, or --kv contiguous")
    if args.prompts and (args.prompt is not None or args.n > 1 or args.color):
        raise ValueError("--prompts FILE has the prompts, a text for each, as JSON: leave out the prompt, --n and --color")
    if args.color and args.json:
        raise ValueError("--color is for text: leave it out, or --json")
    if args.draft and args.seed is not None and args.gamma in (None, "auto"):
        if args.verify is None:
            args.verify = "coupled"
            say("note: a seed with --gamma auto: verifying in coupled mode, so that the seed decides the text (--gamma N for rejection sampling)")
        elif args.verify == "exact":
            say("note: --gamma auto goes by the clock, so this seed need not give the same text again: --gamma N or --verify coupled does")


def engine(args: argparse.Namespace, model: Model, draft: Draft, tokens: int, max_len: int, max_batch: int) -> Engine:
    if args.profile is not None:
        args.profiling.enter_context(profiled(args.profile))
    return Engine(model, draft, tokens, max_len, max_batch, args.verify == "coupled", not args.no_cache, args.kv, args.kv_memory, not args.no_prefix_cache, args.kv_bits)


def shower(args: argparse.Namespace) -> Show:
    """Writes text as it comes: in colours with --color, not at all with --json."""
    if args.color:
        say("colours: " + ", ".join(f"\x1b[{code}m{whose}\x1b[0m" for whose, code in COLORS.items()) + ", plain: without drafts")
    painted = lambda piece, whose: write(f"\x1b[{COLORS[whose]}m{piece}\x1b[0m" if args.color and whose in COLORS else piece)
    return silent if args.json else painted


def tell(model: Model, args: argparse.Namespace) -> None:
    """A word about what somebody may expect and does not get."""
    for setting in model.unhonoured():
        say(f"note: this model's generation_config.json asks for {setting}, which is not done here")
    if not args.raw and model.tokenizer.chat_template is None and args.target not in EMBEDDED:
        say("note: this model has no chat template: it continues your text")


def each(results: Generator[Result, None, None], told: Callable[[Result], None]) -> None:
    """Tell of every result. Ctrl-C meanwhile is the engine's: it ends the others with what there is."""
    try:
        for result in results:
            told(result)
    except KeyboardInterrupt as stop:
        told(results.throw(stop))                       # raised at once, if that is where it comes from
        for result in results:
            told(result)


def one_prompt(args: argparse.Namespace, settings: Settings) -> int:
    """Answer args.prompt --n times: one after the other to be read, side by side with --json. The prompt is read once."""
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    model, draft = load(args)
    tokens = model.encode(prompt, args.system, mode(args))
    length = model.room(len(tokens), settings.max_tokens, args.max_len, args.kv_bits)
    settings = replace(model.complete(settings), max_tokens=length - len(tokens))
    replace(settings, seed=settings.seed + args.n - 1)                            # refuses now, if the last seed is none
    together = min(args.n, args.max_batch) if args.json and not args.no_cache else 1
    maker, show = engine(args, model, draft, together * length, length, together), shower(args)
    requests = [Request(tokens, replace(settings, seed=settings.seed + i), model.ends) for i in range(args.n)]
    maker.batch.check(requests[0])
    tell(model, args)
    for request in requests:
        request.twin = requests[0] if request is not requests[0] else None
    writers = [Writer(model, request, prompt, show, i) for i, request in enumerate(requests)]

    def told(result: Result) -> None:
        write(as_json(result.to_dict()) if args.json else "\n")
        say(result.summary())
    for group in [writers] if together > 1 else [[writer] for writer in writers]:
        each(maker.serve(group), told)
    return 0


def many_prompts(args: argparse.Namespace, settings: Settings) -> int:
    """The requests of a file, as many at a time as --max-batch and memory allow; results as they finish. 1 if a line was bad."""
    try:
        with nullcontext(sys.stdin) if args.prompts == "-" else open(args.prompts, encoding="utf-8") as file:
            lines = file.read().removeprefix("\ufeff").split("\n")               # a text may have other ends inside
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompts {args.prompts} cannot be read: {error}") from None
    model, draft = load(args)
    limit = model.room(1, model.llama.config.max_position_embeddings, args.max_len, args.kv_bits)
    maker = engine(args, model, draft, args.max_batch * limit, limit, args.max_batch)
    tell(model, args)
    say(maker.describe())
    start, served, bad, writers = time.perf_counter(), 0, 0, []

    def refuse(asked: Line, why: str) -> None:
        nonlocal bad
        bad += 1
        say(f"line {asked.number} is left out: {line(why)}")
        result = Result(asked.asked.get("prompt", ""), [], 0, asked.index, finish_reason="error")
        given = {"id": asked.asked["id"]} if "id" in asked.asked else {}
        write(as_json(result.to_dict() | {"error": line(why)} | given))

    ids = {}
    for asked in read_requests(lines, model, settings, min(limit, maker.maker.cache.max_len), args.system, mode(args)):
        try:
            if asked.request is None:
                raise ValueError(asked.error)
            maker.batch.check(asked.request)
            writers.append(Writer(model, asked.request, asked.asked["prompt"], index=asked.index))
            ids |= {asked.index: {"id": asked.asked["id"]}} if "id" in asked.asked else {}
        except ValueError as error:
            refuse(asked, str(error))
    made, count, waiting = 0, len(writers), iter(writers)
    del writers                                                                  # who is finished is let go

    def told(result: Result) -> None:
        nonlocal served, made
        write(as_json(result.to_dict() | ids.get(result.index, {})))
        served, made = served + 1, made + len(result.tokens)
        say(f"{served} of {count}: {result.summary()}")
    each(maker.serve(waiting), told)
    seconds = time.perf_counter() - start
    say(f"{served} texts, {made} tokens in {seconds:.1f} s: {made / seconds:.1f} tokens/s" + (f"; {bad} bad lines" if bad else ""))
    return 1 if bad else 0


def mode(args: argparse.Namespace) -> bool | None:
    return True if args.chat else False if args.raw else None


def chat(args: argparse.Namespace, settings: Settings) -> int:
    """Turns at a terminal. What the last turns said is in the paged cache, and is not read again."""
    model, draft = load(args)
    first = Request(model.encode("?", args.system, mode(args)), replace(settings, max_tokens=1))
    talk = model.tokenizer.chat_template is not None and not args.raw
    limit = model.room(1, model.llama.config.max_position_embeddings, args.max_len, args.kv_bits)
    maker, show = engine(args, model, draft, limit, limit, 1), shower(args)
    maker.batch.check(first)                                                      # what could never be served is refused now
    tell(model, args)
    messages: list[Message] = []
    say("Type a message; Ctrl-D ends." if talk else "Type the beginning of a text; Ctrl-D ends.")
    while True:
        try:
            typed = input("> ")
        except EOFError:
            say("")
            return 0
        except KeyboardInterrupt:
            say("")
            raise
        except ValueError as error:
            say(f"this cannot be read as text ({line(str(error))}): type it again")
            continue
        if not typed:
            continue
        messages = messages + [{"role": "user", "content": typed}] if talk else []
        try:
            tokens = model.encode(messages or typed, args.system, mode(args))
            length = model.room(len(tokens), settings.max_tokens, min(limit, maker.maker.cache.max_len))
        except ValueError as error:
            say(f"{line(str(error))}\nA new conversation begins.")
            messages = []
            continue
        request = Request(tokens, replace(model.complete(settings), max_tokens=length - len(tokens)), model.ends)
        try:
            for result in maker.serve([Writer(model, request, typed, show)]):
                messages.append({"role": "assistant", "content": result.text})
                write("\n")
                say(result.summary())
        except Terminated:
            raise
        except KeyboardInterrupt:                                                 # enough of this answer
            continue


def work(args: argparse.Namespace, settings: Settings) -> int:
    if args.prompts is not None:
        return many_prompts(args, settings)
    if args.prompt is not None:
        return one_prompt(args, settings)
    if not sys.stdin.isatty():
        raise ValueError("there is no prompt: give one in quotes, or '-' to read standard input")
    if args.json or args.n > 1:
        raise ValueError(f"{'--json' if args.json else '--n'} needs a prompt: give one in quotes, or '-' to read standard input")
    return chat(args, settings)


def run(args: argparse.Namespace) -> int:
    check_flags(args)
    settings = Settings(args.temperature, args.top_k, args.top_p, args.min_p, args.seed, args.max_tokens, tuple(args.stop),
                        None if args.gamma == "auto" else args.gamma)
    with ExitStack() as args.profiling:
        return work(args, settings)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    warnings.showwarning = lambda message, *rest: say(f"note: {message}")
    return status(lambda: run(args), CacheFull)


if __name__ == "__main__":
    sys.exit(main())
