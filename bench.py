"""Every claim, measured on the machine at hand.

    python bench.py                            the embedded pair on a CPU, in minutes: tables, and results/<machine>.json
    python bench.py --quick                    the same, so small that its figures mean nothing: does everything work?
    python bench.py --against transformers     the same prompts and weights, in turns; or llama.cpp (measure/peers.py)
    python bench.py --gpu kernels              or decode, speculation, serving: 1B and 8B shapes (measure/gpu.py)
    python bench.py --pictures · --readme      results/*.svg, and the tables of README.md, from the results it names

A claim of speed is a ratio between things that were measured in one run, in turns (measure/pair.py, traffic.py). What is
measured is kept as numbers, as JSON, without the name of a host or of a folder; tables and pictures are made of that file
alone (measure/report.py, pictures.py), so they cannot say anything else.

Invariant: what one run did not measure stays in the file as it was.

Not covered: the quality of texts, but for perplexity.
"""
from shell import begin

begin(__name__)                                         # what follows takes its time: a signal ends it in silence

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvcache import CacheFull
from measure import gpu, pair, peers, pictures, report, traffic
from measure.pair import QUICK, Effort
from shell import Parser, check_file, say, status, whole, write

HERE = Path(__file__).parent
README = HERE / "README.md"


def parser() -> argparse.ArgumentParser:
    p = Parser("bench.py", "Every claim, measured on the machine at hand.")
    what = p.add_mutually_exclusive_group()
    what.add_argument("--against", metavar="PEER", help=f"compare with {' or '.join(peers.PACKAGES)}: the same prompts on the same weights, in turns")
    what.add_argument("--gpu", choices=list(gpu.CASES), help="on a GPU: models of true shapes with random weights")
    what.add_argument("--pictures", action="store_true", help="draw results/*.svg from the results that README.md names, and measure nothing")
    what.add_argument("--readme", action="store_true", help="write the tables of README.md from the results that it names, and measure nothing")
    p.add_argument("--quick", action="store_true", help="very little of everything, to see that it works; nothing is kept unless --out says where")
    p.add_argument("--data", metavar="FILE", help="measure perplexity on this text (default: on what the model tells itself)")
    p.add_argument("--target", default="tiny", metavar="NAME", help="with --against: the model (tiny)")
    p.add_argument("--gguf", metavar="FILE", help="with --against llama.cpp: the same model in its format")
    p.add_argument("--out", metavar="FILE", help="where the numbers go (results/<machine>.json)")
    return p


# ---- What is measured -----------------------------------------------------------------------------------------------------------

def everything(effort: Effort, data: str | None) -> dict[str, Any]:
    """The embedded pair: all that results/*.json has of it."""
    parts: dict[str, Callable[[], Any]] = dict(
        stack=lambda: pair.stack(effort), products=lambda: pair.products(effort), gammas=lambda: pair.gammas(effort),
        bits=lambda: pair.bits(effort, data), waste=lambda: traffic.waste(effort), latency=lambda: traffic.latency(effort),
        places=traffic.places, blocks=traffic.blocks)
    results = pair.machine()
    for name, part in parts.items():
        start = time.perf_counter()
        results[name] = part()
        say(f"{name}: {time.perf_counter() - start:.0f} s")
    return results


def load(path: Path) -> dict[str, Any]:
    if not (HERE / path).exists():
        return {}
    check_file(HERE / path)
    try:
        found = json.loads((HERE / path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}): name the results of another run, or a new file") from None
    if not isinstance(found, dict) or not all(isinstance(found.get(name, {}), dict) for name in ("peers", "gpu")):
        raise ValueError(f"{path} holds no results of a run: name others, or a new file")
    return found


def put(path: Path, text: str) -> None:
    with whole(path) as new:
        new.write_text(text, encoding="utf-8")


def keep(path: Path, results: dict[str, Any]) -> None:
    """Put these beside what the file has already."""
    old, again = load(path), {(row["target"], row["peer"]) for row in results.get("peers", {}).values()}
    for name in ("peers", "gpu"):
        if name in results:                                              # whatever ours was when it met the same peer is gone
            results[name] = {key: row for key, row in old.get(name, {}).items() if (row.get("target"), row.get("peer")) not in again} | results[name]
    put(HERE / path, json.dumps(old | results, indent=1, ensure_ascii=False) + "\n")
    say(f"kept in {path}")


def named(readme: str) -> Path:
    """The results of the front page."""
    if (found := report.MARKED.search(readme)) is None:
        raise ValueError("README.md names no results: it needs the line <!-- figures of results/NAME.json -->, and <!-- end of figures -->")
    return Path(found[2])


def run(args: argparse.Namespace) -> None:
    if args.pictures or args.readme:
        readme = README.read_text(encoding="utf-8")
        if args.readme:
            put(README, page := report.front_page(readme, load))
            return say(f"{README.name}: {len(page):,} characters")
        for name, drawn in pictures.draw(load(named(readme))).items():
            put(HERE / "results" / f"{name}.svg", drawn)
            say(f"results/{name}.svg")
        return None
    if args.gguf and args.against != "llama.cpp":
        raise ValueError("--gguf is for --against llama.cpp: leave it out, or name that peer")
    if args.target != "tiny" and not args.against:
        raise ValueError("--target is for --against: what else is measured is the embedded pair, or has random weights")
    if args.data and not Path(args.data).is_file():
        raise ValueError(f"--data {args.data} is not a file that is there: name a text")
    effort, out = QUICK if args.quick else Effort(), None
    if args.out or not args.quick:
        out = Path(args.out or Path("results") / f"{pair.slug(pair.processor())}.json")
        check_file(HERE / out)                                           # refused before minutes of measuring
        load(out)
    if args.against:
        results: dict[str, Any] = dict(peers=peers.against(args.against, args.target, args.gguf, effort))
    elif args.gpu:
        case = gpu.run(args.gpu, args.quick)
        results = pair.machine(case[args.gpu]["read_bandwidth"]) | dict(gpu=case)
    else:
        results = everything(effort, args.data)
    tell(results)
    if out is not None:
        keep(out, results)


def tell(results: dict[str, Any]) -> None:
    for section in report.sections(results):
        write(f"{report.text(section)}\n\n")
    if "machine" in results:
        write(f"{report.machine(results)}\n")
    if "stack" in results and (absent := peers.missing()):
        write(f"not compared with {' and '.join(absent)}: not installed here. --against compares\n")


def main(arguments: Sequence[str] | None = None) -> int:
    return status(lambda: run(parser().parse_args(arguments)), CacheFull)


if __name__ == "__main__":
    sys.exit(main())
