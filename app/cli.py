"""The command line of generate.py: standard streams, files and chat. Its flags: flags.py.

Text goes to standard output as it is generated, and messages go to standard error. A user's mistake
gives one line and exit status 2 (shell.py). Ctrl-C ends all requests, and their results so far are
printed. A result that is being printed is always completed. A second Ctrl-C ends the program at
once.
"""

import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from app.chat import Conversation, chat_settings, edit_lines, typed_line
from app.flags import FILES, flagged, generate_flags
from app.launch import (
    follow,
    joined,
    launch,
    rank,
    read_once,
)
from app.requests import Line, read_requests
from app.shell import MAX_MESSAGE, Terminated, is_launched, say, status, waiting_signals, write
from checkpoint.chat import replace_surrogates
from checkpoint.hub import find_model
from checkpoint.load import open_checkpoint
from checkpoint.weights import weight_bytes
from devices import find_device
from errors import UserError, brief
from generate import Engine
from loading import Draft, Model, check_draft, load_draft
from model import Llama
from request import OutputStream, Request, Result, Settings, Speculation
from settings import Options

COLORS = {"accepted": 32, "corrected": 31, "bonus": 36}


# ---- Results -----------------------------------------------------------------------------------


def painted(text: str, code: int | None) -> str:
    """The text in one of the terminal's colours; 2 means dimmed, and None leaves it as it is."""
    return text if code is None else f"\x1b[{code}m{text}\x1b[0m"


def output_stream(
    args: Namespace, model: Model, request: Request, prompt: str, index: int = 0
) -> OutputStream:
    """A stream for a request. It shows the output as it grows, in colours with --color, and not at
    all with --json. At a terminal, a continuation is shown after its prompt, which is dimmed."""
    colors = COLORS if args.color else {}
    is_continuation = not request.is_reply and args.out is None and sys.stdout.isatty()
    before = painted(prompt, 2) if is_continuation else ""

    def show(piece: str, origin: str) -> None:
        nonlocal before
        write(before + painted(piece, colors.get(origin)))
        before = ""

    return OutputStream(
        model.tokenizer, request, prompt, show=None if args.json else show, index=index
    )


def summary(result: Result) -> str:
    """A few lines about a result: its length, its speed, its seed and its drafts."""
    milliseconds = 1e3 * result.seconds_to_first_token
    reason = result.finish_reason
    text = f"{len(result.tokens)} tokens ({reason}): the first after {milliseconds:.0f} ms"
    if result.tokens_per_second:
        text += f", then {result.tokens_per_second:.1f} tokens/s"
    text += f"; seed {result.seed}"
    speculation = result.speculation
    if result.error:
        text += f"\nit ended early: {result.error}"
    if speculation is None:
        return text
    if speculation.acceptance is not None:
        text += f"\n{speculation.acceptance:.0%} of the drafts accepted"
    text += f"\n{speculation.tokens_per_round:.2f} tokens a round"
    if speculation.speed_up:
        text += f": {speculation.speed_up:.2f} times as fast as plain decoding"
    return text


@contextmanager
def results_to(file: str | None) -> Iterator[None]:
    """In this block, the first process writes results to the file; None means standard output."""
    if file is None or rank() > 0:
        yield
        return
    try:
        with open(file, "w", encoding="utf-8") as out, redirect_stdout(out):
            yield
    except OSError as error:  # a full disk; closing the file raises this again, without a name
        if error.errno is None or error.filename not in (None, "standard output"):
            raise  # it concerns another file
        raise OSError(error.errno, error.strerror, file) from None


def result_fields(result: Result) -> dict[str, Any]:
    """The result as `--json` prints it."""
    stats = {
        "prompt_tokens": len(result.prompt_tokens),
        "tokens": len(result.tokens),
        "seconds_to_first_token": result.seconds_to_first_token,
        "tokens_per_second": result.tokens_per_second,
        "seconds_queued": result.seconds_queued,
    }
    stats |= (result.speculation or Speculation())._asdict()
    names = ("index", "prompt", "prompt_tokens", "tokens", "text", "seed", "finish_reason")
    told = {name: getattr(result, name) for name in names}
    for name in ("prompt_logprobs", "logprobs"):
        entries = getattr(result, name)
        if entries is not None:
            told[name] = [entry._asdict() for entry in entries]
    told["stats"] = stats
    return told | {"error": result.error} if result.error else told


def print_json(result: Result, **more: Any) -> None:
    """Print a result as a line of JSON. It is in ASCII, which every terminal can show."""
    write(json.dumps(result_fields(result) | more) + "\n")


def print_results(
    engine: Engine, streams: Sequence[OutputStream], report: Callable[[Result], None]
) -> None:
    """Report each result. If Ctrl-C comes while a result is being printed, it waits for that. Then
    it is passed to the engine, which ends the other requests and raises it again after the last
    result."""
    results = engine.serve(streams)
    result = next(results, None)
    while result is not None:
        try:
            with waiting_signals() if rank() == 0 else nullcontext():  # the others end at once
                report(result)
        except KeyboardInterrupt as stop:
            result = results.throw(stop)
        else:
            result = next(results, None)


