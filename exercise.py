"""Exercises: write the function that a page is about, and run the page's tests on it.

    python exercise.py                    lists the thirteen exercises
    python exercise.py verify             copies the project to ./exercise-verify, and leaves out
                                          the body of `verify`
    python exercise.py verify --check     runs the tests that judge the body you wrote there
    python exercise.py all                leaves out all thirteen bodies
    python exercise.py all --check        names the first one that is not right yet
    python exercise.py pick exercise-all --check      runs the tests of one of them

The exercises are in such an order that the tests of each need only the bodies before it. So `all`
is a course: the engine in thirteen steps. generate.py runs
after the last one (with --no-cache, after `plain_loop`).

The function keeps its signature, its docstring and the comment above its first line. The page's
docstring has the equation and the invariant. The copy holds the code, the models and the test data,
but not the documents, because they show some of the answers.

Invariant: an exercise's tests fail while the body is missing, and pass with this project's body.
Cost: a copy takes 20 MB, and the tests of an exercise take less than 20 seconds.
Not covered: whether an answer is fast. The tests run the pages without C or Triton (LLAMA_PLAIN=1).
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports, so that a signal ends them silently
    from app.shell import begin

    begin()

import argparse
import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from app.shell import Parser, status, write
from errors import UserError, check_names

ROOT = Path(__file__).parent
BLANK = 'raise NotImplementedError("your turn")'


class Exercise(NamedTuple):
    """A function for the reader to write."""

    page: str
    function: str
    teaches: str
    tests: tuple[str, ...]  # the tests that judge it, the simplest first
    flags: str | None = ""  # of a generate.py that calls the function; None: it is never called


EXERCISES = (  # each needs only those before it
    Exercise(
        page="kernels.py",
        function="attention",
        teaches="the causal mask of a cache is aligned bottom-right; heads share keys and values",
        tests=(
            "test_kernels.py::test_causal_mask_is_aligned_bottom_right",
            "test_kernels.py::test_attention_equals_the_loops",
        ),
    ),
    Exercise(
        page="kvcache.py",
        function="pack_metadata",
        teaches="block tables become slots; sequences of unequal length become one row of tokens",
        tests=("test_kvcache.py::test_metadata_says_where_each_token_belongs",),
    ),
    Exercise(
        page="sampling.py",
        function="keep_top",
        teaches="top-k, then top-p, of sorted probabilities",
        tests=(
            "test_sampling.py::test_top_k_keeps_exactly_k_and_ties_go_to_the_lower_index",
            "test_sampling.py::test_top_p_keeps_the_fewest_that_reach_p",
            "test_sampling.py::test_order_of_top_k_top_p_and_min_p",
            "test_sampling.py::test_probabilities_are_those_of_the_definition",
        ),
        flags="--top-k 5",
    ),
    Exercise(
        page="sampling.py",
        function="pick",
        teaches="the Gumbel-max trick: an argmax with keyed noise is a draw",
        tests=(
            "test_sampling.py::test_distribution_of_picks_and_of_decisions",
            "test_sampling.py::test_pick_never_takes_probability_0",
            "test_sampling.py::test_some_rows_of_an_rng_draw_what_they_draw_beside_the_others",
            "test_sampling.py::test_rng_bits_are_those_of_splitmix64",
        ),
        flags="--temperature 1",
    ),
    Exercise(
        page="quant.py",
        function="symmetric",
        teaches="the grid of INT8: a scale that reaches the largest number",
        tests=(
            "test_quant.py::test_numbers_on_a_grid_stay",
            "test_quant.py::test_a_vector_that_is_not_finite_is_read_as_nan",
            "test_quant.py::test_weights_are_rounded_to_the_nearest_code_of_a_tight_grid",
        ),
        flags="--kv-bits 8",
    ),
    Exercise(
        page="model.py",
        function="decoder_layer",
        teaches="a layer: norm, attention, norm, MLP, and the sums around them",
        tests=(
            "test_model.py",
            "test_kvcache.py::test_texts_packed_into_one_step_do_not_see_each_other",
            "test_parallel.py::test_logits_are_those_of_one_process",
        ),
    ),
    Exercise(
        page="generate.py",
        function="plain_loop",
        teaches="one token after the other, through a cache",
        tests=(
            "test_generate.py::test_the_plain_loop_draws_each_token_from_the_whole_forward_pass",
        ),
        flags="--no-cache",
    ),
    Exercise(
        page="proof.py",
        function="enumerate_distribution",
        teaches="the exact distribution of a sampler, from every outcome of its random numbers",
        tests=("test_proof.py",),
        flags=None,
    ),
    Exercise(
        page="paged.py",
        function="_find_prefix",
        teaches="full blocks are found by their tokens and the hash before them",
        tests=("test_paged.py",),
    ),
    Exercise(
        page="speculative.py",
        function="couple",
        teaches="with the same noise, drafts change nothing but the speed",
        tests=(
            "test_speculative.py::test_coupled_drafts_are_accepted_as_often_as_the_paper_says",
            "test_distribution.py::test_coupled_outputs_follow_it",
        ),
        flags="--draft tiny-draft --verify coupled",
    ),
    Exercise(
        page="speculative.py",
        function="verify",
        teaches="accept a draft with min(1, p/q), or draw from the residual",
        tests=(
            "test_speculative.py::test_verify_survives_a_residual_without_mass",
            "test_distribution.py::test_outputs_follow_the_targets_distribution",
            "test_speculative.py::test_verify_follows_p_and_accepts_as_many_as_it_says",
        ),
        flags="--draft tiny-draft --verify token --temperature 1",
    ),
    Exercise(
        page="gamma.py",
        function="speed_ups",
        teaches="how many drafts pay: the tokens of a round over its cost",
        tests=(
            "test_gamma.py::test_speed_ups_by_hand",
            "test_gamma.py::test_auto_reaches_the_best_fixed_gamma",
        ),
        flags="--draft ngram",
    ),
    Exercise(
        page="batcher.py",
        function="schedule",
        teaches="plan a step: running requests, preemption, admission",
        tests=("test_batcher.py",),
    ),
)
NAMED = {exercise.function: exercise for exercise in EXERCISES}


def blanked(text: str, function: str) -> str:
    """The text of a page without the body of this function. The function must have a docstring."""
    nodes = ast.walk(ast.parse(text))  # functions before methods
    node = next(node for node in nodes if getattr(node, "name", "") == function)
    first = node.body[1]
    lines = text.split("\n")
    lines[first.lineno - 1 : node.end_lineno] = [" " * first.col_offset + BLANK]
    return "\n".join(lines)


def copy_project(folder: Path) -> None:
    """Copy the code, the models and the test data. UserError if the folder exists already."""
    if folder.exists() or ROOT in folder.resolve().parents[1:]:
        raise UserError(
            f"{folder} exists, or lies in a folder of the project: remove it, or put another "
            "FOLDER after NAME"
        )
    made = (ROOT / ".gitignore").read_text().replace("/", "").split()
    left_out = shutil.ignore_patterns(".*", "*.md", "*.ipynb", "docs", "results", *made)
    shutil.copytree(ROOT, folder, ignore=left_out)


def make(exercises: Sequence[Exercise], folder: Path) -> int:
    """Copy the project without the bodies of these functions -> the exit status."""
    copy_project(folder)
    for exercise in exercises:
        page = folder / exercise.page
        text = page.read_text(encoding="utf-8")
        page.write_text(blanked(text, exercise.function), encoding="utf-8")
        write(f"{page}: the body of {exercise.function} is yours to write\n")
        for test in exercise.tests:
            write(f"    judged by {test}\n")
        if exercise.flags is not None:
            command = f'python generate.py {exercise.flags} "Once upon a time"'
            write(f"    called by {command}\n")
    is_all = len(exercises) > 1
    name = "all" if is_all else exercises[0].function
    write(f"Run the tests: python exercise.py {name} {folder} --check\n")
    if is_all:
        write("For the tests of one: its name in place of all. generate.py needs all of them.\n")
    return 0


def judge(exercises: Sequence[Exercise], folder: Path) -> int:
    """Run the tests in a copy, up to the first failure -> the exit status."""
    if not (folder / exercises[0].page).is_file():
        raise UserError(f"{folder} is not a copy: python exercise.py NAME {folder} makes it")
    for exercise in exercises:
        command = [sys.executable, "-m", "pytest", "-q", "-x", *exercise.tests]
        failed = subprocess.call(command, cwd=folder, env=os.environ | {"LLAMA_PLAIN": "1"})
        if failed:
            write(f"not yet: {exercise.function} in {exercise.page}; the first failure is above\n")
            return 1
    write("right\n")
    return 0


def exercise_flags(arguments: list[str] | None = None) -> argparse.Namespace:
    p = Parser("exercise.py", "Write the function that a page is about; its tests judge it.")
    p.add_argument(
        "name", metavar="NAME", nargs="?", help="of an exercise, or all (default: list them)"
    )
    p.add_argument("folder", metavar="FOLDER", nargs="?", help="of the copy (exercise-NAME)")
    p.add_argument("--check", action="store_true", help="run the tests that judge the copy")
    args = p.parse_intermixed_args(arguments)  # --check may come before FOLDER
    if args.name is None:
        p.unused(args, "check", "without NAME")
    else:
        check_names([args.name], [*NAMED, "all"], "exercise")
    return args


def run(args: argparse.Namespace) -> int:
    """-> the exit status."""
    if args.name is not None:
        act = judge if args.check else make
        exercises = EXERCISES if args.name == "all" else [NAMED[args.name]]
        return act(exercises, Path(args.folder or f"exercise-{args.name}"))
    write(
        "python exercise.py NAME copies the project, and leaves the body to you.\n"
        "python exercise.py all leaves you all of them, in this order:\n\n"
    )
    for number, exercise in enumerate(EXERCISES, 1):
        write(f"{number:2}. {exercise.function:22} {exercise.page:14} {exercise.teaches}\n")
    return 0


def main() -> int:
    return status(lambda: run(exercise_flags()))


if __name__ == "__main__":
    sys.exit(main())
