"""Random command lines and files of requests: each ends in a result or in one line.

A result is status 0 or 1 with an answer that is whole: JSON where JSON was asked for, and of a file
an object for each line. Otherwise it is status 2 and one line `error: …`, after notes at most, and
nothing on standard output. A traceback, or a minute without an end, is a failure, shown with its
command line, as small as hypothesis can make it. TEST_TIMES (conftest.py) runs more of them.
"""

import contextlib
import faulthandler
import io
import json
import random
import shlex
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as st

from app import cli
from app import flags as flags_page
from conftest import TIMES
from loading import Model
from testing.folders import write_model

HANG = 60  # seconds
NUMBERS = (
    "nan inf -inf 1e308 -1e308 1e-320 1e999 -0.0 0 1 -1 2 3 0.5 0.9 1.5 7 1_0 ٣ ² 0x10 2e0 None "
    f"auto true {10**18} {2**31} {2**63} {2**64} {-(2**63) - 1} {10**400} -{'9' * 400} {'9' * 4301}"
).split() + ["", " 2 "]
USUAL = ["1", "2", "3", "5"]
TEXTS = [
    *("", " ", "a", "Once upon a time", "x" * 95, "x" * 96, "x" * 5000, "\ud800", "a\udcffb"),
    *("\x00", "a\x00b", "\n", "\r\n", "\x1b[31m", "\u2028", "\x85", "\ufeff", "é世😀"),
    *("<|endoftext|>", "<|im_start|>user", "{", "-", "--", "--n", "%s%d{0}", "Tom " * 20),
]
SCHEMAS = ['{"type": "integer"}', '{"maxItems": 1}', *"{ {} - none \udcff /dev/null".split()]
NUMBER_FLAGS = "temperature top-k top-p min-p seed max-tokens max-len n gamma max-batch".split()
FLAGS = dict.fromkeys(NUMBER_FLAGS, NUMBERS) | {
    "kv-memory": [*NUMBERS, "1e5", "1e6"],
    "stop": TEXTS,
    "system": TEXTS,
    "verify": ["block", "token", "coupled", "x"],
    "kv": ["paged", "contiguous", "\udcff"],
    "kv-bits": ["16", "8", "8/4", "4", "5"],
    "bits": ["16", "8", "4", "fp8", "nf4", "3"],
    "tensor-parallel": ["0", "1", "-1", "65", "x", ""],
    "device": ["cpu", "meta", "cuda:7", "", "\ud800"],
    "dtype": ["float64", "float32", "bfloat16", "float16", "int8"],
    "schema": SCHEMAS,
    "regex": ["a+", "[^x]{2}", "(", "", "\ud800", "\x00?", "é|世"],
    "choice": TEXTS,
    "grammar": ["none", "/dev/null", "-", ""],
    "draft": ["ngram", "self", "BASE", "OTHER", "no-such", "", "\x00", "/dev/null"],
}
SWITCHES = "raw chat no-cache no-prefix-cache color json unknown help".split()
FIELDS = (
    "temperature top_k top_p min_p seed max_tokens stop gamma schema regex choice grammar id "
    "system raw chat prompt messages unknown"
).split()
ODD = (  # JSON
    f"null true false NaN Infinity -Infinity 1e999 {10**400} {'9' * 4301} -1 0 1 2 3 0.5 2.0 1e2 "
    r'"" "a" "x" ["a"] [] [3] {} {"a":1} [[1]] "\ud800" "\u0000" "auto" ["","a"] '
    '["ab","b","abc"] "start:/a+/" {"type":"boolean"} [{"role":"user"}] '
    '[{"role":"user","content":"hi"}]'
).split()
LINES = [
    *("", " ", "\r", "[" * 100_000, '{"a":' * 100_000, "{", "nonsense", "\x00", "[]", "3", '"x"'),
    "\ufeff",
    '{"prompt": "a\u2028b\x85c", "max_tokens": 2}',
    "{" + '"prompt": "a", ' * 2 + '"seed": 1}',
    '{"prompt": ' + "[" * 900 + "]" * 900 + "}",
    '{"prompt": "a", "id": ' + "[" * 985 + "]" * 985 + "}",
    '{"prompt": "%s"}' % ("y" * 100_000),
]
NOTES = ("note: ", "running ", "keys and values: ", "colours: ")


def request(draw: random.Random) -> str:
    """A line of a file: nearly a request."""
    if draw.random() < 0.25:
        return draw.choice(LINES)
    fields = {"prompt": json.dumps(draw.choice(TEXTS), ensure_ascii=draw.random() < 0.5)}
    fields |= {name: draw.choice(ODD) for name in draw.sample(FIELDS, draw.choice([0, 0, 1, 1, 2]))}
    fields.setdefault("max_tokens", "3")
    return "{" + ", ".join(f'"{name}": {value}' for name, value in fields.items()) + "}"


