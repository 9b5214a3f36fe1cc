"""The command line of generate.py: flags, standard streams, files and chat.

Text goes to standard output as it is made, messages to standard error. Mistakes: one line, exit status 2 (shell.py).
"""

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from app.processes import hush, joined, read_once
from app.requests import read_requests
from app.shell import LONGEST, Parser, Terminated, number_or_word, say, status, write
from checkpoint.config import Config
from checkpoint.hub import EMBEDDED, find_folder
from errors import UserError, brief
from generate import Draft, Engine, Model, load_draft
from kernels import find_device
from kvcache import CacheFull
from model import Llama
from parallel import shard_config
from quant import STORED, WIDTHS
from request import MAX_TOKENS, Message, OutputStream, Request, Result, Settings, Show

MOST = 2**16  # texts asked for at a time
COLORS = {"accepted": 32, "corrected": 31, "bonus": 36}


def parser() -> argparse.ArgumentParser:
    p = Parser(
        "generate.py",
        "Continue, answer or chat with a Llama. Settings left out: its generation_config.json's.",
    )
    p.add_argument(
        "prompt", nargs="?", help="text to continue or to answer; '-': standard input; none: chat"
    )
    for name, kind, text in (  # kind: a type, the choices, or None for a switch
        (
            "target",
            str,
            "1B, 3B, 8B, 70B (Llama 3.x Instruct), a Hub id, a folder, or tiny (default)",
        ),
        (
            "draft",
            str,
            "a smaller model, named like --target, or tiny-draft; ngram: looks back; self: INT4 copy",
        ),
        (
            "gamma",
            number_or_word,
            "tokens drafted a round, or auto (default): what pays best by the clock, 0 too",
        ),
        (
            "verify",
            ("exact", "coupled"),
            "exact (default), or coupled: target and seed alone decide the text",
        ),
        ("temperature", float, "0: always the most probable token"),
        ("top-k", int, "keep the k most probable"),
        ("top-p", float, "keep the fewest holding this share"),
        ("min-p", float, "keep this share of the largest"),
        ("seed", int, "the same seed gives the same text; unset: a new one, which is told"),
        ("max-tokens", int, f"make at most so many (default {MAX_TOKENS})"),
        (
            "max-len",
            int,
            "prompt and answer, at most (default: as memory allows, up to the model's limit)",
        ),
        ("system", str, "a system message, for chat templates"),
        ("n", int, "texts, with seeds SEED, SEED+1, …"),
        ("prompts", str, 'JSONL, a text a line: {"prompt": …} and any of the settings by name'),
        ("max-batch", int, "at most so many texts at a time, of --prompts or --n (default 16)"),
        (
            "kv",
            ("paged", "contiguous"),
            "keys and values in blocks, on demand (default), or reserved rows",
        ),
        (
            "kv-bits",
            tuple(WIDTHS),
            "keep keys and values in 8 or 4 bits, or keys in 8 and values in 4",
        ),
        (
            "kv-memory",
            float,
            "for keys and values: bytes, or, up to 1, a share of what is free (default: by need)",
        ),
        (
            "no-prefix-cache",
            None,
            "read every prompt from its beginning, also where another began alike",
        ),
        ("no-cache", None, "recompute everything for each token, to feel the difference"),
        (
            "bits",
            (16, *STORED),
            "round the target's weights as they are loaded (quant.py does it with care)",
        ),
        (
            "dtype",
            ("float64", "float32", "bfloat16", "float16"),
            "what to compute in (default: on a CPU float32)",
        ),
        ("device", str, "cpu, cuda, cuda:1, … (default: a GPU if there is one)"),
        (
            "tensor-parallel",
            int,
            "split the models over so many processes (as torchrun does without this flag)",
        ),
        (
            "profile",
            str,
            "a file for a trace (ui.perfetto.dev); tells where the time went, loading aside",
        ),
        (
            "color",
            None,
            "show the origin of each token: accepted, corrected, or the bonus after a full round",
        ),
        ("json", None, "print each result as one JSON object, with the tokens and the times"),
    ):
        choice = str if isinstance(kind, tuple) and isinstance(kind[0], str) else number_or_word
        how = dict(choices=kind, type=choice) if isinstance(kind, tuple) else dict(type=kind)
        p.add_argument(f"--{name}", help=text, **(how if kind else dict(action="store_true")))
    p.add_argument(
        "--stop", action="append", default=[], help="end before this text; may be repeated"
    )
    either = p.add_mutually_exclusive_group()
    either.add_argument(
        "--chat", action="store_true", default=None, help="use the chat template, as is usual"
    )
    either.add_argument(
        "--raw",
        dest="chat",
        action="store_false",
        default=None,
        help="continue the prompt as it is",
    )
    p.set_defaults(
        target="tiny",
        max_tokens=MAX_TOKENS,
        n=1,
        max_batch=16,
        kv="paged",
        kv_bits="16",
        bits=16,
        profiled=None,
    )
    return p


