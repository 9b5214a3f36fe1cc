"""The command: everything runs, what is kept is numbers, and what is not there is named."""

import json
import re
import tempfile
from pathlib import Path

import pytest
import torch

import bench
from conftest import program
from measure import gpucases, report


def everything(effort: str) -> dict:
    """All that `bench.py` measures with such a flag."""
    with tempfile.TemporaryDirectory() as folder:
        done = program("bench.py", effort, "--out", out := Path(folder, "quick.json"))
        assert done.returncode == 0, done.stderr
        return json.loads(out.read_text())


MEASURED = pytest.mark.meanwhile(everything, "--quick")


@pytest.fixture
def quick(meanwhile) -> dict:
    return meanwhile()


@MEASURED
def test_everything_is_measured_and_kept_without_names_of_this_machine(quick):
    assert {
        "machine",
        "date",
        "torch",
        "threads",
        "read_bandwidth",
        "stack",
        "gammas",
        "bits",
        "steps",
        "waste",
        "latency",
        "parallel",
        "blocks",
        "session",
    } <= quick.keys()
    assert (
        "/" not in re.sub(r"8/4|tokens/s", "", json.dumps(quick)) and quick["read_bandwidth"] > 1e8
    )
    sections = report.sections(quick)
    assert [len(section.headers) for section in sections] == [
        len(section.rows[0]) for section in sections
    ]
    assert len(sections) == 7


def test_notes_name_what_does_not_do_what_it_claims():
    names = dict(speculation="speed", batching="speed and memory", bits="memory", base="")
    rows = lambda gain: [
        dict(name=f"+ {name}", claims=claims, gain=gain, drafted=1.0, draft_cost=0.1, in_flight=4)
        for name, claims in names.items()
    ]
    notes = [report.stack_notes(dict(stack=rows(gain))) for gain in (2.0, 1.0, 0.9)]
    assert [len(told) for told in notes] == [2, 4, 5]  # two are always there
    assert [told.split(":")[0] for told in notes[2][:3]] == ["speculation", "batching", "bits"]


@MEASURED
def test_the_combined_table_has_its_rows_in_order_and_exact_ones_say_the_same(quick):
    rows = quick["stack"]
    assert [row["name"] for row in rows] == [
        "one at a time, no cache",
        "+ KV cache",
        "+ INT8 keys and values",
        "+ speculation (tiny-draft)",
        "+ paged, continuous batching",
        "+ INT4 weights",
        "+ prefix sharing: all",
        "all, with INT8 weights",
    ]
    assert rows[1]["same_texts"] == rows[0]["texts"]  # a cache changes nothing
    assert rows[0]["cache_bytes"] == 0 and rows[1]["cache_bytes"] == 2 * 8 * 2 * 64 * 4 * 1024
    assert (
        rows[2]["cache_bytes"] < 0.27 * rows[1]["cache_bytes"]
        and rows[4]["cache_bytes"] < rows[3]["cache_bytes"]
    )
    assert rows[5]["weight_bytes"] < 0.4 * rows[4]["weight_bytes"] and rows[1]["speed_up"] > 1.2
    assert rows[0]["speed_up"] == rows[0]["gain"] == 1
    assert all(row["tokens_per_second"] > 0 and row["first_token"] > 0 for row in rows)


@MEASURED
def test_waste_and_latency_by_layout_and_chunk(quick):
    shares = [row["waste"] for row in quick["waste"]]
    assert shares == sorted(shares, reverse=True) and shares[0] > 0.4 and shares[-1] == 0
    assert all(
        row[f"{what}_p50"] <= row[f"{what}_p99"] <= row[f"{what}_p100"]
        for row in quick["latency"]
        for what in ("between", "first")
    )


