"""The command: everything runs, only numbers are stored, and a mistake is one line."""

import json
import platform
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import bench
from measure import pair, report
from measure.machine import machine
from measure.sizes import QUICK, SIZES
from testing.programs import check_refusals, program


@pytest.fixture(scope="module")
def quick() -> dict:
    """All that `bench.py --quick` measures."""
    torch.set_num_threads(1)  # before the fixture of each test does
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "machine", lambda: machine(1e10))
        return json.loads(json.dumps(bench.measure_pair(QUICK)))


# ---- What is measured


@pytest.mark.slow
def test_every_section_has_a_table_and_no_name_of_this_machine(quick):
    titles = [section.title for section in report.sections(quick)]
    num_missing = find_spec("llguidance") is None  # an extra package
    assert len(titles) == len(bench.SECTIONS) - num_missing
    assert all(titles)
    assert "/" not in json.dumps(quick).replace("8/4", "")


@pytest.mark.slow
def test_the_combined_table_is_cumulative_and_exact_rows_say_the_same(quick):
    rows = list(quick["stack"].values())
    none, cache, int8, int4, drafts, alone, batch, paged, shared, small = rows
    assert [row["name"] for row in rows] == [row.name for row in (*pair.ONE, *pair.MANY)]
    for row in cache, drafts, batch, paged, shared:  # these techniques change no text
        assert row["same_texts"] == row["texts"]
    assert cache["speed_up"] > 1.2
    assert none["cache_bytes"] == 0
    assert cache["cache_bytes"] == alone["cache_bytes"] == 2 * 8 * 2 * 64 * 4 * 1024
    assert batch["cache_bytes"] == 2 * alone["cache_bytes"] > paged["cache_bytes"]
    assert shared["cache_bytes"] <= paged["cache_bytes"]  # prompts of one step share nothing
    assert small["cache_bytes"] < 0.27 * shared["cache_bytes"]
    assert int8["weight_bytes"] < 0.6 * cache["weight_bytes"]
    assert int4["weight_bytes"] < 0.8 * int8["weight_bytes"]


LIMITS = {  # of 16 bits' perplexity, what fewer bits add: at least, at most
    "INT8 rtn, 16": (0, 0.0005),
    "INT8 gptq, 8": (-1, 0.002),
    "FP8 rtn, 16": (0, 0.003),
    "W8A8 rtn, 16": (-1, 0.001),
    "16 bits, 8": (-1, 0.00006),
    "16 bits, 8/4": (-1, 0.003),
    "16 bits, 4": (-1, 0.005),
}


@pytest.mark.slow
def test_fewer_bits_cost_little():
    """Seconds play no part: the same on every machine, up to the order of sums."""
    rows = {
        f"{row['weights']}, {row['kv']}": row for row in pair.bits(replace(SIZES, num_stories=8))
    }
    lost = {name: row["loss"] for name, row in rows.items()}
    for name, (least, most) in LIMITS.items():
        assert least <= lost[name] <= most, name
    rounded, nf4 = "INT4 rtn, groups of 128, 16", "NF4 rtn, groups of 64, 16"
    assert lost["W8A8 smoothquant, 16"] <= lost["W8A8 rtn, 16"]
    assert lost[nf4] <= lost[rounded] and rows[nf4]["bytes"] <= rows[rounded]["bytes"]
    assert lost["INT4 gptq, groups of 128, 16"] <= lost[rounded] / 2


# ---- What is stored


def test_what_was_measured_before_stays(tmp_path, monkeypatch):
    out = tmp_path / "one.json"
    out.write_text('{"stack": [1], "steps": {"old": 1, "new": 2}, "bits": [2]}')
    row = {"target": "tiny", "width": "INT8"}
    monkeypatch.setattr(bench.pair, "stack", lambda *arguments: {"tiny": row})
    monkeypatch.setattr(bench.steps, "steps", lambda *arguments: {"new": row})
    monkeypatch.setattr(bench.steps, "grammar_costs", lambda *arguments: {})
    assert bench.main(["--target", "tiny", "--out", str(out)]) == 0
    stored = json.loads(out.read_text())
    assert stored["steps"] == {"old": 1, "new": row}
    assert stored["stack"] == {"tiny": row} and stored["bits"] == [2] and stored["machine"]