def check_flags(args: argparse.Namespace) -> None:
    """ValueError for flags that exclude each other. A seed with --gamma auto turns coupled mode on."""
    paged = args.kv_memory is not None or args.no_prefix_cache
    kept = args.draft or args.prompts or paged or args.kv != "paged" or args.kv_bits != "16"
    drafts = next(
        (name for name in ("gamma", "verify", "color") if getattr(args, name) not in (None, False)),
        "",
    )
    for wrong, rule in (
        (not 1 <= args.n <= MOST, f"--n is {args.n}: it must be from 1 to {MOST:,}"),
        (
            not 1 <= args.max_batch <= MOST,
            f"--max-batch is {args.max_batch}: it must be from 1 to {MOST:,}",
        ),
        (
            args.draft is None and drafts,
            f"--{drafts} is about drafted tokens: name a --draft (tiny-draft, …)",
        ),
        (
            args.no_cache and kept,
            "--no-cache keeps nothing: leave it out, or --draft, --prompts and all --kv…",
        ),
        (
            paged and args.kv != "paged",
            "--kv-memory, --no-prefix-cache are about the paged cache: use --kv paged",
        ),
        (
            args.prompts and (args.prompt is not None or args.n > 1 or args.color),
            "--prompts FILE has the prompts, "
            "a text for each, as JSON: leave out the prompt, --n and --color",
        ),
        (
            args.profile is not None and args.profiled is None,
            "--profile needs the folder measure/: fetch it again",
        ),
        (args.color and args.json, "--color is for text: leave it out, or --json"),
    ):
        if wrong:
            raise UserError(rule)
    if (
        args.draft
        and args.seed is not None
        and args.gamma in (None, "auto")
        and args.verify != "coupled"
    ):
        say(
            "note: --gamma auto goes by the clock: this seed need not give the same text again (--gamma N does)"
            if args.verify
            else "note: a seed with --gamma auto: verifying in coupled mode, so that the seed decides"
        )
        args.verify = args.verify or "coupled"


def load(args: argparse.Namespace) -> tuple[Model, Draft]:
    dtype = getattr(torch, args.dtype) if args.dtype else None
    model = Model.load(args.target, find_device(args.device), dtype, args.bits)
    return model, load_draft(args.draft, model, dtype)


def start(
    args: argparse.Namespace,
    model: Model,
    draft: Draft,
    tokens: int,
    max_len: int,
    max_batch: int = 1,
    first: Request | None = None,
) -> Engine:
    """The engine, profiled if asked for. ValueError if it could never serve `first`; notes ignored settings."""
    if args.profile is not None:
        llamas = [
            part for part in (model.llama, getattr(draft, "llama", None)) if isinstance(part, Llama)
        ]
        args.profiling.enter_context(args.profiled(args.profile, llamas))
    engine = Engine(
        model,
        draft,
        tokens,
        max_len,
        max_batch,
        args.verify == "coupled",
        not args.no_cache,
        args.kv,
        args.kv_memory,
        not args.no_prefix_cache,
        args.kv_bits,
    )
    if first is not None:
        engine.batcher.check(first)
    for setting in model.recommended.unsupported():
        say(f"note: this model's generation_config.json asks for {setting}, which is not done here")
    if args.chat is None and model.tokenizer.chat_template is None and args.target not in EMBEDDED:
        say("note: this model has no chat template: it continues your text")
    return engine


def shower(args: argparse.Namespace) -> Show:
    """A function that writes each piece of text: in colours with --color, not at all with --json."""
    paint = lambda piece, origin: (
        f"\x1b[{COLORS[origin]}m{piece}\x1b[0m" if origin in COLORS else piece
    )
    if args.color:
        say(f"colours: {', '.join(paint(name, name) for name in COLORS)}, plain: without drafts")
    return lambda piece, origin: (
        None if args.json else write(paint(piece, origin) if args.color else piece)
    )


