"""Text from a prompt: the command line, and `generate(...)` for Python.

    python generate.py "Once upon a time"                  continue a text with the model in this repository
    python generate.py --target 1B "Why is the sky blue?"  answer with Llama 3.2 1B
    python generate.py --target 1B                         chat

Everything here is composition. The loop is: what of the text is not in the cache yet is read, in chunks; the last row of
logits becomes probabilities; the coin picks a token; the token joins the text. There is one kind of work, `text[cached:]`:
a prompt, the next token, and the next turn of a chat, whose beginning is in the cache already, are the same thing.

What a run promises: the same model, prompt, settings and seed give the same text, with and without a cache, in one dtype on one
machine. (bfloat16 rounds coarsely enough for another chunk size to change a near-tie; float32 all but never.)

The text goes to standard output as it is made, everything else to standard error. A wrong flag, file or value ends in one line
that names it and the way out, with exit status 2.
"""
import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from config import end_tokens
from kvcache import CacheFull, KVCache
from model import Llama
from request import MAX_TOKENS, Message, Result, Settings, StopStrings
from sampling import Keyed, probabilities
from tokenizer import Tokenizer
from vocabulary import read_json
from weights import EMBEDDED, find

CHUNK = 512                                             # tokens of a prompt read in one step


class Model:
    """What a folder holds: weights, tokenizer, and the settings its makers recommend."""

    def __init__(self, llama: Llama, tokenizer: Tokenizer, recommended: dict[str, Any]):
        if tokenizer.vocab_size > llama.config.vocab_size:
            raise ValueError(f"the tokenizer has {tokenizer.vocab_size} tokens and the model only {llama.config.vocab_size}: "
                             "config.json and the tokenizer belong to different models")
        self.llama, self.tokenizer, self.recommended = llama, tokenizer, recommended
        self.ends = {*llama.config.eos_token_ids, *end_tokens(recommended)}

    @classmethod
    def load(cls, name: str | Path, device: str | None = None, dtype: torch.dtype | None = None) -> "Model":
        """An alias, a Hub id or a folder. Raises FileNotFoundError or ValueError, each with the way out."""
        folder = find(name)
        tokenizer = Tokenizer.load(folder)
        file = folder / "generation_config.json"
        return cls(Llama.load(folder, device, dtype), tokenizer, read_json(file) if file.exists() else {})

    def complete(self, settings: Settings) -> Settings:
        """Fill what is None from generation_config.json, as transformers reads it: without do_sample, temperature 0."""
        names = ("temperature", "top_k", "top_p", "min_p")
        asked = {name: getattr(settings, name) for name in names if getattr(settings, name) is not None}
        if self.recommended.get("do_sample"):
            own = {name: self.recommended[name] for name in names if self.recommended.get(name) is not None}
        else:
            own = {} if asked else {"temperature": 0.0}
        seed = int.from_bytes(os.urandom(4), "little") if settings.seed is None else settings.seed
        return replace(settings, seed=seed, **{"temperature": 1.0, **own, **asked})

    def unhonoured(self) -> list[str]:
        """What generation_config.json asks for and this program does not do."""
        neutral = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "num_beams": 1, "typical_p": 1.0, "epsilon_cutoff": 0.0,
                   "eta_cutoff": 0.0, "penalty_alpha": None, "bad_words_ids": None, "sequence_bias": None, "guidance_scale": None,
                   "encoder_no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0, "length_penalty": 1.0, "min_length": 0,
                   "min_new_tokens": None, "suppress_tokens": None, "begin_suppress_tokens": None, "forced_bos_token_id": None,
                   "forced_eos_token_id": None, "diversity_penalty": 0.0, "num_beam_groups": 1, "top_h": None, "stop_strings": None}
        given = self.recommended
        return [f"{name} {given[name]}" for name, value in neutral.items() if given.get(name) is not None and given[name] != value]


