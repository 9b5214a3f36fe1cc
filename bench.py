"""Every claim, measured on the machine at hand.

    python bench.py                            the models in this repository on a CPU, in minutes
    python bench.py --target NAME              what each technique gains a model; its steps and
                                               prompts in float32, INT8 and INT4; grammars' costs
    python bench.py --draft tiny-eagle         what drafts cost and gain, beside plain decoding
    python bench.py --against transformers     the same prompts and weights, in turns; or openvino,
                                               or llama.cpp
    python bench.py --invariance               whether an output depends on the requests beside it
    python bench.py --gpu all                  models of true shapes on a GPU; or decode, …
    python bench.py --plan 70B --gpu H200      what a model needs on GPUs that are not here
    python bench.py --readme                   the documents' tables and pictures
    python bench.py --share                    what to send, so that your machine has a row there

A claim of speed is a ratio between things that were measured in one run, on a CPU in turns (A, B,
A, B, …). The machine's memory bandwidth, which limits decoding, is measured in the same run. The
numbers are kept as JSON, results/<machine>.json, without the name of a host or of a folder; tables
and pictures come from that file alone. Its date, bandwidth and version of PyTorch are those of the
last run.

Invariant: what one run did not measure stays in the file as it was.
Not covered: the quality of texts, but for perplexity.
"""

if __name__ == "__main__":  # slow imports follow: a signal ends them in silence
    from app.shell import begin

    begin()

import argparse
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from app.shell import Parser, number_or_word, say, status, write
from checkpoint.files import check_file, new_file
from errors import UserError
from measure import (
    drafts,
    gpu_cases,
    invariance,
    pair,
    peers,
    pictures,
    plan,
    report,
    steps,
)
from measure.machine import machine, results_file
from measure.report import Results
from measure.sizes import QUICK, SIZES, Sizes

ROOT = Path(__file__).parent
DOCUMENTS = ("README.md", "TOUR.md", "results/README.md", "docs/using.md")  # with figures
SECTIONS: dict[str, Callable[[Sizes], Any]] = {
    "stack": pair.stack,  # one technique added to the other
    "drafts": drafts.of_tiny,  # speculation by γ
    "bits": pair.bits,  # bytes and perplexity
    "steps": steps.steps,  # seconds, in fewer bits
    "grammars": steps.grammar_costs,  # the share of masks in a token's time
}
GPU_CASES = ["all", *gpu_cases.CASES]


def parse_bench(arguments: Sequence[str] | None) -> argparse.Namespace:
    p = Parser("bench.py", "Every claim, measured on the machine at hand.")
    p.add_argument("--against", choices=list(peers.PACKAGES), help="compare with another program")
    p.add_argument(
        "--invariance",
        action="store_true",
        help="whether an output changes in batches of 1, 4 and 16: here, or in --against's program",
    )
    p.add_argument(
        "--gpu", metavar="CASE", help=f"on a GPU, models of true shapes: {', '.join(GPU_CASES)}"
    )
    p.add_argument("--readme", action="store_true", help="write the documents' tables and pictures")
    p.add_argument(
        "--share", action="store_true", help="put this machine's row into the table of machines"
    )
    p.add_argument("--plain", action="store_true", help="measure the pages without cpu/ and gpu/")
    p.add_argument("--quick", action="store_true", help="very little of all; kept only with --out")
    p.add_argument("--target", metavar="NAME", help="the model to measure (default tiny)")
    p.add_argument(
        "--draft",
        metavar="NAME",
        action="append",
        help="drafts for --target to measure",
    )
    p.add_argument(
        "--draft-bits",
        type=number_or_word,
        help="of their weights: 16, 8, 4, fp8, nf4 (default: the target's)",
    )
    p.add_argument(
        "--prompts",
        metavar="FILE",
        type=Path,
        help='for --draft: JSON lines {"prompt": …, "kind": …}',
    )
    p.add_argument("--gguf", metavar="FILE", help="for llama.cpp: the same model in its format")
    p.add_argument("--out", metavar="FILE", help="where numbers go (results/<machine>.json)")
    plan.add_plan_flags(p.add_argument_group("a plan: nothing is measured"))
    args = p.parse_args(arguments)
    p.empty(args)
    names = plan.GPUS if args.plan else GPU_CASES
    if (args.gpu or args.plan) and args.gpu not in names:
        p.error(f"--gpu is {args.gpu}: it must be one of {', '.join(names)}")
    if args.against == "vllm" and not args.invariance:
        p.error("vllm is compared only with --invariance, because it gives no logits: add that")
    measures_gpu = args.gpu and not args.plan
    for is_so, flags, why in (  # flags that would have no effect, and why
        (args.plan, "against invariance readme plain quick target out", "with --plan"),
        (args.plan, "draft draft_bits prompts gguf", "with --plan"),
        (not args.plan, "gpus bits kv_bits context", "except with --plan"),
        (args.against != "llama.cpp", "gguf", "except with --against llama.cpp"),
        (not args.draft, "prompts draft_bits", "except with --draft"),
        (args.against or args.readme or measures_gpu, "draft", "with --against, --gpu or --readme"),
        (args.invariance, "draft", "with --invariance"),
        (args.gpu or args.readme, "target against invariance", "with --gpu or --readme"),
        (args.readme, "gpu plain quick out", "with --readme"),
        (args.share, "against gpu readme quick target draft out plan", "with --share"),
    ):
        if is_so:
            p.unused(args, flags, why)
    return args