# ---- One prompt, many, or a chat ---------------------------------------------------------------


def read_text(name: str) -> str:
    """The text of a file or of standard input, without a byte order mark."""
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
        return text.removeprefix("\ufeff")
    except (OSError, ValueError) as error:  # not UTF-8, or not a valid file name
        raise UserError(f"{name} cannot be read: {error}") from None


def read_grammar(name: str | None) -> str | None:
    """A schema or a grammar: from a file, from standard input, or given directly as a JSON
    object."""
    if name is None or name.lstrip().startswith("{"):
        return name
    return read_once(lambda: read_text(name))


def read_prompt(args: Namespace) -> str | None:
    """The prompt, or the lines of --prompts; None means a chat."""
    file = "-" if args.prompt == "-" else args.prompts
    if file is not None:
        return read_once(lambda: read_text(file))
    if args.prompt is not None:
        return args.prompt
    if args.json or args.out or args.n > 1 or not read_once(sys.stdin.isatty):
        raise UserError(
            "there is no prompt: give one in quotes, or '-' for standard input "
            "(a chat needs a terminal, and no --json, --out or --n)"
        )
    return None


def describe(names: Sequence[str], llamas: Sequence[Llama]) -> str:
    """One line about what runs: the target and the draft, if it has weights; how their weights are
    stored and how much memory they take; the dtype and the device that the target computes in."""
    models = []
    for name, llama in zip(names, llamas):
        layout = llama.config.quantization
        stored = layout.name if layout else llama.weight_dtype
        models.append(f"{name}: {stored} weights, {weight_bytes(llama) / 1e6:,.0f} MB")
    target = llamas[0]
    text = "running " + "; draft ".join(models)
    text += f"; computed in {target.dtype} by {target.ops.language} on {target.device}"
    if target.device.type == "cpu":
        text += f", threads: {torch.get_num_threads()}"
    return text.replace("torch.", "")


def load(args: Namespace, device: torch.device) -> tuple[Model, Draft | None]:
    """The target, and the draft for it."""
    dtype = getattr(torch, args.dtype) if args.dtype else None
    check_draft(args.draft, args.draft_bits)
    model = Model.load(args.target, device, dtype, args.bits, args.plain)
    return model, load_draft(args.draft, model, dtype, args.draft_bits)


def start(args: Namespace, model: Model, draft: Draft | None, **chosen: int) -> Engine:
    """The engine that the flags describe, with the options in `chosen` replaced. Prints what
    runs."""
    engine = Engine(model, draft, replace(flagged(Options, args), **chosen))
    llamas = [model.llama, *(draft.models if draft else ())]
    say(describe((args.target, args.draft), llamas))
    say(engine.describe())
    return engine


def one_prompt(
    args: Namespace, settings: Settings, model: Model, draft: Draft | None, prompt: str
) -> int:
    """Answer a prompt --n times: one after the other or, with --json, in a batch. -> 0"""
    first = model.request(prompt, settings, flagged(Options, args), args.system, args.use_template)
    length = max(2, first.num_prompt_tokens + first.num_remaining)
    max_batch = min(args.n, args.max_batch) if args.json and args.use_cache is not False else 1
    engine = start(args, model, draft, max_len=length, max_batch=max_batch)
    requests = [first, *map(first.sibling_text, range(1, args.n))]
    streams = [output_stream(args, model, each, prompt, i) for i, each in enumerate(requests)]

    def report(result: Result) -> None:
        if args.json:
            print_json(result)
        else:
            write("\n")
        say(summary(result))

    with results_to(args.out):
        print_results(engine, streams, report)
    return 0


def many_prompts(
    args: Namespace, settings: Settings, model: Model, draft: Draft | None, text: str
) -> int:
    """Serve the requests of a file, as many at a time as --max-batch and memory allow.

    -> 1 if a line was bad, else 0
    """
    engine = start(args, model, draft)

    def check(request: Request) -> None:
        if args.draft is None and request.settings.gamma is not None:
            raise UserError("gamma needs drafted tokens: name a --draft, or leave gamma out")
        engine.batcher.check(request)

    lines = list(
        read_requests(
            text.split("\n"),  # a text may contain other line ends
            model,
            settings,
            Options(max_len=engine.max_len),
            args.system,
            args.use_template,
            check,
        )
    )
    streams = []
    begin = time.perf_counter()

    def report(result: Result) -> None:
        line = lines[result.index]
        print_json(result, **line.labels)
        for entries in (result.logprobs, result.prompt_logprobs, line.request.logprobs):
            if entries:  # for a large file, they would take more memory than the model
                entries.clear()
        say(f"line {line.number}: {summary(result)}")

    with results_to(args.out):
        for index, line in enumerate(lines):
            if line.error is not None:
                print_error(line, index)
                continue
            prompt = line.fields["prompt"]
            streams.append(OutputStream(model.tokenizer, line.request, prompt, index=index))
        print_results(engine, streams, report)
    seconds = time.perf_counter() - begin
    num_bad = len(lines) - len(streams)
    num_tokens = sum(len(stream.result.tokens) for stream in streams)
    served = f"{len(streams)} of {len(lines)}"
    if num_bad:
        served += f", {num_bad} left out"
    say(f"{served}: {num_tokens} tokens in {seconds:.1f} s")
    return 1 if num_bad else 0


