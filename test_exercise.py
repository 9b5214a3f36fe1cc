"""Exercises: a copy lacks one body and nothing else, and its judges tell a right body from none."""

import ast
from pathlib import Path

import pytest

from conftest import TIMES
from exercise import BLANK, EXERCISES, NAMED, blanked, copy_project, exercise_flags, run
from testing.pages import PAGES, ROOT, tree
from testing.programs import program

each = pytest.mark.parametrize("exercise", EXERCISES, ids=NAMED)


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def test_there_are_thirteen_and_the_tour_has_them():
    tour = read(ROOT / "TOUR.md")
    assert len(NAMED) == len(EXERCISES) == 13
    assert all(f"`python exercise.py {name}`" in tour for name in NAMED)


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


@pytest.mark.slow
def test_a_copy_has_the_code_the_models_and_no_answer(tmp_path):
    copy = tmp_path / "copy"
    made = program("exercise.py", "all", copy)
    assert made.returncode == 0 and f"all {copy} --check" in made.stdout
    for exercise in EXERCISES:
        assert all(judge in made.stdout for judge in exercise.tests)
    assert sum(read(copy / page).count(BLANK) for page in {e.page for e in EXERCISES}) == 13
    there = {path.relative_to(copy) for path in copy.rglob("*")}
    without = {ROOT / "docs" / "tour.py"}  # it reads TOUR.md, which is not copied
    assert {page.relative_to(ROOT) for page in {*PAGES} - without} <= there
    assert Path("models/tiny/config.json") in there
    assert not any(path.suffix in (".md", ".pyc") for path in there)
    checked = program("exercise.py", "all", copy, "--check")
    assert checked.returncode == 1
    assert checked.stdout.splitlines()[-1].startswith("not yet: attention in kernels.py;")


@pytest.mark.parametrize(
    "words, told",
    [
        ("verfy", "did you mean verify?): there are attention, "),
        ("verify .", ". exists, or lies in a folder of the project: remove it, or put another"),
        ("verify app/new", "app/new exists, or lies in a folder of the project"),
        ("verify --check test_data", "test_data is not a copy: python exercise.py NAME test_data"),
        ("--check", "--check has no effect without NAME"),
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
    assert [line.split()[1] for line in lines[3:]] == [*NAMED]
    assert exercise_flags(["verify", "--check", "x"]) == exercise_flags(["verify", "x", "--check"])


def test_judges_run_without_the_backends(monkeypatch):
    asked = {}
    monkeypatch.setattr("subprocess.call", lambda command, **how: asked.update(how))
    assert run(exercise_flags(["verify", str(ROOT), "--check"])) == 0
    assert asked["env"]["LLAMA_PLAIN"] == "1" and asked["cwd"] == ROOT


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("exercise") / "copy"
    copy_project(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMED] if TIMES > 1 else [*NAMED][:1])
def test_no_body_is_wrong_and_the_original_is_right(name, copy, monkeypatch):
    """With TEST_TIMES=10, of every exercise. The command that is named calls the function. The
    bodies that come later are not needed."""
    monkeypatch.delenv("TEST_TIMES", raising=False)  # judges have few cases
    whole = {exercise.page: read(copy / exercise.page) for exercise in EXERCISES}

    def leave_out(names: list[str]) -> None:
        texts = dict(whole)
        for missing in names:
            page = NAMED[missing].page
            texts[page] = blanked(texts[page], missing)
        for page, text in texts.items():
            (copy / page).write_text(text, encoding="utf-8")

    first = [*NAMED].index(name)
    exercise = NAMED[name]
    leave_out([name])
    flags = (exercise.flags or "").split()
    called = program(copy / "generate.py", "--max-tokens", 9, *flags, "Once upon a time")
    leave_out([*NAMED][first:])
    blank = program("exercise.py", name, copy, "--check")
    leave_out([*NAMED][first + 1 :])
    right = program("exercise.py", name, copy, "--check")
    leave_out([])
    assert (blank.returncode, blank.stdout.splitlines()[-1].split(":")[0]) == (1, "not yet")
    assert "your turn" in blank.stdout
    assert ("NotImplementedError: your turn" in called.stderr) == (exercise.flags is not None)
    assert (right.returncode, right.stdout.splitlines()[-1]) == (0, "right"), right.stdout