@pytest.mark.slow
def test_documents_are_made_of_the_results_that_they_name(tmp_path, monkeypatch, quick):
    for folder in ("results", "docs"):
        (tmp_path / folder).mkdir()
    (tmp_path / "results" / "m.json").write_text(json.dumps(quick))
    marks = "<!-- figures of results/m.json: {} -->\noutdated\n<!-- end of figures -->\n"
    for name, tables in zip(bench.DOCUMENTS, ("steps drafts", "stack", "bits", "stack")):
        (tmp_path / name).write_text(marks.format(tables))
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    assert bench.main(["--readme"]) == 0
    drawn = {path.stem for path in Path(tmp_path / "results").glob("*.svg")}
    assert drawn == {"stack", "drafts", "bits"}
    texts = [(tmp_path / name).read_text() for name in bench.DOCUMENTS]
    assert [text.count("**") for text in texts] == [4, 2, 2, 2]
    assert all(quick["machine"] in text and "outdated" not in text for text in texts)


def test_what_is_shared_is_of_this_machine_and_names_no_host(tmp_path, monkeypatch, capsys):
    path = tmp_path / "m.json"
    monkeypatch.setattr(bench, "results_file", lambda: path)
    monkeypatch.setattr(bench, "write_documents", lambda: path.with_suffix(".md").touch())
    for stored, told in (
        ("{}", "run bench.py first"),
        (json.dumps({"steps": {platform.node(): 1}}), f"contains {platform.node()}"),
        ('{"steps": {"tiny": 1}}', f"send a pull request with {path}"),
    ):
        assert not path.with_suffix(".md").exists()
        path.write_text(stored)
        bench.main(["--share"])
        assert told in capsys.readouterr().err


def test_mistakes_are_one_line_and_told_before_anything_is_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(bench, "measure_pair", lambda sizes: pytest.fail("measured first"))
    (tmp_path / "deep.json").write_text("[" * 10)
    (tmp_path / "list.json").write_text("[1]")
    table = """
        --against nobody → invalid choice: 'nobody'
        --gpu decode → needs a GPU
        --gguf x → --gguf has no effect except with
        --target x --gpu decode → --target has no effect
        --out {tmp} → is not a file
        --out /dev/null → is not a file
        --out {tmp}/no/x → cannot be written
        --out {tmp}/deep.json → is not JSON
        --out {tmp}/list.json → does not hold results
        --share --quick → --quick has no effect with --share
        --readme --quick → --quick has no effect
        --draft ngram --draft-bits 8 --quick → draft_bits is 8
        --draft ngram --prompts no-file --quick → --prompts no-file is missing
        --target '' → --target is empty
        --gpu '' → --gpu is empty
        --plan '' --gpu H200 → --plan is empty
        --out '' → --out is empty
        --plan 70B --gpu H100 → take fewer --bits, more --gpus
        --plan 8B → --gpu is None: it must be one of RTX3060
        --plan 8B --gpu decode → --gpu is decode
        --gpu H100 → --gpu is H100: it must be one of all
        --gpus 2 → --gpus has no effect except with --plan
        --plan 8B --gpu H100 --draft-bits 4 → --draft-bits has no effect with --plan
        --gpu decode --draft tiny-draft → --draft has no effect with --against, --gpu
        --plan 8B --gpu H100 --quick → --quick has no effect with --plan
        --plan 8B --gpu H100 --draft 1B → --draft has no effect with --plan
        --plan meta/Llama --gpu H100 → downloads nothing
        --plan 8B --gpu H100 --gpus 3 → multiple of 3
        --plan 8B --gpu H100 --gpus 0 → --gpus is 0
        --plan 8B --gpu H100 --bits 5 → bits is 5
        --plan 8B --gpu H100 --kv-bits 5 → kv_bits is '5'
        --plan tiny --gpu H100 → --context is 4096
    """
    check_refusals(bench.main, table, capsys, tmp=tmp_path)


WITHOUT_TRITON = """
import sys
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *where: None if name == "triton" else find(name, *where)
import bench
sys.exit(bench.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_triton_exists_for_linux_only(tmp_path):
    options = ["--quick", "--out", tmp_path / "out.json"]
    done = program("-c", WITHOUT_TRITON, "--gpu", "decode", *options)
    assert done.returncode == 0 and "WRONG" not in done.stdout, done.stderr
