"""Exercises: a copy lacks one body and nothing else, and its judges tell a right body from none."""

import ast
import resource
from pathlib import Path

import pytest

from exercise import BLANK, EXERCISES, NAMED, Exercise, blanked, exercise_flags, run
from exercise import FOLDERS as COPIED
from testing.pages import FOLDERS, ROOT, tree
from testing.programs import program

each = pytest.mark.parametrize("exercise", EXERCISES, ids=NAMED)


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def test_there_are_a_dozen_in_the_order_of_reading():
    tour = read(ROOT / "TOUR.md")
    assert len(NAMED) == len(EXERCISES) == 12
    places = [tour.index(f"`python exercise.py {name}`") for name in NAMED]
    assert places == sorted(places)


@each
def test_a_body_is_missing_and_nothing_else(exercise):
    """Signature, docstring and comments at the head stay; so does every other line."""
    text = read(ROOT / exercise.page)
    before = text.split("\n")
    after = blanked(text, exercise.function).split("\n")
    (place,) = [i for i, line in enumerate(after) if line.strip() == BLANK]
    num_rest = len(after) - place - 1
    assert after[:place] == before[:place]
    assert after[place + 1 :] == before[len(before) - num_rest :]
    (left,) = find(after, exercise.function)
    (whole,) = find(before, exercise.function)
    assert [type(node) for node in left.body] == [ast.Expr, ast.Raise]
    assert ast.get_docstring(left) == ast.get_docstring(whole)
    removed = before[place : len(before) - num_rest]
    assert len(removed) == whole.end_lineno - whole.body[1].lineno + 1 >= 2


def find(lines: list[str], function: str) -> list[ast.FunctionDef]:
    """The functions of this name, but for those of classes where a page has one of its own."""
    parsed = ast.parse("\n".join(lines))
    own = [node for node in parsed.body if getattr(node, "name", "") == function]
    return own or [node for node in ast.walk(parsed) if getattr(node, "name", "") == function]


@each
def test_judges_are_tests_that_exist(exercise):
    for judge in exercise.tests:
        file, *names = judge.split("::")
        tests = [node.name for node in tree(ROOT / file).body if hasattr(node, "name")]
        assert {*names} <= {*tests}, judge


def test_a_copy_has_code_and_models_alone(tmp_path):
    assert {*FOLDERS} - {""} <= {*COPIED}
    copy = tmp_path / "copy"
    made = program("exercise.py", "couple", copy)
    assert made.returncode == 0 and f"{copy} --check" in made.stdout
    assert all(judge in made.stdout for judge in NAMED["couple"].tests)
    assert BLANK in read(copy / "speculative.py")
    there = {path.name for path in copy.iterdir()}
    assert there <= {*COPIED, "pyproject.toml", "edits.json"} | {
        path.name for path in ROOT.glob("*.py")
    }
    assert not [*copy.rglob("__pycache__")]
    assert (copy / "models" / "tiny" / "config.json").is_file()


@pytest.mark.parametrize(
    "words, told",
    [
        ("verfy", "did you mean verify?): there are plain_loop, "),
        ("verify .", "exists: remove it, or put another FOLDER after NAME"),
        ("verify --check test_data", "test_data is no copy: python exercise.py verify test_data"),
        ("--check", "--check has no use without NAME"),
        ("verify --chek", "unrecognized arguments: --chek"),
        ("verify a b", "unrecognized arguments: b"),
    ],
)
def test_a_mistake_is_one_line(words, told):
    done = program("exercise.py", *words.split())
    assert done.returncode == 2 and done.stdout == ""
    assert told in done.stderr and done.stderr.count("\n") == 1


def test_without_a_name_all_are_listed():
    lines = program("exercise.py").stdout.splitlines()
    assert [line.split()[0] for line in lines[2:]] == [*NAMED]
    assert exercise_flags(["verify", "--check", "x"]) == exercise_flags(["verify", "x", "--check"])


def test_judges_run_without_the_backends(monkeypatch):
    asked = {}
    monkeypatch.setattr("subprocess.call", lambda command, **how: asked.update(how))
    assert run(exercise_flags(["verify", str(ROOT), "--check"])) == 0
    assert asked["env"]["LLAMA_PLAIN"] == "1" and asked["cwd"] == ROOT


@pytest.mark.slow
@each
def test_no_body_is_wrong_and_the_original_is_right(exercise: Exercise, tmp_path):
    copy = tmp_path / "copy"
    program("exercise.py", exercise.function, copy)
    blank = program("exercise.py", exercise.function, "--check", copy)
    assert (blank.returncode, blank.stdout.splitlines()[-1].split(":")[0]) == (1, "not yet")
    assert "your turn" in blank.stdout
    (copy / exercise.page).write_text(read(ROOT / exercise.page), encoding="utf-8")
    start = child_seconds()
    whole = program("exercise.py", exercise.function, "--check", copy)
    assert (whole.returncode, whole.stdout.splitlines()[-1]) == (0, "right"), whole.stdout
    assert child_seconds() - start < 20


def child_seconds() -> float:
    """A processor's seconds for the programs that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