def measure_pair(sizes: Sizes) -> Results:
    """Measure every section with tiny, and with tiny-draft where there are drafts."""
    results = machine()
    for name, measure in SECTIONS.items():
        say(name)
        results[name] = measure(sizes)
    return results


# ---- Files ---------------------------------------------------------------------------------------


def load_results(path: Path) -> Results:
    """The results in a file; empty if there is none. UserError if the file holds anything else."""
    try:
        results = json.loads((ROOT / path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}): name other results") from None
    if not isinstance(results, dict):
        raise UserError(f"{path} does not hold results: name another file")
    return results


def write_file(path: Path, text: str) -> None:
    with new_file(ROOT / path) as new:
        new.write_text(text, encoding="utf-8")


def store_results(path: Path, results: Results) -> None:
    """Write these results to the file. Other runs' sections, and their named rows, stay."""
    stored = load_results(path)
    for name, section in results.items():
        is_mergeable = isinstance(section, dict) and isinstance(stored.get(name), dict)
        stored[name] = stored[name] | section if is_mergeable else section
    write_file(path, json.dumps(stored, indent=1, ensure_ascii=False) + "\n")


def with_figures(text: str) -> str:
    """The document, with all its tables made anew."""
    files = [load_results(path) for path in sorted(ROOT.glob("results/*.json"))]
    text = report.with_machines(report.with_tables(text, load_results), files)
    return plan.with_memory(text)


def all_pictures(documents: Iterable[str]) -> dict[str, str]:
    """Each picture, by the first results named in these documents that have what it shows."""
    drawn: dict[str, str] = {}
    for marked in re.finditer(report.MARKED, "\n".join(documents)):
        drawn = pictures.draw_all(load_results(Path(marked["results"]))) | drawn
    return drawn


def write_documents() -> None:
    """Make all documents' tables and pictures."""
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in DOCUMENTS}
    for name, text in texts.items():
        write_file(Path(name), with_figures(text))
    for name, picture in all_pictures(texts.values()).items():
        write_file(Path("results", f"{name}.svg"), picture)


def share_results(path: Path) -> None:
    """Make this machine's row of the table, and say what to send. UserError if it has none, or if
    its results name this host or a folder of the user's."""
    stored = load_results(path)
    if "steps" not in stored:
        raise UserError(f"{path} has no measurements of this machine: run bench.py first")
    for name in {platform.node(), str(Path.home())} - {""}:
        if name in json.dumps(stored):
            raise UserError(f"{path} contains {name}: remove it before you send the file")
    write_documents()
    say(f"send a pull request with {path} and the documents, whose tables have it now")


def write_sections(sections: Sequence[report.Section]) -> None:
    for section in sections:
        write(report.markdown(section) + "\n")


# ---- The command line ----------------------------------------------------------------------------


def run_bench(args: argparse.Namespace) -> int:
    """Run what the flags ask for -> the exit status: 1 if a case of a GPU has wrong rows."""
    if args.readme:
        write_documents()
        return 0
    if args.share:
        share_results(results_file())
        return 0
    if args.plan:
        write_sections([plan.plan_section(args)])
        return 0
    sizes = QUICK if args.quick else SIZES
    is_stored = args.out or not args.quick

    def file_of(results: Results | None) -> Path:
        return Path(args.out).absolute() if args.out else results_file(results)

    if args.out or is_stored and not args.gpu:  # refuse before the work what cannot be written
        check_file(ROOT / file_of(None))
        load_results(file_of(None))

    def store(results: Results) -> None:
        if is_stored:
            store_results(file_of(results), results)

    if args.gpu:  # it has sizes of its own, and stores row by row
        results = gpu_cases.run_cases(args.gpu, args.quick, store)
    elif args.invariance:
        rows = invariance.invariance(args.against, args.target or "tiny", args.gguf, sizes)
        results = machine() | {"invariance": rows}
    elif args.against:
        rows = peers.against(args.against, args.target or "tiny", args.gguf, sizes)
        results = machine() | {"peers": rows}
    elif args.draft:
        target = args.target or "tiny"
        measured = drafts.drafts(sizes, target, args.draft, args.prompts, args.draft_bits)
        results = machine() | {"drafts": measured}
    elif args.target:
        results = machine() | {"stack": pair.stack(sizes, args.target)}
        results["steps"] = steps.steps(sizes, args.target)
        results["grammars"] = steps.grammar_costs(sizes, args.target)
    else:
        results = measure_pair(sizes)
    store(results)
    write_sections(report.sections(results))
    return 1 if gpu_cases.has_wrong_rows(results) else 0


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_bench(arguments)
    if args.plain:
        os.environ["LLAMA_PLAIN"] = "1"  # of other processes, too
    return status(lambda: run_bench(args))


if __name__ == "__main__":
    sys.exit(main())