def test_what_was_measured_before_stays(tmp_path, capsys):
    out = tmp_path / "one.json"
    out.write_text(json.dumps(dict(stack=[1], gpu=dict(kernels=dict(title="old")))))
    assert bench.main(["--gpu", "serving", "--quick", "--out", str(out)]) == 0
    kept = json.loads(out.read_text())
    assert kept["stack"] == [1] and kept["gpu"].keys() == {"kernels", "serving"}
    assert "Serving" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["--against", "nobody"], "the peers are transformers, llama.cpp"),
        (["--gpu", "decode"], "needs a GPU"),
        (["--gguf", "x"], "--gguf has no use but with"),
        (["--target", "x", "--gpu", "decode"], "--target has no use"),
        (["--readme", "--out", "x"], "--out has no use where"),
        (["--quick", "--out", ""], "--out is empty"),
        (["--gpu", "decode", "--data", "x"], "--data has no use"),
    ],
)
def test_what_cannot_be_is_one_line_with_the_way_out(arguments, told, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    try:
        assert bench.main(arguments) == 2
    except SystemExit as stop:  # of flags that do nothing together
        assert stop.code == 2
    error = capsys.readouterr().err
    assert told in error and error.startswith("error: ") and error.count("\n") == 1


def test_what_cannot_be_kept_or_read_is_refused_before_it_is_measured(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(bench, "everything", lambda *_: pytest.fail("measured first"))
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    for flag, path, told in [
        ("--out", tmp_path, "is not a file"),
        ("--out", "/dev/null", "/dev/null is not a file"),
        ("--out", tmp_path / "no" / "x", "cannot be written"),
        ("--out", tmp_path / "list.json", "holds no results of a run"),
        ("--out", tmp_path / "deep.json", "is not JSON"),
        ("--data", tmp_path, "is not a file that is there"),
    ]:
        assert bench.main([flag, str(path)]) == 2
        out, error = capsys.readouterr()
        assert (out, error.count("\n")) == ("", 1) and error.startswith("error: ") and told in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep.json", "list.json"]


def quick_case(name: str) -> dict:
    return gpucases.run_case(name, quick=True)["gpu"][name]


@pytest.mark.parametrize("name", gpucases.CASES)
@pytest.mark.meanwhile(quick_case, "parallel")  # whose processes take seconds to begin
def test_each_gpu_case_runs_with_toy_shapes_and_fills_its_columns(name, monkeypatch, meanwhile):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    case = meanwhile() if name == "parallel" else quick_case(name)
    assert (
        case["rows"]
        and {len(row) for row in case["rows"]} == {len(case["headers"])}
        and case["read_bandwidth"] > 0
    )


@MEASURED
def test_pictures_and_readme_are_made_of_the_results_that_the_readme_names(
    tmp_path, monkeypatch, quick
):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "m.json").write_text(json.dumps(quick))
    (readme := tmp_path / "README.md").write_text(
        "before\n<!-- figures of results/m.json: waste gammas -->\noutdated\n<!-- end of figures -->\nafter\n"
    )
    number = '[0](results/m.json "waste; rows of 1024; waste:.1%")'
    (tour := tmp_path / "TOUR.md").write_text(f"it wastes {number}, not [1](elsewhere)")
    monkeypatch.setattr(bench, "HERE", tmp_path)
    monkeypatch.setattr(bench, "DOCUMENTS", [readme, tour])
    assert bench.main(["--readme"]) == 0
    drawn = {path.stem for path in Path(tmp_path / "results").glob("*.svg")}
    assert drawn == bench.pictures.PICTURES.keys() - {"peers"}
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and text.count("**") == 2 * 2
    assert "outdated" not in text and quick["machine"] in text
    assert (
        tour.read_text()
        == f"it wastes {number.replace('0', format(quick['waste'][0]['waste'], '.1%'), 1)}, not [1](elsewhere)"
    )
    tour.write_text(number.replace("rows of 1024", "rows of 3"))
    assert bench.main(["--readme"]) == 2
    readme.write_text("nothing is named here")
    assert bench.main(["--readme"]) == 2
