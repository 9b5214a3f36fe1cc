"""The flags of generate.py and of serve.py: what there are, and which exclude each other.

Nothing slow is imported here, so that --help and a mistake in a flag are told at once.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from app.shell import Parser, flag, number_or_word, status
from checkpoint.files import check_file
from errors import UserError
from settings import MAX_TOKENS, VERIFY, Settings

KEY_VARIABLE = "LLAMA_API_KEY"
FILES = ("schema", "grammar")  # settings that are read from files
MAX_GRACE = 86_400  # seconds
MAX_TEXTS = 2**16  # asked for at a time
# Browsers send small letters, and no port that a scheme has by itself.
ORIGIN = r"\*|null|(?!http:.*:80$|https:.*:443$)[a-z][a-z\d+.-]*://[^/?#@*\sA-Z]*"
EXAMPLES = """\
examples:
  python generate.py --draft tiny-draft "Once upon a time"     the model in this repository
  python generate.py --target 8B --draft 1B                    chat
  python generate.py --target 1B --bits 4 "Why is it dark?"    fewer bits, less memory
  python generate.py --target 1B --schema '{"type": "object"}' "Tom is 5 years old. As JSON:"
  python generate.py --prompts FILE.jsonl --out results.jsonl  many at a time
"""
SERVER_EXAMPLES = """\
examples:
  python serve.py                                      the model in this repository, port 8000
  python serve.py --target 8B --draft 1B --port 8080  another port
"""


def parser() -> argparse.ArgumentParser:
    p = Parser(
        "generate.py",
        "Continue, answer or chat with a Llama. Settings left out: its generation_config.json's.",
        EXAMPLES,
    )
    p.usage = "generate.py [options] [prompt]"
    p.add_argument(
        "prompt",
        nargs="?",
        help="text to continue or to answer, in quotes; '-': standard input; none: chat",
    )
    add_model_flags(p.add_argument_group("models and drafts"))
    add_text_flags(p.add_argument_group("texts"))
    add_grammar_flags(p.add_argument_group("texts that follow a grammar, one of"))
    memory = p.add_argument_group("batches, memory and the machine")
    add_memory_flags(memory)
    memory.add_argument(
        "--no-cache",
        action="store_true",
        help="run generate.py's plain_loop, which computes all again for each token, to feel the "
        "difference",
    )
    add_output_flags(p.add_argument_group("output"))
    return p


def generate_flags(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags of generate.py. SystemExit or UserError for a mistake."""
    args = parser().parse_args(arguments)
    check_flags(args)
    return args