def command(draw: random.Random, folder: Path) -> tuple[list[str], str]:
    """Arguments, and what comes by standard input."""
    names = {"BASE": folder / "base", "OTHER": folder / "other"}
    arguments = ["--target", str(folder / draw.choice(["base", "instruct"]))]
    typed = draw.choice(TEXTS)
    if draw.random() < 0.4:
        lines = "\n".join(request(draw) for _ in range(draw.randrange(6)))
        file = folder / "prompts.jsonl"
        file.write_bytes(
            draw.choice(["", "", "", "\ufeff"]).encode()
            + lines.encode(errors="surrogatepass")
            + draw.choice([b"", b"\n", b"\r\n"] * 3 + [b"\xff"])
        )
        file, typed = (file, typed) if draw.random() < 0.8 else ("-", lines)
        arguments += [
            "--prompts",
            str(
                file
                if draw.random() < 0.95
                else draw.choice([folder, "/dev/null", "", "\x00", "\udcff", folder / "none"])
            ),
        ]
    else:
        arguments += draw.choice([["--", draw.choice(TEXTS)], ["Hi"], ["Hi"], ["-"], []])
    flags = []
    for name in draw.sample(list(FLAGS), draw.choice([0, 1, 1, 2, 2, 3, 4])):
        value = draw.choice(
            USUAL if FLAGS[name] is NUMBERS and draw.random() < 0.6 else FLAGS[name]
        )
        flags.append(f"--{name}={names.get(value, value)}")
    if draw.random() < 0.4:
        flags.append(f"--{draw.choice(SWITCHES)}")
    if not any(flag.startswith("--max-tokens") for flag in flags):
        flags.append("--max-tokens=3")
    if draw.random() < 0.1:
        flags.append("--draft=ngram")
    return flags + arguments, typed


class Heard(io.TextIOWrapper):
    """A standard stream that keeps what was written."""

    def __init__(self, said: str = "") -> None:
        super().__init__(
            io.BytesIO(said.encode(errors="surrogatepass")),
            encoding="utf-8",
            errors="surrogateescape" if said else "strict",
            newline=None if said else "",
        )

    def text(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode()


def ran(arguments: list[str], typed: str) -> tuple[Any, str, str]:
    """Status (or a traceback), standard output and error of one command line."""
    out, err, before = Heard(), Heard(), sys.stdin
    err.reconfigure(errors="backslashreplace")
    sys.stdin = Heard(typed)
    faulthandler.dump_traceback_later(HANG, exit=True, file=sys.__stderr__)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status: Any = cli.main(arguments)
    except SystemExit as stop:
        status = stop.code
    except BaseException:
        status = traceback.format_exc()
    finally:
        faulthandler.cancel_dump_traceback_later()
        sys.stdin = before
    return status, out.text(), err.text()


def wrong(arguments: list[str], status: Any, out: str, err: str) -> str:
    """What an answer is not that it must be; empty if it is."""
    *notes, last = err.splitlines() or [""]
    if status == 2:
        if out or not last.startswith("error: ") or not err.endswith("\n") or len(last) > 1200:
            return "status 2 is one short line on standard error, and no output"
        more = [line for line in notes if not line.startswith(NOTES)]
        return f"more than one line: {more[0]!r}" if more else ""
    if status not in (0, 1):
        return "neither a result nor a line"
    if "--help" in arguments:
        return ""
    if out and not out.endswith("\n"):
        return "the last line does not end"
    if "--prompts" not in arguments and "--json" not in arguments:
        return "" if status == 0 and out else "no text"
    try:
        lines = out.split("\n")[:-1]
        results = [json.loads(line, parse_constant=lambda name: 1 // 0) for line in lines]
    except (ValueError, ZeroDivisionError) as error:
        return f"the output is not JSON: {error}"
    if sorted(result["index"] for result in results) != list(range(len(results))):
        return "there is not a result for each"
    is_bad = any(result["finish_reason"] == "error" for result in results)
    return "" if is_bad == (status == 1) else "a status that does not say how it went"


@pytest.fixture
def folder(base: Path, instruct: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with three tiny models, loaded once for each way of loading; at most 50 texts are
    asked for together."""
    load, known = Model.load.__func__, {}

    def once(cls: type[Model], *how: Any) -> Model:
        key = tuple(map(str, how))
        if key not in known:
            known[key] = load(cls, *how)
        return known[key]

    (tmp_path / "base").symlink_to(base)
    (tmp_path / "instruct").symlink_to(instruct)
    write_model(tmp_path / "other", seed=5, num_hidden_layers=1)
    monkeypatch.setattr(Model, "load", classmethod(once))
    monkeypatch.setattr(flags_page, "MAX_TEXTS", 50)
    return tmp_path


def fuzz(folder: Path, count: int, phases: list[Phase] = [*Phase]) -> Counter[int]:
    """Status -> how often. AssertionError: what was wrong, with its command line."""
    counts = Counter[int]()

    @hypothesis.seed(1)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=phases,
    )
    @given(st.randoms(use_true_random=False))
    def one(draw: random.Random) -> None:
        arguments, typed = command(draw, folder)
        status, out, err = ran(arguments, typed)
        shown = [a if len(a) < 200 else f"{a[:100]}…" for a in arguments]
        fault = wrong(arguments, status, out, err)
        assert not fault, (
            f"{fault}\n  {shlex.join(shown)!r} < {typed[:100]!r}\n  {status}\n"
            f"  {out[-300:]!r}\n  {err[-600:]!r}"
        )
        counts[status] += 1

    one()
    return counts


def test_random_command_lines_end_in_a_result_or_in_one_line(folder, monkeypatch):
    """And a planted fault is found."""

    def planted(*arguments: object) -> int:
        return int("planted")

    assert {0, 1, 2} <= fuzz(folder, 80 * TIMES).keys()
    monkeypatch.setattr(cli, "many_prompts", planted)
    with pytest.raises(AssertionError, match="ValueError"):
        fuzz(folder, 20, [Phase.generate])
