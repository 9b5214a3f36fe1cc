"""Every claim, measured on the machine at hand.

    python bench.py                            the embedded pair on a CPU, in minutes: tables, results/<machine>.json
    python bench.py --target NAME              a model's steps and prompts in float32, INT8 and INT4 (measure/steps.py)
    python bench.py --against transformers     the same prompts and weights, in turns; or llama.cpp (measure/peers.py)
    python bench.py --gpu smoke                then kernels, decode, serving, … on a GPU (measure/gpucases.py)
    python bench.py --readme                   the documents' tables, numbers and pictures, from the results they name

A claim of speed is a ratio between things that were measured in one run, in turns (measure/pair.py, traffic.py). The
numbers are kept as JSON, without the name of a host or of a folder; tables and pictures come from that file alone.

Invariant: what one run did not measure stays in the file as it was.
Not covered: the quality of texts, but for perplexity.
"""

if __name__ == "__main__":  # slow imports follow: a signal ends them in silence
    from app.shell import begin

    begin()

import argparse
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from app.shell import Parser, check_file, new_file, say, status, write
from errors import UserError
from measure import gpucases, pair, peers, pictures, report, traffic
from measure.pair import QUICK, Effort
from measure.report import Results
from measure.session import session
from measure.shares import parallel
from measure.steps import steps

HERE = Path(__file__).parent
DOCUMENTS = [HERE / name for name in ("README.md", "TOUR.md", "results/README.md")]
KEPT = {"peers", "steps", "gpu"}  # sections that hold several runs side by side


def bench_parser() -> argparse.ArgumentParser:
    p = Parser("bench.py", "Every claim, measured on the machine at hand.")
    add, instead = p.add_argument, p.add_mutually_exclusive_group().add_argument
    instead(
        "--against",
        metavar="PEER",
        help=f"{' or '.join(peers.PACKAGES)}: the same prompts and weights, in turns",
    )
    instead(
        "--gpu",
        choices=list(gpucases.CASES),
        help="on a GPU: models of true shapes with random weights",
    )
    instead(
        "--readme",
        action="store_true",
        help="make the documents' tables and pictures from the results they name",
    )
    add(
        "--quick",
        action="store_true",
        help="very little of everything, to see that it works; kept only with --out",
    )
    add(
        "--data",
        metavar="FILE",
        help="measure perplexity on this text (default: on the model's own texts)",
    )
    add(
        "--target",
        metavar="NAME",
        help="measure this model's steps; with --against: compare it (tiny)",
    )
    add("--gguf", metavar="FILE", help="with --against llama.cpp: the same model in its format")
    add("--out", metavar="FILE", help="where the numbers go (results/<machine>.json)")
    return p


def everything(effort: Effort, data: str | None) -> Results:
    """Measure the embedded pair: every section of its results/*.json."""
    parts = dict(
        stack=pair.stack,
        gammas=pair.gammas,
        bits=partial(pair.bits, data=data),
        waste=traffic.waste,
        steps=partial(steps, target="tiny", label="tiny"),
        latency=traffic.latency,
        parallel=parallel,
        blocks=traffic.pool_blocks,
        session=session,
    )
    results = pair.machine()
    for name, part in parts.items():
        start = time.perf_counter()
        results[name] = part(effort)
        say(f"{name}: {time.perf_counter() - start:.0f} s")
    return results


def load_results(path: Path) -> Results:
    """The results in a file; empty if there is no file. ValueError if it is not writable or holds something else."""
    check_file(HERE / path)
    if not (HERE / path).exists():
        return {}
    try:
        found = json.loads((HERE / path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path} is not JSON ({error}): name the results of another run, or a new file"
        ) from None
    if not isinstance(found, dict) or not all(
        isinstance(found.get(name, {}), dict) for name in KEPT
    ):
        raise UserError(f"{path} holds no results of a run: name others, or a new file")
    return found


def put(path: Path, text: str) -> None:
    with new_file(HERE / path) as new:
        new.write_text(text, encoding="utf-8")


def keep(path: Path, results: Results) -> None:
    """Write these results to the file. Sections that this run did not measure stay."""
    old = load_results(path)
    results = results | {name: old.get(name, {}) | results[name] for name in results.keys() & KEPT}
    put(path, json.dumps(old | results, indent=1, ensure_ascii=False) + "\n")


def named(readme: str) -> Path:
    """The path of the results that README.md shows."""
    if (found := report.MARKED.search(readme)) is None:
        raise UserError(
            "README.md names no results: it needs the line <!-- figures of results/NAME.json -->, "
            "and <!-- end of figures -->"
        )
    return Path(found[2])


def parse_bench(arguments: Sequence[str] | None) -> argparse.Namespace:
    args = (p := bench_parser()).parse_args(arguments)
    if args.readme:
        p.unused(args, "quick data target gguf out", "where nothing is measured")
    if args.out == "":
        p.error("--out is empty: name a file")
    if args.against != "llama.cpp":
        p.unused(args, "gguf", "but with --against llama.cpp")
    if args.gpu:
        p.unused(args, "target", "with --gpu, whose models have random weights")
    if args.against or args.gpu or args.target:
        p.unused(args, "data", "where no perplexity is measured")
    return args


def answer(args: argparse.Namespace) -> None:
    if args.readme:
        written = {
            path: report.renewed(path.read_text(encoding="utf-8"), load_results)
            for path in DOCUMENTS
        }
        for name, drawn in pictures.draw_all(load_results(named(written[DOCUMENTS[0]]))).items():
            put(Path("results", f"{name}.svg"), drawn)
        for path, text in written.items():
            put(path.relative_to(HERE), text)
        return say("README.md, TOUR.md, results/README.md and their pictures are written")
    if args.data and not Path(args.data).is_file():
        raise UserError(f"--data {args.data} is not a file that is there: name a text")
    effort, out = QUICK if args.quick else Effort(), args.out
    if out or not args.quick:
        load_results(
            out := Path(out or f"results/{pair.slug(pair.processor())}.json")
        )  # refused before it is measured
    if args.against:
        results: Results = dict(
            peers=peers.against(args.against, args.target or "tiny", args.gguf, effort)
        )
    elif args.target:
        results = dict(steps=steps(effort, args.target, peers.label(args.target)))
    elif args.gpu:
        results = gpucases.run_case(args.gpu, args.quick, lambda found: out and keep(out, found))
    else:
        results = everything(effort, args.data)
    lines = [f"{report.text(section)}\n" for section in report.sections(results)]
    lines += [report.machine_line(results)] if "machine" in results else []
    write("\n".join(lines) + "\n")
    if out:
        keep(out, results)
        say(f"{out} is written")


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_bench(arguments)
    return status(lambda: answer(args))


if __name__ == "__main__":
    sys.exit(main())
