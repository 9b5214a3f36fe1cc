"""An edit of a page changes what generate.py does, and a note says so."""

import ast
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

import edits
from exercise import copy_project
from kernels import Ops
from testing.programs import program

COMMAND = "run `python -m cpu.accept` when `pytest cpu gpu` passes: edits.json is old"
DRAFT = "--draft tiny-draft --gamma 3 --max-tokens 60"
EAGLE = "--draft tiny-eagle --gamma 3"
# Imports what takes long, then forks a generate.py for each line of flags. It writes no bytecode:
# none may be that of an edit.
FORKED = """
import json, os, runpy, sys
import torch, safetensors.torch, tokenizers
sys.dont_write_bytecode = True
for line in sys.stdin:
    out, err, *flags = json.loads(line)
    if child := os.fork():
        print(os.waitpid(child, 0)[1], flush=True)
        continue
    for stream, name in ((1, out), (2, err)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    sys.argv = ["generate.py", *flags]
    runpy.run_path("generate.py", run_name="__main__")
"""
EDITS = (  # page, function, a text of it, what takes its place, flags of generate.py
    ("model.py", "Llama.decoder_layer", "mlp_out = self.group", "mlp_out = 0 * self.group", ""),
    ("model.py", "Llama.forward", "x = self.embedding(tokens)", "x = -self.embedding(tokens)", ""),
    ("model.py", "Llama.rope", "torch.outer(positions", "torch.outer(2 * positions", ""),
    ("kernels.py", "attention", "return out[0]", "return 2 * out[0]", ""),
    ("kernels.py", "rotate", "a * cos - b", "a * cos + b", ""),
    ("kernels.py", "rms_norm", "normed.to(x.dtype) *", "2 * normed.to(x.dtype) *", ""),
    ("kernels.py", "Ops.linear", "return F.linear(x, w, bias)", "return -F.linear(x, w, bias)", ""),
    ("kernels.py", "Ops.embed", "return F.embedding(tokens", "return F.embedding(tokens + 1", ""),
    ("kernels.py", "Ops.swiglu", "F.silu(gate) * up", "gate * up", ""),
    ("kernels.py", "Ops.add_norm", "x = x + delta", "x = x - delta", ""),
    ("kernels.py", "Ops.attend", "outputs) + zero", "outputs) * 2 + zero", ""),
    ("kvcache.py", "Store.read", "return self.decode", "return 2 * self.decode", ""),
    ("quant.py", "Quantized.dequantize", "return w\n", "return 2 * w\n", "--bits 8"),
    ("quant.py", "symmetric", "x.float() / spread", "2 * x.float() / spread", "--kv-bits 8"),
    ("sampling.py", "soften", "return torch.where(is_greedy", "return torch.where(~is_greedy", ""),
    ("sampling.py", "keep_top", "rank < top_k", "rank == top_k", "--top-k 3"),
    ("sampling.py", "pick", "argmax(-1)", "argmin(-1)", ""),
    ("sampling.py", "exponential", "return -u", "return u", ""),
    ("sampling.py", "MIX1", "MIX1 = ", "MIX1 = 2 + ", ""),
    ("drafters.py", "Chain.one_by_one", "] = picked", "] = 5", DRAFT),
    ("drafters.py", "ModelChain.logits", "return self.model", "return -self.model", DRAFT),
    ("speculative.py", "Round.pick_drafts", "return q, picked", "return q, 0 * picked", DRAFT),
    ("speculative.py", "verify_block", "m = residual.sum(-1)", "m = 1 + residual.sum(-1)", DRAFT),
    ("speculative.py", "likelihood_ratio", "p_x / q_x", "q_x / p_x", DRAFT),
    (
        "eagle.py",
        "EagleHead.forward",
        "cat((token, normed)",
        "cat((normed, token)",
        EAGLE,
    ),
    ("eagle.py", "EagleHead.draft_logits", "return self.group", "return -self.group", EAGLE),
    ("eagle.py", "HeadChain.logits", "(self.z)", "(-self.z)", EAGLE),
)


