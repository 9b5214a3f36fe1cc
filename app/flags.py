"""The flags of generate.py and serve.py: which flags there are, and which exclude each other.

Nothing slow is imported here, so that --help and a mistake in a flag are shown at once.
"""

import os
import re
import sys
from argparse import ArgumentParser, BooleanOptionalAction, Namespace, _ArgumentGroup
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from app.shell import Parser, flag, is_launched, number_or_word, status
from checkpoint.files import check_file
from errors import UserError
from settings import Options, Settings, within

T = TypeVar("T", Settings, Options)
KEY_VARIABLE = "LLAMA_API_KEY"
FILES = ("schema", "grammar")  # settings that are read from files
MAX_TEXTS = 2**16  # the most outputs at a time
RANGES = {  # for the numbers that are not settings
    "n": (1, MAX_TEXTS),
    "max_batch": (1, MAX_TEXTS),
    "max_queue": (1, MAX_TEXTS),
    "tensor_parallel": (1, MAX_TEXTS),
    "port": (0, 2**16 - 1),
    "grace": (0, 86_400),  # seconds
}
# Browsers send lower-case letters, and leave out a scheme's default port.
ORIGIN = r"\*|null|(?!http:.*:80$|https:.*:443$)[a-z][a-z\d+.-]*://[^/?#@*\sA-Z]*"
EXAMPLES = """\
examples:
  python generate.py --draft tiny-draft "Once upon a time"     the model in this repository
  python generate.py --target 8B --draft 1B                    chat
  python generate.py --target 1B --bits 4 "Why is it dark?"    less memory
  python generate.py --target 1B --schema '{"type": "object"}' "Tom is 5 years old. As JSON:"
  python generate.py --prompts FILE.jsonl --out results.jsonl  many requests in batches
"""
SERVER_EXAMPLES = """\
examples:
  python serve.py                                      the model in this repository, port 8000
  python serve.py --target 8B --draft 1B --port 8080  another port
"""

GROUPS = {  # of flags -> the settings and options in it
    "models and drafts": "gamma verify",
    "generation": "temperature top_k top_p min_p repetition_penalty presence_penalty "
    "frequency_penalty logit_bias min_tokens seed max_tokens stop special thinking use_cache",
    "grammars (at most one)": "schema regex choice grammar",
    "batching, memory and hardware": "max_batch max_len kv kv_bits kv_memory prefix_caching",
    "output": "logprobs prompt_logprobs",
}
DECLARED = Settings.__dataclass_fields__ | Options.__dataclass_fields__
NAMES = {"use_cache": "--cache", "prefix_caching": "--prefix-cache"}  # others: as the setting
TAKEN = {  # the type of a setting -> how argparse takes its flag
    "bool": dict(action=BooleanOptionalAction),
    "float": dict(type=number_or_word),
    "int": dict(type=number_or_word),
    "str": {},
    "dict": {},
    "tuple": dict(action="append"),
}


def parser() -> ArgumentParser:
    p = Parser(
        "generate.py",
        "Continue a text, answer a prompt or chat with a Llama. Settings that are not given are "
        "taken from its generation_config.json.",
        EXAMPLES,
    )
    p.usage = "generate.py [options] [prompt]"
    p.add_argument(
        "prompt",
        nargs="?",
        help="text to continue or answer, in quotes; '-' reads standard input; no prompt: chat",
    )
    add_model_flags(p.add_argument_group("models and drafts"))
    add_text_flags(p.add_argument_group("generation"))
    add_settings(p.add_argument_group("grammars (at most one)"))
    add_machine_flags(p.add_argument_group("batching, memory and hardware"))
    add_output_flags(p.add_argument_group("output"))
    return p


def generate_flags(arguments: Sequence[str]) -> Namespace:
    """The flags of generate.py. SystemExit or UserError for a mistake."""
    args = parser().parse_args(arguments)
    check_flags(args)
    return args


def tell_early(parse: Callable[[Sequence[str]], Any]) -> None:
    """A program calls this before its slow imports, so that --help or a mistake in a flag ends it
    at once."""
    if is_launched():
        return  # with several processes (launch.py), the first one reports it later

    code = status(lambda: parse(sys.argv[1:]) and 0)
    if code:
        sys.exit(code)


