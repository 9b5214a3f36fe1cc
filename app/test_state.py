"""Pictures of a batch: each block has one letter, a text is in one state, and nothing changes."""

import copy
import json
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app import state
from app.state import KINDS, snapshot
from generate import Engine
from loading import Model, load_draft
from request import Request, Settings
from settings import Options

PAGE = Path(state.__file__).with_name("page.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.load("tiny", "cpu")


def requests(model: Model, lengths: list[int], max_tokens: int) -> list[Request]:
    """Texts that begin alike, in groups."""
    made = []
    for seed, length in enumerate(lengths):
        prompt = [1] + [10 + seed % 2] * length
        made.append(Request(prompt, Settings(0.9, seed=seed, max_tokens=max_tokens, gamma=2)))
    return made


def check_picture(engine: Engine, picture: dict) -> None:
    """Every block in one class, as the pool itself counts; every text in one state."""
    cache = engine.caches[0]
    told = picture["cache"]
    free, idle, live = cache.check()
    counts = told["counts"]
    assert (counts["free"], counts["cached"]) == (free, idle)
    assert counts["shared"] + counts["text"] == live
    assert sum(counts.values()) == told["total"] == len(told["blocks"]) == cache.pool.total
    assert Counter(told["blocks"]) == Counter({KINDS[kind]: n for kind, n in counts.items() if n})
    owners = Counter(block for row in picture["requests"] for block in row["blocks"])
    for block, letter in enumerate(told["blocks"]):
        assert (letter == "s") == (owners[block] > 1)
        assert (letter == "t") == (owners[block] == 1)
    for row in picture["requests"]:
        has_blocks = row["state"] in ("reading", "writing")
        assert bool(row["blocks"]) <= has_blocks
        if row["state"] == "writing":
            assert row["stored"] == row["prompt_tokens"] + row["tokens"] - 1
    assert picture["running"] + picture["waiting"] == len(picture["requests"])


@given(lengths=st.lists(st.integers(1, 90), min_size=1, max_size=9), memory=st.integers(9, 40))
def test_each_block_has_one_letter_in_every_step(model, lengths, memory):
    """A pool so small that texts wait, share, are preempted, and leave cached blocks."""
    engine = Engine(
        model, load_draft("ngram", model), Options(max_len=140, max_batch=4), tokens=16 * memory
    )
    for request in requests(model, lengths, 20):
        engine.batcher.add(request)
    states = Counter()
    while engine.batcher.running or engine.batcher.waiting:
        before = copy.deepcopy(engine.caches[0].pool.__dict__ | {"_next_hash": None})
        picture = json.loads(json.dumps(snapshot(engine.batcher, 0)))
        assert before == engine.caches[0].pool.__dict__ | {"_next_hash": None}
        check_picture(engine, picture)
        states.update(row["state"] for row in picture["requests"])
        engine.batcher.step()
    assert states["waiting"]
    check_picture(engine, snapshot(engine.batcher, 0))


def test_a_batch_with_every_state_and_every_class(model):
    engine = Engine(model, None, Options(max_len=300, max_batch=3), tokens=16 * 30)
    engine.runner.budget = 20
    made = requests(model, [40, 40, 40, 100, 5], 30)
    made[2].sibling = made[0]
    for request in made:
        engine.batcher.add(request)
    seen = set()
    letters = set()
    while engine.batcher.running or engine.batcher.waiting:
        if engine.batcher.num_steps == 8:
            engine.batcher._preempt(engine.batcher.running[-1])
        picture = snapshot(engine.batcher, 0)
        check_picture(engine, picture)
        seen |= {row["state"] for row in picture["requests"]}
        letters |= set(picture["cache"]["blocks"])
        engine.batcher.step()
    assert seen == {"waiting", "reading", "writing", "preempted"}
    assert letters == set("fcst")
    assert snapshot(engine.batcher, 0)["requests"] == []


def test_a_text_keeps_its_number_and_no_number_comes_again(model):
    engine = Engine(model, None, Options(max_len=64, max_batch=2), tokens=1000)
    numbers = set()
    for seed in range(4):
        pair = requests(model, [5, 9], 6)
        for request in pair:
            engine.batcher.add(request)
        seen = set()
        while engine.batcher.running or engine.batcher.waiting:
            rows = snapshot(engine.batcher, 0)["requests"]
            seen.add(tuple(row["number"] for row in rows))
            engine.batcher.step()
        assert len(seen) == 1 and not numbers & {*seen}
        numbers |= seen
    assert numbers == {(1, 2), (3, 4), (5, 6), (7, 8)}


def test_speculation_is_that_of_the_runner(model):
    engine = Engine(
        model, load_draft("tiny-draft", model), Options(max_len=100, max_batch=4), tokens=2000
    )
    for request in requests(model, [9, 5, 30], 25):
        engine.batcher.add(request)
    for _ in range(4):
        engine.batcher.step()
    picture = snapshot(engine.batcher, 77)
    assert picture["num_tokens"] == 77
    assert 0 <= picture["acceptance"] == engine.runner.drafter.acceptance.alpha != 0.7
    assert [row["drafts"] for row in picture["requests"]] == [2, 2, 2]
    plain = Engine(model, None, Options(max_len=100, max_batch=1), tokens=200).batcher
    assert snapshot(plain, 0)["acceptance"] is None


def test_a_long_queue_and_a_large_pool_are_cut_but_counted(model, monkeypatch):
    monkeypatch.setattr(state, "MAX_WAITING", 2)
    monkeypatch.setattr(state, "MAX_BLOCKS", 5)
    engine = Engine(model, None, Options(max_len=100, max_batch=1), tokens=2000)
    for request in requests(model, [5] * 6, 5):
        engine.batcher.add(request)
    engine.batcher.step()
    picture = snapshot(engine.batcher, 0)
    assert [row["state"] for row in picture["requests"]] == ["writing", "waiting", "waiting"]
    assert (picture["running"], picture["waiting"]) == (1, 5)
    assert len(picture["cache"]["blocks"]) == 5
    assert sum(picture["cache"]["counts"].values()) == engine.caches[0].pool.total


def test_other_caches_say_what_they_are(model):
    engine = Engine(model, None, Options(max_len=64, max_batch=2, kv="contiguous"), tokens=200)
    made = requests(model, [5, 9], 5)
    for request in made:
        engine.batcher.add(request)
    engine.batcher.step()
    picture = snapshot(engine.batcher, 0)
    assert picture["cache"] == {"kind": "contiguous", "row_tokens": 64}
    rows = [row["blocks"] for row in picture["requests"]]
    assert sorted(rows) == [[0], [1]]


# ---- The page


def test_the_page_reads_only_what_a_picture_has(model):
    engine = Engine(model, None, Options(max_len=64, max_batch=1), tokens=200)
    engine.batcher.add(requests(model, [5], 5)[0])
    engine.batcher.step()
    picture = snapshot(engine.batcher, 0)
    contiguous = state.cache_state(
        Engine(model, None, Options(max_len=64, max_batch=1, kv="contiguous"), tokens=0).caches[0]
    )
    script = PAGE[PAGE.index("// ---- The batch -") :]
    fields = {
        "picture": picture,
        "text": picture["requests"][0],
        "cache": picture["cache"] | contiguous,
        "counts": picture["cache"]["counts"],
    }
    for name, has in fields.items():
        read = set(re.findall(rf"\b{name}\.(\w+)", script))
        assert read and read <= has.keys(), name


def test_the_page_has_its_elements_and_names_no_other_host():
    used = set(re.findall(r"\$\(\"([\w-]+)\"\)", PAGE))
    assert used and all(PAGE.count(f'id="{name}"') == 1 for name in used)
    assert "://" not in PAGE and "connect-src 'self'" in PAGE
    assert not re.search(r"<(script|link|img|iframe)[^>]+src=", PAGE)
    for field in re.findall(r"<(?:input|textarea)[^>]* id=\"([\w-]+)\"", PAGE):
        label = re.search(rf'<label[^>]*>[^<]+\s*<[^>]* id="{field}"|for="{field}"', PAGE)
        assert label, f"{field} has no label"