def tell_early(parse: Callable[[Sequence[str]], Any]) -> None:
    """Called by a program before slow imports: --help and a mistake in a flag end it now."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return  # of several processes (launch.py) the first one tells it, later

    def check() -> None:
        parse(sys.argv[1:])

    code = status(check)
    if code:
        sys.exit(code)


def add_model_flags(p: argparse._ArgumentGroup) -> None:
    p.add_argument(
        "--target",
        default="tiny",
        help="1B, 3B, 8B, 70B (Llama 3.x Instruct), a Hub id, a folder, FILE.gguf, or tiny",
    )
    p.add_argument(
        "--draft",
        help="a smaller model or an EAGLE-3 head, named like --target, or tiny-draft, "
        "tiny-eagle; ngram: looks back; self: INT4 copy",
    )
    p.add_argument(
        "--gamma",
        type=number_or_word,
        help="tokens drafted a round, or auto (default): what pays best by the clock, 0 too",
    )
    p.add_argument(
        "--verify",
        choices=VERIFY,
        help="drafts as a block (default), which accepts the most; token by token; or coupled "
        "(default with --seed, unless --gamma is a number): target and seed alone decide the text",
    )
    p.add_argument(
        "--bits",
        type=number_or_word,
        default=16,
        help="round the target's weights as they are loaded, to 8, 4, fp8 or nf4 (train.quantize: "
        "with care)",
    )
    p.add_argument(
        "--draft-bits",
        type=number_or_word,
        help="of the draft's weights: 16, 8, 4, fp8 or nf4 (default: the target's)",
    )
    p.add_argument(
        "--dtype",
        choices=("float64", "float32", "bfloat16", "float16"),
        help="what to compute in (default: on a CPU float32)",
    )


def add_text_flags(p: argparse._ArgumentGroup) -> None:
    p.add_argument(
        "--temperature",
        type=float,
        help="0: always the most probable token (default: as the model recommends; where it "
        "recommends nothing 0, in a chat 0.7, with --top-k, --top-p or --min-p 1)",
    )
    p.add_argument("--top-k", type=int, help="keep the k most probable")
    p.add_argument("--top-p", type=float, help="keep the fewest holding this share")
    p.add_argument("--min-p", type=float, help="keep this share of the largest")
    p.add_argument(
        "--seed",
        type=int,
        help="the same seed gives the same text; unset: a new one, which is told",
    )
    p.add_argument(
        "--max-tokens",
        type=int,
        default=MAX_TOKENS,
        help=f"make at most so many (default {MAX_TOKENS})",
    )
    p.add_argument(
        "--stop", action="append", default=[], help="end before this text; may be repeated"
    )
    p.add_argument("--system", help="a system message, for chat templates")
    p.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        help="whether to think first, for chat templates that ask (Qwen 3)",
    )
    either = p.add_mutually_exclusive_group()
    either.add_argument(
        "--chat",
        dest="use_template",
        action="store_const",
        const=True,
        help="use the model's chat template, which is the default where it has one",
    )
    either.add_argument(
        "--raw",
        dest="use_template",
        action="store_const",
        const=False,
        help="continue the prompt as it is, without the model's chat template",
    )
    p.add_argument(
        "--special",
        action="store_true",
        help="a raw prompt means the control tokens that it spells (default: they are text)",
    )
    p.add_argument("--n", type=int, default=1, help="texts, with seeds SEED, SEED+1, …")
    p.add_argument(
        "--prompts", help='JSONL, a text a line: {"prompt": …} and any of the settings by name'
    )


def add_grammar_flags(p: argparse._ArgumentGroup) -> None:
    p.add_argument(
        "--schema", help='a JSON schema: a file, - for standard input, or in place: {"type": …}'
    )
    p.add_argument("--regex", help="a regular expression for the whole text")
    p.add_argument("--choice", action="append", help="one of these texts; to be repeated")
    p.add_argument("--grammar", help="a file with a grammar in Lark")


def add_memory_flags(p: argparse._ArgumentGroup) -> None:
    p.add_argument(
        "--max-batch",
        type=int,
        default=16,
        help="at most so many texts at a time (default 16)",
    )
    p.add_argument(
        "--max-len",
        type=int,
        help="prompt and answer, at most (default: as memory allows, up to the model's limit)",
    )
    p.add_argument(
        "--kv",
        default="paged",
        help="keys and values in blocks, on demand (paged, default), or in reserved rows "
        "(contiguous)",
    )
    p.add_argument(
        "--kv-bits",
        default="16",
        help="keep keys and values in 8 or 4 bits, or keys in 8 and values in 4 (8/4)",
    )
    p.add_argument(
        "--kv-memory",
        type=float,
        help="for keys and values: bytes, or, up to 1, a share of what is free (default: what the "
        "texts may need, at most 80 %% of what is free)",
    )
    p.add_argument(
        "--no-prefix-cache",
        action="store_true",
        help="read every prompt from its beginning, also where another began alike",
    )
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
        help="split the models over so many processes (as torchrun does without this flag)",
    )


def add_output_flags(p: argparse._ArgumentGroup) -> None:
    p.add_argument(
        "--json",
        action="store_true",
        help="print each result as one JSON object, with the tokens and the times",
    )
    p.add_argument(
        "--logprobs",
        type=int,
        help="in JSON: ln p of each token, and of so many of the most probable (before filters)",
    )
    p.add_argument(
        "--prompt-logprobs",
        type=int,
        help="in JSON: the same, of the prompt's tokens (--max-tokens 0: of these alone)",
    )
    p.add_argument("--out", metavar="FILE", help="write results to a new file, not standard output")
    p.add_argument(
        "--color",
        action="store_true",
        help="show the origin of each token: accepted, corrected, or the bonus after a full round",
    )
    p.add_argument(
        "--profile",
        help="a file for a trace (ui.perfetto.dev); tells where the time went, loading aside",
    )


def check_flags(args: argparse.Namespace) -> None:
    """UserError for flags that exclude each other, or are out of range."""
    check_counts(args, "n", "max_batch", "tensor_parallel")
    flagged_settings(args)  # UserError for a value out of range
    check_draft_flags(args, "gamma", "verify", "color", "draft_bits")
    if args.prompts and (args.prompt is not None or args.n > 1 or args.color):
        raise UserError(
            "--prompts FILE has the prompts, a text for each, as JSON: leave out the prompt, --n "
            "and --color"
        )
    if args.out is not None:
        check_file(Path(args.out))
    check_written_files(args)
    if args.out and os.path.exists(args.out) and os.path.getsize(args.out):
        raise UserError(
            f"--out {args.out} has results already, which would be lost: name another file, or "
            "move this one"
        )
    if args.schema == "-" and "-" in (args.prompt, args.prompts):
        raise UserError("standard input holds the schema or the prompt: name a file for one")
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(args, name) is not None and not (args.json or args.prompts):
            raise UserError(
                f"{flag(name)} is about JSON results: add --json, or use --prompts FILE"
            )
    if args.color and args.json:
        raise UserError("--color is for text: leave it out, or --json")


def flagged_settings(args: argparse.Namespace) -> Settings:
    """The settings that flags give, but for those in files."""
    names = Settings.__dataclass_fields__.keys() - FILES
    return Settings(**{name: getattr(args, name) for name in names})


def check_written_files(args: argparse.Namespace) -> None:
    """UserError if a file that is written is also read, or written twice: it would be lost."""
    for written in ("out", "profile"):
        file = getattr(args, written)
        for other in ("prompts", "schema", "grammar", "target", "draft"):
            name = getattr(args, other)
            if file and name and is_same_file(file, name):
                raise UserError(f"--{written} {file} is the file of --{other}: name another")
    if args.out and args.profile:
        if os.path.realpath(args.out) == os.path.realpath(args.profile):
            raise UserError(f"--profile {args.profile} is the file of --out: name another")


def is_same_file(one: str, other: str) -> bool:
    """Whether both names are of one file, which exists."""
    return os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other)


def check_counts(args: argparse.Namespace, *names: str) -> None:
    for name in names:
        number = getattr(args, name)
        if not 1 <= number <= MAX_TEXTS:
            raise UserError(f"{flag(name)} is {number}: it must be from 1 to {MAX_TEXTS:,}")


def check_draft_flags(args: argparse.Namespace, *names: str) -> None:
    """UserError for a flag of these about drafts, where there are none."""
    for name in names:
        if args.draft is None and getattr(args, name) not in (None, False):
            raise UserError(f"{flag(name)} is about drafted tokens: name a --draft (tiny-draft, …)")


# ---- serve.py ----------------------------------------------------------------------------------


def server_parser() -> Parser:
    p = Parser(
        "serve.py",
        "Serve a Llama to OpenAI's clients, and a page that shows the batch.",
        SERVER_EXAMPLES,
    )
    p.usage = "serve.py [options]"
    add_model_flags(p.add_argument_group("models and drafts"))
    add_memory_flags(p.add_argument_group("batches, memory and the machine"))
    add_server_flags(p.add_argument_group("the server"))
    return p


def server_flags(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The flags of serve.py; None: this program's. SystemExit or UserError for a mistake."""
    p = server_parser()
    args = p.parse_args(arguments)
    p.empty(args)  # of "$HOST", which is not set, all addresses would be made
    check_server_flags(args)
    return args