def add_settings(group: _ArgumentGroup) -> None:
    """Add flags for a group's settings. A flag that is not given is None, or the default if that is
    a number."""
    for name in GROUPS[group.title].split():
        setting = DECLARED[name]
        group.add_argument(
            NAMES.get(name, flag(name)),
            dest=name,
            default=setting.default if type(setting.default) is int else None,
            help=setting.metadata["help"],
            **TAKEN[re.match(r"\w+", setting.type)[0]],
        )


def flagged(kind: type[T], args: Namespace) -> T:
    """The Settings that flags give, except those read from files; or the Options. UserError for a
    value that breaks its rule."""
    given = {name: getattr(args, name, None) for name in kind.__dataclass_fields__.keys() - FILES}
    return kind(**{name: value for name, value in given.items() if value is not None})


def add_model_flags(p: _ArgumentGroup) -> None:
    p.add_argument(
        "--target",
        default="tiny",
        help="1B, 3B, 8B, 70B (Llama 3.x Instruct), a Hub id, a folder, FILE.gguf, or tiny",
    )
    p.add_argument(
        "--draft",
        help="a smaller model or an EAGLE-3 head, named as for --target, or tiny-draft or "
        "tiny-eagle; ngram looks drafts up in earlier text; self is the target's INT4 copy; "
        "ngram,NAME looks up first",
    )
    add_settings(p)
    p.add_argument(
        "--bits",
        type=number_or_word,
        default=16,
        help="round the target's weights to 8, 4, fp8 or nf4 while they are loaded "
        "(train.quantize can also calibrate them)",
    )
    p.add_argument(
        "--draft-bits",
        type=number_or_word,
        help="the same for the draft's weights: 16, 8, 4, fp8 or nf4 (default: the target's)",
    )
    p.add_argument(
        "--dtype",
        choices=("float64", "float32", "bfloat16", "float16"),
        help="the type of numbers to compute in (default on a CPU: float32)",
    )


def add_text_flags(p: _ArgumentGroup) -> None:
    add_settings(p)
    p.add_argument("--system", help="a system message, for chat templates")
    either = p.add_mutually_exclusive_group()
    either.add_argument(
        "--chat",
        dest="use_template",
        action="store_const",
        const=True,
        help="use the model's chat template (default if it has one)",
    )
    either.add_argument(
        "--raw",
        dest="use_template",
        action="store_const",
        const=False,
        help="continue the prompt as it is, without the model's chat template",
    )
    p.add_argument(
        "--n", type=int, default=1, help="how many outputs; their seeds are SEED, SEED+1, …"
    )
    p.add_argument(
        "--prompts",
        help='a JSONL file with one request per line: {"prompt": …} and any settings by name',
    )


def add_machine_flags(p: _ArgumentGroup) -> None:
    add_settings(p)
    p.add_argument("--device", help="cpu, cuda, cuda:1, … (default: a GPU if there is one)")
    p.add_argument(
        "--plain",
        action="store_true",
        help="run the pages as they are written, without the faster code of cpu/ and gpu/",
    )
    p.add_argument(
        "--tensor-parallel",
        type=int,
        default=1,
        help="split the models over this many processes (not needed under torchrun)",
    )


def add_output_flags(p: _ArgumentGroup) -> None:
    p.add_argument(
        "--json",
        action="store_true",
        help="print each result as one JSON object, including the tokens and the times",
    )
    add_settings(p)
    p.add_argument("--out", metavar="FILE", help="write results to a new file, not standard output")
    p.add_argument(
        "--color",
        action="store_true",
        help="colour each token by its origin: accepted draft, corrected after a rejected draft, "
        "or bonus after a round in which all drafts were accepted",
    )
    p.add_argument(
        "--profile",
        help="write a trace of where the time goes, without loading, to this file (for "
        "ui.perfetto.dev)",
    )


def check_flags(args: Namespace) -> None:
    """UserError for flags that exclude each other, or are out of range."""
    check_values(args)
    if args.prompts and (args.prompt is not None or args.n > 1 or args.color):
        raise UserError(
            "--prompts FILE has the prompts, with one output for each, as JSON: leave out the "
            "prompt, --n and --color"
        )
    if args.out is not None:
        check_file(Path(args.out))
        if os.path.exists(args.out) and os.path.getsize(args.out):
            raise UserError(
                f"--out {args.out} is not empty, and its contents would be lost: name another "
                "file, or move this one"
            )
    for name in ("prompts", "schema", "grammar", "target", "draft", "out"):
        other = getattr(args, name)
        if args.profile and other and os.path.realpath(args.profile) == os.path.realpath(other):
            raise UserError(f"--profile {args.profile} is the file of --{name}: name another file")
    if args.schema == "-" and "-" in (args.prompt, args.prompts):
        raise UserError(
            "standard input cannot be both the schema and the prompt: name a file for one"
        )
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(args, name) is not None and not (args.json or args.prompts):
            raise UserError(f"{flag(name)} is for JSON results: add --json, or use --prompts FILE")
    if args.color and args.json:
        raise UserError("--color is for text, not for JSON: leave out --color or --json")