class Session:
    """One text and how much of it the model has read. Invariant: the cache holds exactly the tokens `read`.

    With max_len None there is no cache, and every token costs a pass over the whole text.
    """

    def __init__(self, llama: Llama, max_len: int | None):
        self.llama, self.read = llama, list[int]()
        self.cache: KVCache | None = None
        if max_len is not None:
            self.cache = llama.cache(max_len)
            self.seq, _ = self.cache.open(())

    @torch.inference_mode()
    def logits(self, text: Sequence[int]) -> Tensor:
        """Logits [1, V] for what follows `text`. Only what differs from the text of the last call is read."""
        if self.cache is None:
            return self._forward(text, None)
        common = next((i for i, (a, b) in enumerate(zip(self.read, text[:-1])) if a != b), min(len(self.read), len(text) - 1))
        self.cache.truncate(self.seq, common)
        del self.read[common:]
        while True:
            chunk = list(text[len(self.read):len(self.read) + CHUNK])
            out = self._forward(chunk, self.cache.extend([(self.seq, chunk)]))
            self.read += chunk
            if len(self.read) == len(text):
                return out

    def _forward(self, tokens: Sequence[int], step: Any) -> Tensor:
        return self.llama(torch.tensor(tokens, device=self.llama.device), step, rows=slice(-1, None))


def new_tokens(model: Model, session: Session, prompt: Sequence[int], settings: Settings) -> Iterator[int]:
    """The loop: one token after the other, each drawn at its own position of the text."""
    text, seeds = list(prompt), torch.tensor([settings.seed], device=model.llama.device)
    for _ in range(settings.max_tokens):
        logits = session.logits(text)[:, :model.tokenizer.vocab_size]            # beyond it is padding, which stands for no text
        probs = probabilities(logits, settings.temperature, settings.top_k, settings.top_p, settings.min_p)
        coin = Keyed(seeds, torch.tensor([len(text)], device=seeds.device))
        text.append(int(coin.pick(probs)))
        yield text[-1]


def run(model: Model, session: Session, prompt: str | list[Message], tokens: list[int], settings: Settings,
        show: Callable[[str], None]) -> Result:
    """Make one text; `show` gets it in whole characters as it grows. Ctrl-C ends it with what there is."""
    result, start = Result(prompt, tokens, settings.seed), time.perf_counter()
    stream, stops, pieces = model.tokenizer.stream(), StopStrings(settings.stop), []

    def emit(piece: str) -> None:
        if piece:
            pieces.append(piece)
            show(piece)

    result.finish_reason = "length"
    try:
        for token in new_tokens(model, session, tokens, settings):
            result.tokens.append(token)
            result.total = time.perf_counter() - start
            result.first = result.first or result.total
            if token in model.ends:
                result.finish_reason = "stop"
                break
            emit(stops.feed(stream.feed(token)))
            if stops.found:
                break
    except KeyboardInterrupt:
        result.finish_reason = "interrupted"
    emit(stops.feed(stream.finish()))
    if stops.found:
        result.finish_reason = "stop"
    emit(stops.finish())
    result.text = "".join(pieces)
    return result


def room(llama: Llama, prompt: int, max_tokens: int, max_len: int | None) -> int:
    """How many tokens the cache must hold for this text. ValueError if the prompt leaves no room for an answer."""
    limit = llama.max_len() if max_len is None else max_len
    if prompt == 0:
        raise ValueError("the prompt is empty: there is nothing to continue")
    if limit > llama.config.max_position_embeddings:
        raise ValueError(f"max_len is {limit}: this model was made for at most {llama.config.max_position_embeddings} tokens")
    if prompt >= limit:
        raise ValueError(f"the prompt has {prompt} tokens and max_len is {limit}: shorten it, or raise --max-len "
                         f"(the model's limit is {llama.config.max_position_embeddings}, and memory must hold it)")
    return min(limit, prompt + max_tokens)


def encode(model: Model, prompt: str | list[Message], system: str | None = None, chat: bool | None = None) -> list[int]:
    """Tokens of a prompt: through the model's chat template (chat None: where it has one), or as plain text to continue."""
    template = model.tokenizer.chat_template is not None
    if chat and not template:
        raise ValueError("this model has no chat template: use --raw, or an instruction-tuned model")
    chat = template if chat is None else chat
    if system is not None and not chat:
        raise ValueError("a system message needs a chat template: leave --system out, or use an instruction-tuned model without --raw")
    if not chat:
        if not isinstance(prompt, str):
            raise ValueError("a list of messages needs a chat template: give a text, or use an instruction-tuned model")
        return model.tokenizer.prompt(prompt)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return model.tokenizer.chat(([{"role": "system", "content": system}] if system is not None else []) + messages)