def add_server_flags(p: argparse._ArgumentGroup) -> None:
    p.add_argument(
        "--host", default="127.0.0.1", help="the address to listen on (default: this machine's own)"
    )
    p.add_argument("--port", type=int, default=8000, help="0: any that is free (default 8000)")
    p.add_argument(
        "--api-key", help=f"a key that clients must send (default: {KEY_VARIABLE}, if it is set)"
    )
    p.add_argument(
        "--allow-origin",
        metavar="ORIGIN",
        action="append",
        default=[],
        help="let pages of this origin use the server (http://localhost:3000, app://obsidian.md, "
        "null; '*': all pages); may be repeated",
    )
    p.add_argument("--model-name", help="what clients call the model (default: --target)")
    p.add_argument(
        "--max-queue",
        type=int,
        default=256,
        help="texts that wait, beside --max-batch that run; more are refused (default 256)",
    )
    p.add_argument(
        "--grace",
        type=float,
        default=30.0,
        help="seconds for open texts to be finished, after a signal (default 30)",
    )


def check_server_flags(args: argparse.Namespace) -> None:
    """UserError for flags that make no server."""
    check_counts(args, "max_batch", "max_queue")
    Settings(gamma=args.gamma)  # UserError, too
    check_draft_flags(args, "gamma", "verify", "draft_bits")
    if not 0 <= args.port < 2**16:
        raise UserError(f"--port is {args.port}: it must be from 0 to 65535")
    if not 0 <= args.grace <= MAX_GRACE:
        raise UserError(f"--grace is {args.grace}: it must be from 0 to {MAX_GRACE} seconds")
    for name, key in (("--api-key", args.api_key), (KEY_VARIABLE, os.environ.get(KEY_VARIABLE))):
        if key and key != key.strip():
            raise UserError(f"{name} begins or ends with a space, which no header can: take it out")
    for origin in args.allow_origin:
        if not re.fullmatch(ORIGIN, origin):
            raise UserError(
                f"--allow-origin is {origin!r}: it must be as a browser sends it, a scheme and a "
                "host, no path, pattern or usual port (80, 443): http://localhost:3000; null; or "
                "'*' for all pages"
            )