def check_values(args: Namespace) -> None:
    """UserError for a value that breaks its rule, or for a flag about drafts without a draft."""
    flagged(Settings, args)
    flagged(Options, args)
    for name, (low, high) in RANGES.items():
        within(low, high, f"from {low} to {high:,}")(flag(name), getattr(args, name, low))
    for name in ("gamma", "verify", "draft_bits", "color"):
        if args.draft is None and getattr(args, name, None) not in (None, False):
            raise UserError(f"{flag(name)} needs drafted tokens: name a --draft (tiny-draft, …)")
    looks_up = args.draft is not None and args.draft.split(",")[0] == "ngram"
    if looks_up and args.verify not in (None, "coupled"):
        raise UserError(
            f"--verify is {args.verify}, and with --draft {args.draft} all drafts are verified in "
            "coupled mode (see lookup.py): leave out --verify"
        )


# ---- serve.py ----------------------------------------------------------------------------------


def server_parser() -> Parser:
    p = Parser(
        "serve.py",
        "Serve a Llama to OpenAI's clients, with a web page that shows the batch.",
        SERVER_EXAMPLES,
    )
    p.usage = "serve.py [options]"
    add_model_flags(p.add_argument_group("models and drafts"))
    add_machine_flags(p.add_argument_group("batching, memory and hardware"))
    add_server_flags(p.add_argument_group("the server"))
    return p


def server_flags(arguments: Sequence[str] | None) -> Namespace:
    """The flags of serve.py; None: this program's. SystemExit or UserError for a mistake."""
    p = server_parser()
    args = p.parse_args(arguments)
    p.empty(args)  # an empty --host, from an unset "$HOST", would listen on all addresses
    check_server_flags(args)
    return args


def add_server_flags(p: _ArgumentGroup) -> None:
    p.add_argument(
        "--host", default="127.0.0.1", help="the address to listen on (default: only this machine)"
    )
    p.add_argument(
        "--port", type=int, default=8000, help="the port; 0 takes a free one (default 8000)"
    )
    p.add_argument(
        "--api-key",
        default=os.environ.get(KEY_VARIABLE) or None,
        help=f"a key that clients must send (default: {KEY_VARIABLE}, if it is set)",
    )
    p.add_argument(
        "--allow-origin",
        metavar="ORIGIN",
        action="append",
        default=[],
        help="let web pages from this origin use the server (http://localhost:3000, "
        "app://obsidian.md, null; '*' means all pages); may be repeated",
    )
    p.add_argument("--model-name", help="what clients call the model (default: --target)")
    p.add_argument(
        "--max-queue",
        type=int,
        default=256,
        help="how many requests may wait while --max-batch run; more are refused (default 256)",
    )
    p.add_argument(
        "--grace",
        type=float,
        default=30.0,
        help="seconds that open requests get to finish after a signal (default 30)",
    )


def check_server_flags(args: Namespace) -> None:
    """UserError for flags that a server cannot run with."""
    check_values(args)
    if args.tensor_parallel != 1 or is_launched():
        raise UserError(
            "a server runs in one process: leave out --tensor-parallel and torchrun, or split the "
            "model for generate.py --prompts"
        )
    if args.api_key is not None and args.api_key != args.api_key.strip():
        raise UserError(
            f"--api-key (or {KEY_VARIABLE}) begins or ends with a space, which a header cannot: "
            "remove the space"
        )
    for origin in args.allow_origin:
        if not re.fullmatch(ORIGIN, origin):
            raise UserError(
                f"--allow-origin is {origin!r}: it must be an origin as a browser sends it, with a "
                "scheme and a host but no path, pattern or default port (80, 443), such as "
                "http://localhost:3000; or null; or '*' for all pages"
            )
