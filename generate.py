"""Text from a prompt: the command line, and `generate(...)` for Python.

    python generate.py "Once upon a time"                        continue a text with the model in this repository
    python generate.py --draft tiny-draft "Once upon a time"     the same, with a smaller model guessing ahead
    python generate.py --target 8B --draft 1B "Why is the sky blue?"
    python generate.py --target 1B                               chat

Everything here is composition. The loop is: plan what to do next for the text, do it, show what it has grown by. There is one kind
of work (speculative.py): what of the text is not in the cache yet is read, in chunks; then tokens are drafted and verified, or
simply drawn. A prompt, the next token, and the next turn of a chat, whose beginning is in the cache already, are the same thing.

What a run promises: the same model, prompt, settings and seed give the same text, with and without a cache, in one dtype on one
machine, and with `--verify coupled` also with and without a draft. (bfloat16 rounds coarsely enough for another chunk size, or
another γ, to change a near-tie; float32 all but never.) Without it a draft changes the text, but not its law.

The text goes to standard output as it is made, everything else to standard error. A wrong flag, file or value ends in one line
that names it and the way out, with exit status 2.
"""
import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from drafters import Drafter, ModelDrafter, NgramDrafter
from kvcache import CacheFull
from model import NoCache
from pretrained import Model
from request import MAX_TOKENS, Message, Request, Result, Settings, StopStrings
from speculative import Decoder
from weights import EMBEDDED

CHUNK = 512                                             # tokens of a prompt read in one step
Draft = str | Path | Model | None                       # a model, by name or loaded, or "ngram"
COLORS = {"accepted": 32, "corrected": 31, "bonus": 36}


def load_draft(draft: Draft, model: Model, dtype: torch.dtype | None = None) -> Draft:
    """The draft's model, if it is one, on the target's device. ValueError if its vocabulary is not the target's."""
    if draft is None or draft == "ngram":
        return draft
    loaded = draft if isinstance(draft, Model) else Model.load(draft, model.llama.device, dtype)
    if difference := model.tokenizer.difference(loaded.tokenizer):
        raise ValueError(f"the draft's vocabulary is not the target's: {difference}; a draft must be of the target's family, or ngram")
    return loaded


def decoder(model: Model, length: int, draft: Draft = None, coupled: bool = False, use_cache: bool = True, sequences: int = 1) -> Decoder:
    """All that makes texts of up to `length` tokens: the target, the (loaded) draft, and their caches."""
    if not use_cache:
        if draft is not None:
            raise ValueError("a draft needs the cache: leave out --draft or --no-cache")
        return Decoder(model.llama, NoCache(model.llama.device), model.tokenizer.vocab_size, budget=length)
    drafter: Drafter | None = None
    if isinstance(draft, Model):
        drafter = ModelDrafter(draft.llama, draft.llama.cache(min(length, draft.llama.config.max_position_embeddings), sequences))
    elif draft == "ngram":
        drafter = NgramDrafter()
    return Decoder(model.llama, model.llama.cache(length, sequences), model.tokenizer.vocab_size, drafter, coupled, budget=CHUNK)


def run(model: Model, maker: Decoder, request: Request, prompt: str | list[Message], show: Callable[[str, str], None]) -> Result:
    """Make one text; `show` gets it in whole characters as it grows, and whose they are. Ctrl-C ends it with what there is."""
    result, start = Result(prompt, list(request.tokens), request.settings.seed), time.perf_counter()
    stream, stops, pieces = model.tokenizer.stream(), StopStrings(request.settings.stop), []

    def emit(piece: str, whose: str = "plain") -> None:
        if piece:
            pieces.append(piece)
            show(piece, whose)

    try:
        while not (request.finish_reason or stops.found):
            new = maker.step([maker.plan(request)]).get(request, [])
            result.total = time.perf_counter() - start
            for token, whose in zip(new, request.whose[len(request.whose) - len(new):]):
                result.tokens.append(token)
                result.first = result.first or result.total
                if token not in request.ends:
                    emit(stops.feed(stream.feed(token)), whose)
                if stops.found:
                    break
        result.finish_reason = request.finish_reason
    except KeyboardInterrupt:
        result.finish_reason = "interrupted"
    emit(stops.feed(stream.finish()))
    if stops.found:
        result.finish_reason = "stop"
    emit(stops.finish())
    result.text, result.speculation = "".join(pieces), maker.report(request)
    return result