class Copy:
    """A copy of the project, and what its generate.py prints."""

    def __init__(self, folder: Path):
        copy_project(folder)
        self.folder = folder
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        command = [sys.executable, "-c", FORKED]
        self.process = subprocess.Popen(command, cwd=folder, text=True, **pipes)
        self.unedited = cache(self.generated)

    def generated(self, flags: str) -> tuple[str, str]:
        """The result, without its times, and the notes."""
        asked = "--json --seed 1 --temperature 1 --verify block --max-tokens 12".split()
        if "--draft" not in flags:
            asked = [word for word in asked if word not in ("--verify", "block")]
        out, err = (self.folder.with_name(name) for name in ("out", "err"))
        line = [str(out), str(err), *asked, *flags.split(), "Once upon a time"]
        print(json.dumps(line), file=self.process.stdin, flush=True)
        status = self.process.stdout.readline()
        said = err.read_text()
        if int(status):
            return said.splitlines()[-1], said
        result = json.loads(out.read_text())
        return repr((result["tokens"], result["stats"]["acceptance"])), said


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Iterator[Copy]:
    made = Copy(tmp_path_factory.mktemp("edits") / "copy")
    yield made
    made.process.communicate()


def in_definition(page: Path, name: str, change: Callable[[str], str]) -> str:
    """The page's text, changed in the body of this definition alone."""
    text = page.read_text(encoding="utf-8")
    lines = text.split("\n")
    node = edits.definitions(page.name)[name]
    start = node.body[1].lineno if isinstance(node, ast.FunctionDef) else node.lineno
    body = "\n".join(lines[start - 1 : node.end_lineno])
    changed = change(body)
    assert changed != body
    return "\n".join([*lines[: start - 1], changed, *lines[node.end_lineno :]])


# ---- The record


def test_the_record_is_of_these_pages():
    record = json.loads(edits.RECORD.read_text(encoding="utf-8"))
    assert len(record["pages"]) > 8
    for page, (whole, digests) in record["pages"].items():
        assert edits.file_digest(page) == whole, COMMAND
        for name, recorded in digests.items():
            assert edits.digest(edits.definitions(page)[name]) == recorded, COMMAND
    assert edits.changed() == {}
    operations = record["operations"].values()
    assert all(name.split(": ")[0] in record["pages"] for names in operations for name in names)


@pytest.mark.slow
def test_the_record_names_what_the_operations_call(tmp_path):
    file = tmp_path / "edits.json"
    assert program("-m", "cpu.accept", file).returncode == 0
    assert json.loads(file.read_text()) == json.loads(edits.RECORD.read_text()), COMMAND


def test_a_digest_is_of_what_runs():
    def of(text: str) -> str:
        return edits.digest(ast.parse(text).body[0])

    one = of("def f(x):\n    '''Twice.'''\n    return 2 * x")
    assert of("def f(x):\n\n    # twice\n    return (2 *\n        x)") == one
    others = ("def f(x): return 3 * x", "def f(y): return 2 * y", "@g\ndef f(x): return 2 * x")
    assert len({one, *map(of, others)}) == 4
    assert of("f = 'a'") != of("f = 'b'")


def test_operations_are_put_back_where_they_are_overridden(monkeypatch):
    class Fast(Ops):
        language = "C for tests"

        def swiglu(self, x, gate_up):
            return "fast"

        def pick(self, probs, streams):
            return "fast"

    monkeypatch.setattr(edits, "changed", lambda: {"swiglu": ["a.py: f"], "attend": ["a.py: g"]})
    ops = Fast()
    with pytest.warns(UserWarning, match="^a.py: f: changed, so .* as written, without C "):
        assert edits.put_back(ops) == {"swiglu"}
    assert ops.swiglu.__func__ is Ops.swiglu and ops.pick(None, None) == "fast"


# ---- Edits, in a copy


@pytest.mark.slow
@pytest.mark.parametrize("page, name, old, new, flags", EDITS, ids=[edit[1] for edit in EDITS])
def test_an_edit_changes_what_runs(page, name, old, new, flags, copy):
    before, notes = copy.unedited(flags)
    assert "changed" not in notes
    file = copy.folder / page
    text = file.read_text(encoding="utf-8")
    try:
        file.write_text(in_definition(file, name, lambda body: body.replace(old, new)))
        after, notes = copy.generated(flags)
    finally:
        file.write_text(text, encoding="utf-8")
    assert after != before
    assert f"{page}: {name}: changed" in notes and "slower" in notes
