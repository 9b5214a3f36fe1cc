"""Tables and pictures: numbers as they are in the results, and nothing outside of a picture."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from measure import pictures, report

STACK = {
    f"{target}, row {i}": {
        "target": target,
        "name": f"row {i}",
        "tokens_per_second": 10.0 * ratio,
        "first_token": 0.1,
        "cache_bytes": i * 10**6,
        "weight_bytes": 10**7,
        "speed_up": ratio,
        "gain": gain,
        "same_texts": 4,
        "texts": 4,
    }
    for target in ("a <model>", "another")
    for i, (ratio, gain) in enumerate([(1.0, 1.0), (8.0, 8.0), (4.0, 0.5), (40.0, 10.0)])
}
INVARIANCE = {
    f"a <model>, {program}": {
        "target": "a <model>",
        "program": program,
        "requests": 32,
        "varying": varying,
        "outputs": 32 + varying,
    }
    for program, varying in (("peer", 16), ("other", 4), ("this program", 0))
}
DRAFTS = {
    f"{target} {gamma} {temperature}": {
        "target": target,
        "draft": "ngram",
        "temperature": temperature,
        "gamma": gamma,
        "tokens_per_round": 2.5,
        "speed_up": up,
    }
    for target in ("tiny, float32", "tiny, INT8")
    for temperature in (0.0, 1.0)
    for gamma, up in (("2", 0.9), ("4", 1.4), ("auto: 3.1", 1.2))
}
BITS = [
    {"weights": name, "kv": kv, "bytes": size, "perplexity": 8.0, "loss": loss, "tokens": 9}
    for name, kv, size, loss in (
        ("16 bits", "16", 10**9, 0.0),
        ("16 bits", "8", 10**9, 0.01),
        ("INT8 gptq", "16", 5 * 10**8, -0.001),
        ("INT4 rtn, groups of 128", "16", 3 * 10**8, 0.125),
    )
]
PEERS = {
    f"{target} {ours} {peer}": {
        "target": target,
        "ours": ours,
        "peer": peer,
        "tokens_per_second": 9.0,
        "peer_tokens_per_second": 4.0,
        "ratio": 2.25,
    }
    for target in ("a <model>", "another")
    for ours in ("INT8", "float32", "bfloat16")
    for peer in ("transformers float32", "transformers bfloat16", "llama.cpp q8_0")
}
RESULTS = {"stack": STACK, "drafts": DRAFTS, "bits": BITS, "invariance": INVARIANCE, "peers": PEERS}


# ---- Tables


def test_in_brief_each_width_stands_beside_its_own():
    """Of one model, and a row for each width, the widest first."""
    (section,) = report.sections(RESULTS, ["brief"])
    assert [row[:2] for row in section.rows] == [
        ["float32", "transformers float32"],
        ["bfloat16", "transformers bfloat16"],
        ["INT8", "llama.cpp q8_0"],
    ]
    assert len(report.sections(RESULTS)) == len(RESULTS)


def test_a_cell_is_filled_in_its_format_or_empty():
    row = {"a": 0.0123, "b": 2_500_000, "c": 1.5, "d": None}
    assert report.fill_template("{a:seconds}, {b:bytes}, {c:ratio}", row) == "12.3 ms, 2.5 MB, 1.5x"
    assert report.fill_template("{a:.1%} of {c}", row) == "1.2% of 1.5"
    assert report.fill_template("{a}, {d:ratio}", row) == report.fill_template("{e}", row) == ""
    sizes = [report.format_bytes(n) for n in (0, 12, 4096, 3.2e9)]
    assert sizes == ["0", "12 B", "4.1 kB", "3.2 GB"]


def test_sections_are_in_reading_order_and_those_that_are_named():
    results = RESULTS | {"gpu": {"decode": {"title": "d", "headers": ["a"], "rows": [["1"]]}}}
    titles = [section.title.split()[0] for section in report.sections(results)]
    assert titles == ["One", "Drafts,", "Perplexity", "The", "Against", "d"]
    assert [section.title for section in report.sections(results, ["decode"])] == ["d"]
    (table,) = report.sections(results, ["stack"])
    columns = dict(zip(table.headers, zip(*table.rows)))
    assert columns["times the row before"] == ("1x", "8x", "0.5x", "10x") * 2
    assert columns["KV cache"] == ("0", "1 MB", "2 MB", "3 MB") * 2
    lines = report.markdown(table).split("\n")
    assert lines[2].startswith("| model | requests |  | tokens/s |")
    assert {line.count("|") for line in lines[2:12]} == {len(table.headers) + 1}


def test_a_document_gets_the_tables_that_it_names():
    machine = {"machine": "M", "instructions": "avx2", "threads": 2, "torch": "2", "date": "today"}
    results = RESULTS | machine | {"read_bandwidth": 2e10}
    marks = (
        "before\n<!-- figures of results/m.json: drafts -->\nold\n<!-- end of figures -->\nafter"
    )
    made = report.with_tables(marks, {Path("results/m.json"): results}.__getitem__)
    assert made.startswith("before\n") and made.endswith("<!-- end of figures -->\nafter")
    assert "old" not in made and made.count("**") == 2
    assert "M (avx2), 2 threads, torch 2, today; bandwidth of its last run: 20 GB/s" in made
    assert "| tiny, INT8 | ngram | 0 | auto: 3.1 | 2.50 | 1.2x |" in made
    assert report.with_tables(made, {Path("results/m.json"): results}.__getitem__) == made


def test_every_machine_has_a_row_and_what_it_lacks_is_empty():
    machine = {"machine": "M", "instructions": "avx2", "threads": 2, "read_bandwidth": 2e10}
    steps = {"tiny, INT8": {"rows1_seconds": 0.001, "prompt512_seconds": 0.02}}
    made = report.with_machines(
        "<!-- machines -->\nold\n<!-- end of machines -->",
        [machine | {"steps": steps}, machine | {"machine": "N", "stack": STACK, "drafts": DRAFTS}],
    )
    assert "| M | avx2 | 2 | 20 GB/s | 1,000 |  | 20 ms |" in made
    assert "| N | avx2 | 2 | 20 GB/s |  | 400 |  |" in made and "old" not in made


# ---- Pictures


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_is_well_formed_and_stays_on_its_sheet(name):
    picture = pictures.draw_all(RESULTS)[name]
    assert picture == pictures.draw_all(json.loads(json.dumps(RESULTS)))[name]
    root, *parts = ElementTree.fromstring(picture).iter()
    width = float(root.attrib["width"])
    height = float(root.attrib["height"])
    for part in parts:
        x = float(part.attrib.get("x", 0))
        y = float(part.attrib.get("y", 0))
        if part.tag.endswith("rect"):
            assert 0 <= x and x + float(part.attrib["width"]) <= width
            assert 0 <= y and y + float(part.attrib["height"]) <= height
        else:
            size = 0.6 * float(part.attrib.get("font-size", 12)) * len(part.text or "")
            left = x - size if part.attrib.get("text-anchor") == "end" else x
            assert 0 <= left and left + size <= width and 0 < y < height, part.text


def bars(name: str) -> list[float]:
    """The widths of a picture's bars."""
    parts = ElementTree.fromstring(pictures.draw_all(RESULTS)[name]).iter()
    return [float(part.attrib["width"]) for part in parts if part.attrib.get("height") == "18"]


def test_bars_are_as_long_as_the_numbers_say():
    first, second, third, fourth = bars("stack")  # of the first model
    assert fourth == pictures.LONGEST == pytest.approx(40 * first, abs=2.1)
    assert second == pytest.approx(2 * third, abs=0.2)
    low, high, middle = bars("drafts")  # of float32 at temperature 1
    assert high == pictures.LONGEST and low == pytest.approx(high * 0.9 / 1.4, abs=0.1)
    assert bars("bits") == [1.0, pytest.approx(20.0), 1.0, pictures.LONGEST]
    assert bars("invariance") == [pictures.LONGEST, pictures.LONGEST / 4, 1.0]
    assert len(bars("peers")) == 3  # of the first model, and of about as many bytes on both sides


def test_what_was_not_measured_is_not_drawn():
    assert pictures.draw_all({"drafts": DRAFTS}).keys() == {"drafts"}