def generate(prompt: str | list[Message], target: str | Path | Model = "tiny", *, temperature: float | None = None,
             top_k: int | None = None, top_p: float | None = None, min_p: float | None = None, seed: int | None = None,
             max_tokens: int = MAX_TOKENS, stop: Sequence[str] = (), system: str | None = None, chat: bool | None = None,
             max_len: int | None = None, use_cache: bool = True, draft: Draft = None, gamma: int | None = None, verify: str = "exact",
             device: str | None = None, dtype: torch.dtype | None = None, show: Callable[[str], None] = lambda piece: None) -> dict[str, Any]:
    """Continue or answer `prompt` (a text, or chat messages) and return the result as `--json` prints it.

    target: an alias, a Hub id, a folder, or a loaded `Model`, which saves loading it again; draft: the same, or "ngram". Settings
    left None are the model's own. chat: use the model's template; None: where it has one. gamma: tokens drafted a round; None: chosen
    as it goes, by the clock. verify: "exact", or "coupled": the text then depends on target and seed alone. show: called with the
    text as it grows. Raises ValueError, FileNotFoundError or CacheFull, each naming the value, the rule and the way out.
    """
    if verify not in ("exact", "coupled"):
        raise ValueError(f"verify is {verify!r}: it must be exact or coupled")
    settings = Settings(temperature, top_k, top_p, min_p, seed, max_tokens, tuple([stop] if isinstance(stop, str) else stop), gamma)
    model = target if isinstance(target, Model) else Model.load(target, device, dtype)
    tokens = model.encode(prompt, system, chat)
    length = model.room(len(tokens), max_tokens, max_len)
    request = Request(tokens, replace(model.complete(settings), max_tokens=length - len(tokens)), model.ends)
    maker = decoder(model, length, load_draft(draft, model, dtype), verify == "coupled", use_cache)
    maker.open(request)
    return run(model, maker, request, prompt, lambda piece, whose: show(piece)).to_dict()


# ------------------------------------------------------------------------------------------------------------------------------
# The command line

class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        fail(f"{message} (see --help)")


def fail(message: str) -> NoReturn:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def write(piece: str) -> None:
    print(piece, end="", flush=True)


def gamma(text: str) -> int | str:
    if text != "auto" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"it is {text!r}, and must be auto or a whole number of at least 0")
    return text if text == "auto" else int(text)


def parser() -> argparse.ArgumentParser:
    p = Parser(prog="generate.py", description="Continue a text, answer, or chat, with a Llama.", allow_abbrev=False)
    p.add_argument("prompt", nargs="?", help="text to continue or to answer; '-' reads standard input; nothing, at a terminal: chat")
    p.add_argument("--target", default="tiny", metavar="NAME",
                   help="1B, 3B, 8B, 70B (Llama 3.x Instruct, from the Hub), a Hub id, a folder, or tiny, which is in this repository (default)")
    p.add_argument("--draft", metavar="NAME", help="a smaller model of the same family that guesses ahead, named like --target (tiny-draft is in this "
                   "repository); or ngram: what followed the last few tokens earlier in the text")
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
    p.add_argument("--no-cache", action="store_true", help="recompute everything for each token, to feel the difference")
    p.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:1, … (default: a GPU if there is one)")
    p.add_argument("--dtype", choices=["float64", "float32", "bfloat16", "float16"], help="compute in this type (default: the checkpoint's)")
    p.add_argument("--color", action="store_true", help="show whose each token is: drafted and accepted, corrected, or the bonus after a full round")
    p.add_argument("--json", action="store_true", help="print each result as one JSON object, with the tokens and the times")
    return p


def check_device(name: str | None) -> str | None:
    """The device, if there is such a thing on this machine."""
    if name is None:
        return None
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise ValueError(f"device {name!r} is not on this machine: use cpu" + (" or cuda" if torch.cuda.is_available() else "")) from None
    if torch.device(name).type not in ("cpu", "cuda"):
        raise ValueError(f"device {name!r} is not supported: use cpu or cuda")
    return name


def load(args: argparse.Namespace) -> tuple[Model, Draft]:
    dtype = getattr(torch, args.dtype) if args.dtype else None
    model = Model.load(args.target, check_device(args.device), dtype)
    return model, load_draft(args.draft, model, dtype)


def check_flags(args: argparse.Namespace) -> None:
    """What does not go together, and what a seed implies."""
    if args.n < 1:
        raise ValueError(f"--n is {args.n}: it must be at least 1")
    if args.draft is None:
        for name in ("gamma", "verify", "color"):
            if getattr(args, name) not in (None, False):
                raise ValueError(f"--{name} is about drafted tokens: name a --draft (tiny-draft, 1B, ngram, …)")
    elif args.no_cache:
        raise ValueError("a draft needs the cache: leave out --draft or --no-cache")
    if args.color and args.json:
        raise ValueError("--color is for text: leave it out, or --json")
    if args.draft and args.seed is not None and args.gamma in (None, "auto"):
        if args.verify is None:
            args.verify = "coupled"
            say("note: a seed with --gamma auto: verifying in coupled mode, so that the seed decides the text (--gamma N for rejection sampling)")
        elif args.verify == "exact":
            say("note: --gamma auto goes by the clock, so this seed need not give the same text again: --gamma N or --verify coupled does")


