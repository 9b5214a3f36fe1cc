"""Every bug of the museum is caught. If one is not, or cannot be planted, that is an error."""

import os
import subprocess
import sys

import pytest

import museum
from kvcache import AttentionMetadata, Store
from museum import ROOMS, Exhibit, planted
from paged import PagedCache
from request import OutputStream, StopStrings
from runner import ModelRunner
from sampling import draft_role, keep_top, token_logprobs
from testing.pages import ROOT

MORE = {  # a bug and its issue -> the function, a piece of it, what is planted there, the check
    "top-p drops the token that reaches p (ggml-org/llama.cpp#1953)": (
        keep_top,
        "mass_before < top_p * total",
        "mass <= top_p * total",
        museum.distribution_by_enumeration,
    ),
    "a preempted request starts at 0 despite its prefix (GeeeekExplorer/nano-vllm#211)": (
        ModelRunner.schedule,
        "start = self.cache.length(request.seq)",
        "start = 0 if request.num_preemptions else self.cache.length(request.seq)",
        museum.texts_alone_and_together,
    ),
    "a block's key leaves out its last token (kekzl/imp#1301)": (
        PagedCache._block_key,
        "(i + 1) * S + self.lookahead",
        "(i + 1) * S + self.lookahead - 1",
        museum.texts_alone_and_together,
    ),
    "every request reads the blocks of the first (ml-explore/mlx#4431)": (
        AttentionMetadata.slots.func,
        "self.block_tables.long()",
        "self.block_tables[:1].expand_as(self.block_tables).long()",
        museum.texts_alone_and_together,
    ),
    "strides do not fit the memory (vllm-project/vllm#49716)": (
        Store.read,
        "part[layer].flatten(0, 1)",
        "part[layer].transpose(0, 1).flatten(0, 1)",
        museum.stored_is_read,
    ),
    "logprobs are 0 (ggml-org/llama.cpp#27972)": (
        token_logprobs,
        "rows.double().log_softmax(-1)",
        "torch.zeros_like(rows)",
        museum.texts_alone_and_together,
    ),
    "logprobs go on after a stop string (vllm-project/vllm#47616)": (
        OutputStream.finish,
        "self.request.logprobs[: len(result.tokens)]",
        "self.request.logprobs",
        museum.streams_by_hand,
    ),
    "the start of a stop string is shown twice (ggml-org/llama.cpp#10914)": (
        StopStrings.feed,
        "return text[: len(text) - num_held]",
        "return text",
        museum.streams_by_hand,
    ),
}


@pytest.mark.slow
def test_every_bug_is_caught(capsys):
    exhibits = sum(ROOMS.values(), [])
    assert len(exhibits) == 21
    assert len({(exhibit.source, exhibit.bug) for exhibit in exhibits}) == len(exhibits)
    museum.main()
    told = capsys.readouterr().out
    assert told.count("\n      caught ") >= 19 and "NOT CAUGHT" not in told


def test_more_bugs_are_caught():
    for check in {check for *_, check in MORE.values()}:
        assert check(), check.__name__
    for bug, (function, right, wrong, check) in MORE.items():
        with planted(function, right, wrong):
            assert museum.verdict(check), bug


def test_a_bug_that_is_not_caught_is_an_error(capsys, monkeypatch):
    same = dict(right="2 * j + 1", wrong="1 + 2 * j")
    harmless = Exhibit("a", "b", "c", function=draft_role, **same, seen_by=lambda: True)
    caught = harmless._replace(wrong="3 * j", seen_by=lambda: draft_role(2) == 5)
    monkeypatch.setattr(museum, "ROOMS", {"Room": [harmless, caught]})
    with pytest.raises(SystemExit, match="^1$"):
        museum.main()
    assert "NOT CAUGHT" in capsys.readouterr().out
    broken = harmless._replace(seen_by=lambda: False)
    with pytest.raises(SystemExit, match="fails without a bug"):
        museum.visit(broken)


def test_a_bug_is_planted_once_and_taken_away():
    with planted(draft_role, "2 * j", "3 * j"):
        assert draft_role(2) == 7
    assert draft_role(2) == 5
    for right in ("4 * j", "j"):  # not there; there twice
        with pytest.raises(LookupError, match="draft_role"), planted(draft_role, right, "0"):
            pass


@pytest.mark.slow
def test_a_reader_that_leaves_and_a_terminal_without_unicode_are_no_bugs():
    """museum.py is a program: its first line reaches `head -1`, and there is no traceback."""
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} museum.py | head -2"],
        cwd=ROOT,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "\nSpeculation\n" and done.stderr == ""
