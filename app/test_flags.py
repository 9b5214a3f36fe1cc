"""--help and mistakes in flags come at once, without PyTorch, and say what to type instead."""

import os
import resource
import shlex
import subprocess
import sys

from app import flags
from settings import Settings
from testing.pages import ROOT
from testing.programs import told

AT_ONCE = 0.3  # seconds of the processor: other programs do not count


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


MISTAKES = told(
    """
    --temprature 1 Once → unrecognized arguments: --temprature Once (did you mean --te
    --temp=1 Once → (did you mean --temperature?)
    --colour Once → (did you mean --color?)
    --xyz Once → unrecognized arguments: --xyz (see --help)
    Once upon a time → put the prompt in quotes, "Once upon a time"
    --n 0 Once → --n is 0
    --temperature -1 Once → temperature is -1: it must be from 0
    --max-tokens -1 Once → max_tokens is -1
    --regex a --choice b Once → regex and choice are given
    --gamma 2 Once → --gamma needs drafted tokens
    --verify maybe Once → verify is 'maybe': it must be block, token or coupled
    --kv-bits 5 Once → kv_bits is '5': it must be 16, 8, 4 or 8/4
    --out /nowhere/at/all Once → /nowhere/at/all is not a file
    """
)


CASES = [("generate.py", shlex.split(words), 2, says) for words, says in MISTAKES]
CASES += [("generate.py", ["--help"], 0, "examples:"), ("serve.py", ["--help"], 0, "examples:")]
CASES += [
    ("serve.py", ["--prot", "80"], 2, "(did you mean --port?)"),
    ("serve.py", ["--port", "-1"], 2, "--port is -1"),
    ("serve.py", ["--gamma", "-1", "--draft", "ngram"], 2, "gamma is -1"),
]


def test_help_and_mistakes_are_told_before_torch_is_imported(tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    for page, words, code, says in CASES:
        before = cpu_seconds()
        done = subprocess.run(
            [sys.executable, page, *words],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert cpu_seconds() - before < AT_ONCE
        said = done.stdout if code == 0 else done.stderr
        assert done.returncode == code and says in said, done.stderr
        if code:
            assert done.stdout == "" and done.stderr.count("\n") == 1
            assert done.stderr.startswith("error: ")


def test_help_has_groups_and_examples_that_can_be_typed():
    text = flags.parser().format_help()
    for group in (
        "models and drafts",
        "generation",
        "batching, memory and hardware",
        "output",
    ):
        assert f"\n{group}:\n" in text
    assert f"default {Settings().max_tokens}" in text
    parsers = {"generate.py": flags.generate_flags, "serve.py": flags.server_flags}
    for line in (flags.EXAMPLES + flags.SERVER_EXAMPLES).splitlines():
        if line.startswith("  "):
            python, page, *words = shlex.split(line.split("  ")[1])
            assert python == "python"
            parsers[page](words)


def test_each_setting_and_option_has_a_flag():
    assert sorted(" ".join(flags.GROUPS.values()).split()) == sorted(flags.DECLARED)


def test_files_that_the_examples_write_are_not_for_the_repository():
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert "results.jsonl" in flags.EXAMPLES  # --out
    assert {"results.jsonl", "trace.json", "/eagle/", "/llama-*/"} <= set(ignored)