def make(args: argparse.Namespace, model: Model, draft: Draft, length: int) -> Decoder:
    return decoder(model, length, draft, args.verify == "coupled", not args.no_cache)


def shower(args: argparse.Namespace) -> Callable[[str, str], None]:
    """Writes text as it comes: in colours with --color, not at all with --json."""
    if args.color:
        say("colours: " + ", ".join(f"\x1b[{code}m{whose}\x1b[0m" for whose, code in COLORS.items()) + ", plain: without drafts")
    painted = lambda piece, whose: write(f"\x1b[{COLORS[whose]}m{piece}\x1b[0m" if args.color and whose in COLORS else piece)
    return (lambda piece, whose: None) if args.json else painted


def tell(model: Model, args: argparse.Namespace) -> None:
    """A word about what somebody may expect and does not get."""
    for setting in model.unhonoured():
        say(f"note: this model's generation_config.json asks for {setting}, which is not done here")
    if not args.raw and model.tokenizer.chat_template is None and args.target not in EMBEDDED:
        say("note: this model has no chat template: it continues your text")


def one_prompt(args: argparse.Namespace, settings: Settings) -> int:
    """Answer args.prompt --n times, in one place, so that the prompt is read once."""
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    model, draft = load(args)
    tokens = model.encode(prompt, args.system, mode(args))
    length = model.room(len(tokens), settings.max_tokens, args.max_len)
    tell(model, args)
    settings = replace(model.complete(settings), max_tokens=length - len(tokens))
    replace(settings, seed=settings.seed + args.n - 1)                            # refuses now, if the last seed is none
    maker, request, show = make(args, model, draft, length), Request(tokens, settings, model.ends), shower(args)
    maker.open(request)
    for i in range(args.n):
        maker.rewrite(request, tokens, replace(settings, seed=settings.seed + i))
        result = run(model, maker, request, prompt, show)
        result.index = i
        write(json.dumps(result.to_dict(), ensure_ascii=False) + "\n" if args.json else "\n")
        say(result.summary())
        if result.finish_reason == "interrupted":
            return 130
    return 0


def mode(args: argparse.Namespace) -> bool | None:
    return True if args.chat else False if args.raw else None


def chat(args: argparse.Namespace, settings: Settings) -> int:
    """Turns at a terminal. What the last turns said is in the cache and is not read again."""
    model, draft = load(args)
    model.encode("?", args.system, mode(args))                                    # refuses --chat or --system now, if it must
    talk = model.tokenizer.chat_template is not None and not args.raw
    limit = model.room(1, model.llama.config.max_position_embeddings, args.max_len)
    maker, request, show = make(args, model, draft, limit), Request([], model.complete(settings), model.ends), shower(args)
    maker.open(request)
    tell(model, args)
    messages: list[Message] = []
    say("Type a message; Ctrl-D ends." if talk else "Type the beginning of a text; Ctrl-D ends.")
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            say("")
            return 0
        if not line:
            continue
        messages = messages + [{"role": "user", "content": line}] if talk else []
        try:
            tokens = model.encode(messages or line, args.system, mode(args))
            length = model.room(len(tokens), settings.max_tokens, limit)
        except ValueError as error:
            say(f"{error}\nA new conversation begins.")
            messages = []
            continue
        maker.rewrite(request, tokens, replace(model.complete(settings), max_tokens=length - len(tokens)))
        result = run(model, maker, request, line, show)
        messages.append({"role": "assistant", "content": result.text})
        write("\n")
        say(result.summary())


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    warnings.showwarning = lambda message, *rest: say(f"note: {message}")
    sys.stdout.reconfigure(errors="replace")
    try:
        check_flags(args)
        settings = Settings(args.temperature, args.top_k, args.top_p, args.min_p, args.seed, args.max_tokens, tuple(args.stop),
                            None if args.gamma == "auto" else args.gamma)
        if args.prompt is not None:
            return one_prompt(args, settings)
        if not sys.stdin.isatty():
            raise ValueError("there is no prompt: give one in quotes, or '-' to read standard input")
        if args.json or args.n > 1:
            raise ValueError(f"{'--json' if args.json else '--n'} needs a prompt: give one in quotes, or '-' to read standard input")
        return chat(args, settings)
    except torch.OutOfMemoryError:
        fail("the GPU's memory does not hold this: use a smaller model, --dtype bfloat16, a smaller --max-len, or --device cpu")
    except (ValueError, OSError, CacheFull) as error:
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())       # whoever read the text has gone
            return 0
        fail(str(error))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