def print_error(line: Line, index: int) -> None:
    """The result of a bad line."""
    message = brief(line.error, MAX_MESSAGE)
    say(f"line {line.number} is left out: {message}")
    prompt = line.fields.get("prompt", "")
    result = Result(prompt, [], 0, index=index, finish_reason="error", error=message)
    print_json(result, **line.labels)


def chat(args: Namespace, settings: Settings, model: Model, draft: Draft | None) -> int:
    """Chat at a terminal. The paged cache holds earlier turns, so they are not read again."""
    engine = start(args, model, draft, max_batch=1)
    longest = engine.max_len
    talk = Conversation(model.uses_template(args.use_template), args.system)
    settings, temperature = chat_settings(settings, model.recommended)
    edit_lines()

    def report(result: Result) -> None:
        talk.messages.append({"role": "assistant", "content": result.text})
        used = len(result.prompt_tokens) + len(result.tokens)
        write("\n")
        say(summary(result))
        say(f"context: {used:,} of {longest:,} tokens used ({used / longest:.0%})")

    kind = "a message" if talk.uses_template else "the beginning of a text"
    say(f"{temperature}\nType {kind}, or /help; Ctrl-D ends.")
    for typed in iter(lambda: read_once(typed_line), None):
        if typed.startswith("/"):
            try:
                talk.obey(typed)
            except (UserError, OSError) as error:
                say(brief(error, MAX_MESSAGE))
            continue
        talk.messages.append({"role": "user", "content": typed})
        prompt = talk.messages if talk.uses_template else typed
        try:
            options = Options(max_len=longest)
            request = model.request(prompt, settings, options, talk.system, args.use_template)
        except UserError as error:
            say(brief(error, MAX_MESSAGE))
            talk.reset()
            continue
        try:
            print_results(engine, [output_stream(args, model, request, typed)], report)
        except Terminated:
            raise
        except KeyboardInterrupt:  # ends this answer, and the chat continues
            continue
    return 0


# ---- The program -------------------------------------------------------------------------------


def verify_coupled(args: Namespace) -> None:
    """A seed and --gamma auto imply coupled mode, because γ depends on measured times, so the
    output would otherwise not be reproducible."""
    if args.verify is None and args.draft and args.seed is not None:
        if args.gamma in (None, "auto"):
            args.verify = "coupled"
            say("note: verifying in coupled mode, so that the seed decides the output")


def run_command(arguments: Sequence[str]) -> int:
    """Do what the flags ask for -> the exit status. All processes run this."""
    args = generate_flags(arguments)
    verify_coupled(args)
    settings = flagged(Settings, args)
    device = find_device(args.device)
    n = args.tensor_parallel
    if n > 1 and not is_launched():
        config, _ = open_checkpoint(find_model(args.target))
        config.shard(n)  # refused before processes start
        return launch(n, device, arguments)
    with joined(n, device) as device:
        read = {name: read_grammar(getattr(args, name)) for name in FILES}
        settings = replace(settings, **read)
        prompt = read_prompt(args)
        for text in (prompt or "", args.system or "", *settings.stop):
            if replace_surrogates(text) != text:
                raise UserError(
                    f"{brief(text, 100)} has bytes that are not valid text: write it in UTF-8, and "
                    "unset PYTHONUTF8"
                )
        if args.color:
            say("colours: accepted drafts green, corrected red, bonus cyan, others uncoloured")
        model, draft = load(args, device)
        profiling = nullcontext()
        if args.profile is not None:  # only this flag loads measure/
            models = draft.models if draft else ()
            trace_phases = import_module("measure.profiler").trace_phases
            profiling = trace_phases(args.profile, model.llama, models)
        with profiling:
            if args.prompts is not None:
                return many_prompts(args, settings, model, draft, prompt)
            if prompt is not None:
                return one_prompt(args, settings, model, draft, prompt)
            return chat(args, settings, model, draft)


def main(arguments: Sequence[str] | None = None) -> int:
    """arguments: of the command line; None means this program's."""
    given = sys.argv[1:] if arguments is None else arguments
    if rank() > 0:
        return follow(lambda: run_command(given))
    return status(lambda: run_command(given))
