"""Templates are strangers' programs: each bound is told by name, and the next text is right."""

import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from checkpoint import sandbox
from checkpoint.sandbox import LONGEST, MEMORY, Renderer
from conftest import ROOT

NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
TWICE = "{% macro a(n) %}{% if n %}{{ a(n - 1) }}{{ a(n - 1) }}{% endif %}{% endmacro %}{{ a(60) }}"


@pytest.mark.slow
def test_each_bound_is_told_by_name_and_the_next_text_is_right(monkeypatch):
    shared = sandbox.renderer()
    monkeypatch.setattr(sandbox, "SECONDS", 60)  # a busy machine is slow to give so much memory
    assert shared.render(f"{{{{ 'é' * {LONGEST} }}}}", {}) == ["é" * LONGEST, ""]
    assert shared.render(f"{{{{ ('x' * ({MEMORY} // 2)) | length }}}}", {}) == [
        f"{MEMORY // 2}",
        "",
    ]
    monkeypatch.setattr(sandbox, "SECONDS", 0.2)
    for source, says in (
        ("{{ 'x' * 10**10 }}", "MiB of memory"),
        ("{{ 'x' | center(10**10) }}", "MiB of memory"),
        ("{{ '%10000000000d' % 1 }}", "MiB of memory"),
        (f"{{{{ [1] * ({MEMORY} // 8) }}}}", "MiB of memory"),
        (NESTED, "it computes for more than 0.2 s"),
        (TWICE, "it computes for more than 0.2 s"),
        ("{{ 10 ** (10 ** 8) // 3 }}", "it computes for more than 0.2 s"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "RecursionError"),
        (f"{{{{ 'x' * {LONGEST + 1} }}}}", f"{LONGEST + 1:,} characters; at most {LONGEST:,}"),
        (f"{{{{ raise_exception('x' * {LONGEST + 1}) }}}}", "TemplateError: xxx"),
        ("{% for i in range(100001) %}{% endfor %}", "OverflowError: Range too big"),
    ):
        text, problem = shared.render(source, {})
        assert says in problem[:100] and len(problem) <= LONGEST and text == "", source
        assert shared.render("{{ a }}b", {"a": 1}) == ["1b", ""]


def test_texts_of_several_threads_are_each_their_own():
    shared = sandbox.renderer()
    source = "{% for i in range(30000) %}{% endfor %}{{ n }}"
    with ThreadPoolExecutor(8) as threads:
        texts = threads.map(lambda n: shared.render(source, {"n": n}), range(24))
        assert [*texts] == [[f"{n}", ""] for n in range(24)]


def test_reading_a_long_request_counts_for_no_text(monkeypatch):
    shared = sandbox.renderer()
    monkeypatch.setattr(sandbox, "SECONDS", 0.02)
    assert shared.render("a", {}) == ["a", ""]
    monkeypatch.setattr(sandbox, "SECONDS", 2.0)
    assert shared.render("{{ a | length }}", {"a": "é" * 2**23}) == [f"{2**23}", ""]


def test_surrogates_are_kept():
    """In JSON two of them may be one character; those that chat.py uses never are."""
    text = "\udc00\udc01é😀\udfff"
    assert sandbox.renderer().render("{{ a }}", {"a": text}) == [text, ""]


def test_a_child_that_is_ended_by_others_is_replaced(monkeypatch):
    alone = Renderer()
    alone._child.kill()
    alone._child.wait()
    assert alone.render("a", {}) == ["a", ""]
    with ThreadPoolExecutor(1) as thread:
        endless = thread.submit(alone.render, NESTED, {})
        time.sleep(0.1)
        alone._child.kill()
        assert endless.result() == ("", "its process ended with status -9")
    assert alone.render("b", {}) == ["b", ""]
    alone._end()


PROGRAM = f"""
import os, signal, sys, threading, time
sys.path.append({str(ROOT)!r})
from checkpoint.sandbox import renderer
os.setpgrp()
signal.signal(signal.SIGINT, signal.default_int_handler)
def interrupted(wait):
    threading.Timer(0.2, os.killpg, (0, signal.SIGINT)).start()
    try:
        wait()
    except KeyboardInterrupt:
        return renderer()._child.pid
pid = renderer()._child.pid
renderer().render("", {{}})
assert interrupted(lambda: time.sleep(9)) == pid
assert renderer().render("a", {{}}) == ["a", ""] and renderer()._child.pid == pid
assert interrupted(lambda: renderer().render({NESTED!r}, {{}}))
assert renderer().render("b", {{}}) == ["b", ""]
print(pid, renderer()._child.pid)
sys.stdout.flush()
if sys.argv[1] == "killed":
    os.kill(0, signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["ends", "killed"])
def test_a_child_outlives_ctrl_c_but_not_its_parent(end, tmp_path):
    """The project is a library here, of a program in another folder."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, end],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == (-signal.SIGKILL if end == "killed" else 0), done.stderr
    children = [Path("/proc", pid) for pid in done.stdout.split()]
    assert len(children) == 2
    until = time.monotonic() + (10 if end == "killed" else 0)
    while any(child.exists() for child in children):
        assert time.monotonic() < until, "a child is left"
        time.sleep(0.02)
