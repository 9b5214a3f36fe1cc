"""Pictures: well-formed, inside their sheet, the same bytes for the same results, and where the numbers say."""

import json
import xml.etree.ElementTree as ElementTree

import pytest

from measure import pictures

STACK = [
    dict(
        name=f"row {i}",
        claims="speed",
        tokens_per_second=10.0 * r,
        first_token=0.1,
        cache_bytes=i * 10**6,
        in_flight=1,
        weight_bytes=10**7,
        speed_up=r,
        gain=1.0,
        same_texts=4,
        texts=4,
        drafted=0.0,
    )
    for i, r in enumerate((1.0, 8.0, 4.0, 40.0))
]
GAMMAS = [
    dict(gamma=gamma, acceptance=0.7, speed_up=up, formula=1.1 * up, formula_flat=1.5 * up)
    for gamma, up in ((1, 0.9), (4, 1.4), (8, 1.1), (None, 1.2))
]
BITS = [
    dict(weights=name, kv=kv, bytes=size, perplexity=loss)
    for name, kv, size, loss in (
        ("16 bits", "16", 10**9, 8.0),
        ("16 bits", "8", 10**9, 8.1),
        ("INT8 gptq", "16", 5 * 10**8, 7.99),
        ("INT4 rtn, groups of 128", "16", 3 * 10**8, 9.0),
    )
]
PEERS = {
    f"{code} {ours} {peer}": dict(
        target="a model",
        code=code,
        ours=ours,
        peer=peer,
        tokens_per_second=9.0,
        peer_tokens_per_second=4.0,
    )
    for code in ("its own", "AVX2")
    for ours in ("float32", "INT8 in float32")
    for peer in ("transformers float32", "llama.cpp q8_0")
}
SESSION = dict(
    command="python generate.py",
    prompt="Once upon",
    told=["9 tokens " * 20],
    pieces=[
        [" a time" * 3, origin, 0.1 * i]
        for i, origin in enumerate(("accepted", "corrected", "bonus", "plain") * 9)
    ]
    + [["\n<end>", "bonus", 4.0]],
)
RESULTS = dict(
    stack=STACK,
    blocks=[dict(what="a & b <read>", row="**ab░·" + 34 * "·")],
    gammas=GAMMAS,
    bits=BITS,
    peers=PEERS,
    session=[SESSION],
)


def elements(svg: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(svg).iter())


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_is_well_formed_and_stays_on_its_sheet(name):
    svg = pictures.draw_all(RESULTS)[name]
    assert svg == pictures.draw_all(json.loads(json.dumps(RESULTS)))[name]
    root, *parts = elements(svg)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for part in parts:
        kind, at = part.tag.split("}")[1], part.attrib
        if kind == "rect" and "x" in at:
            assert float(at["x"]) >= 0 and float(at["x"]) + float(at["width"]) <= width
            assert float(at["y"]) + float(at["height"]) <= height
        if kind == "text":
            room = float(at.get("textLength", 0.62 * float(at["font-size"]) * len(part.text)))
            left = float(at["x"]) - {"start": 0, "middle": room / 2, "end": room}[at["text-anchor"]]
            assert left >= 0 and left + room <= width and 0 < float(at["y"]) < height, part.text


def test_a_bar_of_the_waterfall_begins_where_the_one_before_ended():
    bars = [
        part.attrib
        for part in elements(pictures.draw_stack(RESULTS))
        if part.attrib.get("rx") == "2"
    ]
    ends = [(float(bar["x"]), float(bar["x"]) + float(bar["width"])) for bar in bars]
    (_, first), (start, end), (low, high), (_, last) = ends
    assert high == pytest.approx(end, abs=0.2) and low > start and last > end
    assert [bar["fill"] for bar in bars] == [
        pictures.PALE,
        pictures.GOOD,
        pictures.BAD,
        pictures.GOOD,
    ]


def test_a_terminal_shows_all_that_was_written_in_order_each_piece_in_its_color():
    texts = [
        part
        for part in elements(pictures.draw_session(RESULTS))
        if part.attrib.get("class") == "new"
    ]
    command, prompt, *pieces, end = texts[: -len(SESSION["told"][0]) // 80 - 1]
    written = "".join(part.text for part in pieces).replace(" ", "")
    assert (
        written.startswith("atimeatimeatime")
        and prompt.text == "Once upon"
        and "generate.py" in command.text
    )
    assert {part.attrib["fill"] for part in pieces} == {*pictures.ORIGINS.values(), pictures.PAPER}
    begins = [float(part.attrib["style"].split(":")[1].removesuffix("s")) for part in texts]
    assert begins == sorted(begins) and begins[-1] == pictures.SLOW


def test_nothing_to_draw_is_said():
    with pytest.raises(ValueError, match="run python bench.py first"):
        pictures.draw_all({})