def summary(result: Result) -> str:
    rate, drafts = (
        f", then {result.tokens_per_second:.1f} tokens/s" if result.tokens_per_second else "",
        "",
    )
    if result.speculation:
        alpha, per_round, gain, predicted = result.speculation
        faster = f": {gain:.2f} times as fast as plain decoding" if gain else ""
        faster += f"; by the formula {predicted:.2f}" if predicted else ""
        accepted = "no drafts" if alpha is None else f"{alpha:.0%} of the drafts accepted"
        drafts = f"\n{accepted}, {per_round:.2f} tokens a round{faster}"
    return (
        f"{len(result.tokens)} tokens ({result.finish_reason}): the first after {1e3 * result.seconds_to_first_token:.0f} ms{rate}; "
        f"seed {result.seed}{drafts}"
    )


def print_json(result: Result, **more: Any) -> None:
    """Print a result as one line of JSON, in ASCII if standard output cannot encode it (half a surrogate pair, say)."""
    encoding, text = (
        sys.stdout.encoding or "utf-8",
        json.dumps(data := result.to_dict() | more, ensure_ascii=False),
    )
    write(
        (text if text.encode(encoding, "replace").decode(encoding) == text else json.dumps(data))
        + "\n"
    )


def each(results: Generator[Result, None, None], told: Callable[[Result], None]) -> None:
    """Call `told` with each result. A Ctrl-C in `told` goes to the engine, which ends all other texts as they are."""
    try:
        for result in results:
            told(result)
    except KeyboardInterrupt as stop:
        told(results.throw(stop))  # raised again here, if the engine raised it
        for result in results:
            told(result)


def one_prompt(args: argparse.Namespace, settings: Settings) -> int:
    """Answer args.prompt --n times: one after the other, or with --json in a batch. The prompt's cache is shared."""
    prompt = read_once(lambda: sys.stdin.read()) if args.prompt == "-" else args.prompt
    model, draft = load(args)
    first = model.request(prompt, settings, args.system, args.chat, args.max_len, args.kv_bits)
    length, seed = first.num_prompt_tokens + first.num_remaining, first.settings.seed
    together = min(args.n, args.max_batch) if args.json and not args.no_cache else 1
    engine, show = (
        start(args, model, draft, together * length, length, together, first),
        shower(args),
    )
    seeds = [replace(first.settings, seed=seed + i) for i in range(1, args.n)]
    requests = [
        first,
        *(Request(first.tokens, chosen, model.eos_token_ids, sibling=first) for chosen in seeds),
    ]
    writers = [
        OutputStream(model.tokenizer, request, prompt, show, i)
        for i, request in enumerate(requests)
    ]

    def told(result: Result) -> None:
        print_json(result) if args.json else write("\n")
        say(summary(result))

    for group in [writers] if together > 1 else [[writer] for writer in writers]:
        each(engine.serve(group), told)
    return 0


