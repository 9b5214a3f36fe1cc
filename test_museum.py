"""Every bug of the museum is caught; a bug that nobody sees, or that cannot be planted, is told."""

import os
import subprocess
import sys

import pytest

import museum
from museum import ROOMS, Exhibit, planted
from sampling import draft_role
from testing.pages import ROOT


@pytest.mark.slow
def test_every_bug_is_caught(capsys):
    exhibits = sum(ROOMS.values(), [])
    assert len(exhibits) >= 30
    assert len({(exhibit.source, exhibit.bug) for exhibit in exhibits}) == len(exhibits)
    museum.main()
    told = capsys.readouterr().out
    assert told.count("\n      caught ") >= 30 and "NOT CAUGHT" not in told


def test_a_bug_that_nobody_sees_is_told(capsys, monkeypatch):
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