def generate(prompt: str | list[Message], target: str | Path | Model = "tiny", *, temperature: float | None = None,
             top_k: int | None = None, top_p: float | None = None, min_p: float | None = None, seed: int | None = None,
             max_tokens: int = MAX_TOKENS, stop: Sequence[str] = (), system: str | None = None, chat: bool | None = None,
             max_len: int | None = None, use_cache: bool = True, device: str | None = None, dtype: torch.dtype | None = None,
             show: Callable[[str], None] = lambda piece: None) -> dict[str, Any]:
    """Continue or answer `prompt` (a text, or chat messages) and return the result as `--json` prints it.

    target: an alias, a Hub id, a folder, or a loaded `Model`, which saves loading it again. Settings left None are the model's own.
    chat: use the model's template; None: where it has one. show: called with the text as it grows. Raises ValueError,
    FileNotFoundError or CacheFull, each naming the value, the rule and the way out.
    """
    settings = Settings(temperature, top_k, top_p, min_p, seed, max_tokens, tuple([stop] if isinstance(stop, str) else stop))
    model = target if isinstance(target, Model) else Model.load(target, device, dtype)
    tokens = encode(model, prompt, system, chat)
    length = room(model.llama, len(tokens), max_tokens, max_len)
    settings = replace(model.complete(settings), max_tokens=length - len(tokens))
    return run(model, Session(model.llama, length if use_cache else None), prompt, tokens, settings, show).to_dict()


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


def parser() -> argparse.ArgumentParser:
    p = Parser(prog="generate.py", description="Continue a text, answer, or chat, with a Llama.", allow_abbrev=False)
    p.add_argument("prompt", nargs="?", help="text to continue or to answer; '-' reads standard input; nothing, at a terminal: chat")
    p.add_argument("--target", default="tiny", metavar="NAME",
                   help="1B, 3B, 8B, 70B (Llama 3.x Instruct, from the Hub), a Hub id, a folder, or tiny, which is in this repository (default)")
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


def load(args: argparse.Namespace) -> Model:
    return Model.load(args.target, check_device(args.device), getattr(torch, args.dtype) if args.dtype else None)


def tell(model: Model, args: argparse.Namespace) -> None:
    """A word about what somebody may expect and does not get."""
    for setting in model.unhonoured():
        say(f"note: this model's generation_config.json asks for {setting}, which is not done here")
    if not args.raw and model.tokenizer.chat_template is None and args.target not in EMBEDDED:
        say("note: this model has no chat template: it continues your text")


def one_prompt(args: argparse.Namespace, settings: Settings) -> int:
    """Answer args.prompt --n times, with one session, so that the prompt is read once."""
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    model = load(args)
    tokens = encode(model, prompt, args.system, mode(args))
    length = room(model.llama, len(tokens), settings.max_tokens, args.max_len)
    tell(model, args)
    settings = replace(model.complete(settings), max_tokens=length - len(tokens))
    replace(settings, seed=settings.seed + args.n - 1)                            # refuses now, if the last seed is none
    session = Session(model.llama, None if args.no_cache else length)
    for i in range(args.n):
        chosen = replace(settings, seed=settings.seed + i)
        result = run(model, session, prompt, tokens, chosen, (lambda piece: None) if args.json else write)
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
    model = load(args)
    encode(model, "?", args.system, mode(args))                                   # refuses --chat or --system now, if it must
    talk = model.tokenizer.chat_template is not None and not args.raw
    limit = room(model.llama, 1, model.llama.config.max_position_embeddings, args.max_len)
    session = Session(model.llama, None if args.no_cache else limit)
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
            tokens = encode(model, messages or line, args.system, mode(args))
            length = room(model.llama, len(tokens), settings.max_tokens, limit)
        except ValueError as error:
            say(f"{error}\nA new conversation begins.")
            messages = []
            continue
        result = run(model, session, line, tokens, replace(model.complete(settings), max_tokens=length - len(tokens)), write)
        messages.append({"role": "assistant", "content": result.text})
        write("\n")
        say(result.summary())


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    warnings.showwarning = lambda message, *rest: say(f"note: {message}")
    sys.stdout.reconfigure(errors="replace")
    try:
        if args.n < 1:
            raise ValueError(f"--n is {args.n}: it must be at least 1")
        settings = Settings(args.temperature, args.top_k, args.top_p, args.min_p, args.seed, args.max_tokens, tuple(args.stop))
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