def many_prompts(args: argparse.Namespace, settings: Settings) -> int:
    """The requests of a file, as many at a time as --max-batch and memory allow -> 1 if a line was bad, else 0."""
    read = lambda: (
        sys.stdin.read() if args.prompts == "-" else Path(args.prompts).read_text(encoding="utf-8")
    )
    try:
        lines = (
            read_once(read).removeprefix("\ufeff").split("\n")
        )  # a text may hold other line ends
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--prompts {args.prompts} cannot be read: {error}") from None
    model, draft = load(args)
    limit = model.max_total_tokens(args.max_len, args.kv_bits)
    engine = start(args, model, draft, args.max_batch * limit, limit, args.max_batch)
    say(engine.describe())
    begun, ids, made, bad = (
        time.perf_counter(),
        dict[int, dict[str, Any]](),
        list[int](),
        list[int](),
    )

    def writers() -> Iterator[OutputStream]:
        longest, clock = (
            min(limit, engine.runner.cache.max_len),
            args.draft and args.verify != "coupled",
        )
        requests = read_requests(lines, model, settings, longest, args.system, args.chat)
        for index, (number, asked, request) in enumerate(requests):
            ids[index] = {"id": asked["id"]} if "id" in asked else {}
            try:
                if isinstance(request, ValueError):
                    raise request
                if args.draft is None and asked.get("gamma") is not None:
                    raise UserError(
                        "gamma is about drafted tokens: name a --draft, or leave it out"
                    )
                engine.batcher.check(request)
                if (
                    clock
                    and request.settings.gamma is None
                    and asked.get("seed", args.seed) is not None
                ):
                    clock = False
                    say(
                        f"note: line {number} has a seed, but its γ goes by the clock: --verify coupled repeats texts"
                    )
                yield OutputStream(model.tokenizer, request, asked["prompt"], index=index)
            except ValueError as error:
                bad.append(number)
                say(f"line {number} is left out: {brief(error, LONGEST)}")
                refused = Result(asked.get("prompt", ""), [], 0, index, finish_reason="error")
                print_json(refused, error=brief(error, LONGEST), **ids[index])

    def told(result: Result) -> None:
        print_json(result, **ids[result.index])
        made.append(len(result.tokens))
        say(f"{len(made)} of {len(ids) - len(bad)}: {summary(result)}")

    each(engine.serve(writers()), told)
    took = time.perf_counter() - begun
    say(
        f"{len(made)} texts, {sum(made)} tokens in {took:.1f} s: {sum(made) / took:.1f} tokens/s; {len(bad)} bad lines"
    )
    return 1 if bad else 0


def chat(args: argparse.Namespace, settings: Settings) -> int:
    """Chat at a terminal. The paged cache holds earlier turns, so they are not read again."""
    model, draft = load(args)
    first = Request(model.encode("?", args.system, args.chat), replace(settings, max_tokens=1))
    limit = model.max_total_tokens(args.max_len, args.kv_bits)
    engine, show = start(args, model, draft, limit, limit, first=first), shower(args)
    talk, messages = (
        model.tokenizer.chat_template is not None and args.chat is not False,
        list[Message](),
    )
    say("Type a message; Ctrl-D ends." if talk else "Type the beginning of a text; Ctrl-D ends.")
    args.profiling.callback(say, "")  # ends the line of the last prompt
    while True:
        try:
            if not (typed := read_once(lambda: input("> "))):
                continue
            messages = messages + [{"role": "user", "content": typed}] if talk else []
            longest = min(limit, engine.runner.cache.max_len)
            request = model.request(messages or typed, settings, args.system, args.chat, longest)
        except EOFError:
            return 0
        except ValueError as error:
            messages = messages if (again := isinstance(error, UnicodeError)) else []
            say(
                f"{brief(error, LONGEST)}: {'type it again' if again else 'a new conversation begins'}"
            )
            continue
        try:
            for result in engine.serve([OutputStream(model.tokenizer, request, typed, show)]):
                messages.append({"role": "assistant", "content": result.text})
                write("\n")
                say(summary(result))
        except KeyboardInterrupt as stop:  # enough of this answer
            if isinstance(stop, Terminated):
                raise


def run(args: argparse.Namespace) -> int:
    check_flags(args)
    settings = Settings(**{name: getattr(args, name) for name in Settings.__dataclass_fields__})
    device = find_device(args.device)
    if (args.tensor_parallel or 0) > 1:  # refused before other processes start
        shard_config(Config.load(find_folder(args.target)), args.tensor_parallel)
    with (
        joined(args.tensor_parallel, args.command, device) as args.device,
        ExitStack() as args.profiling,
    ):
        if args.prompts is not None:
            return many_prompts(args, settings)
        if args.prompt is not None:
            return one_prompt(args, settings)
        if not read_once(lambda: sys.stdin.isatty()) or args.json or args.n > 1:
            raise UserError(
                "there is no prompt: give one in quotes, or '-' (chat needs a terminal, no --json or --n)"
            )
        return chat(args, settings)


def main(arguments: Sequence[str] | None = None, profiled: Callable[..., Any] | None = None) -> int:
    """profiled: the context manager behind --profile (measure/profiler.py)."""
    hush()
    args = parser().parse_args(given := sys.argv[1:] if arguments is None else arguments)
    here = Path(__file__).parent.parent / "generate.py"
    args.profiled, args.command = profiled, [sys.executable, str(here), *given]
    warnings.showwarning = lambda message, *rest: say(f"note: {message}")
    return status(lambda: run(args), CacheFull)
