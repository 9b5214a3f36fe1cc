"""lm_eval (EleutherAI's lm-evaluation-harness) against the server, and against transformers.

    python .ci/lm_eval_reference.py PROGRAMS MODEL TEXT

PROGRAMS: a folder of programs (a venv's bin) with `lm_eval`. MODEL: a model's folder. TEXT: a file
of paragraphs, from which two tasks are made: which of four ends belongs to a paragraph, and how
probable a paragraph is. Nothing is fetched. lm_eval asks the server, which computes in float32, by
/v1/completions with echo and logprobs, several requests at a time; and transformers in its own
process, in float64. (In float32 transformers' log-softmax is off by 7e-6 for each token, always to
the same side: 2e-4 after 25 tokens.)
"""

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import require
from server_reference import server

ENDS = """
task: ends
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{begin}}}}"
doc_to_choice: ends
doc_to_target: right
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
PARAGRAPHS = """
task: paragraphs
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{{{paragraph}}}}"
metric_list: [{{metric: word_perplexity}}]
"""
CLOSE = 1e-4  # of a log-likelihood


def write_tasks(folder: Path, text: str, count: int = 16) -> None:
    """The two tasks, and their data."""
    paragraphs = [line.strip() for line in text.split("\n") if 200 < len(line) < 500][:count]
    halves = []
    for paragraph in paragraphs:
        words = paragraph.split()
        middle = len(words) // 2
        halves.append((" ".join(words[:middle]), " ".join(words[middle : middle + 12])))
    rng = random.Random(1)
    lines = []
    for i, (begin, end) in enumerate(halves):
        others = [end for j, (_, end) in enumerate(halves) if j != i]
        ends = rng.sample(others, 3)
        right = rng.randrange(4)
        ends.insert(right, end)
        lines.append(dict(begin=begin, ends=ends, right=right, paragraph=paragraphs[i]))
    file = folder / "data.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    (folder / "ends.yaml").write_text(ENDS.format(file=file))
    (folder / "paragraphs.yaml").write_text(PARAGRAPHS.format(file=file))


def evaluated(programs: Path, folder: Path, kind: str, **arguments: object) -> tuple[dict, dict]:
    """What lm_eval says of a model: its results, and the log-likelihoods, of each task."""
    out = folder / kind
    settings = ",".join(f"{name}={value}" for name, value in arguments.items())
    command = [programs / "lm_eval", "run", "--model", kind, "--model_args", settings]
    command += ["--tasks", "ends,paragraphs", "--include_path", folder, "--batch_size", "4"]
    command += ["--output_path", out, "--log_samples"]
    offline = dict(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HOME=str(folder / "home"))
    done = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True)
    if done.returncode:
        require(False, f"lm_eval of {kind}\n{done.stderr[-3000:]}")
    (results,) = out.rglob("results_*.json")
    told = {}
    for task in ("ends", "paragraphs"):
        (samples,) = out.rglob(f"samples_{task}_*.jsonl")
        lines = map(json.loads, samples.read_text().splitlines())
        told[task] = {line["doc_id"]: line["filtered_resps"] for line in lines}
    return json.loads(results.read_text())["results"], told


def compare(task: str, ours: dict, theirs: dict) -> None:
    """The log-likelihoods of all documents."""
    count = 0
    worst = 0.0
    for i, wanted in theirs.items():
        for one, other in zip(ours[i], wanted, strict=True):
            if isinstance(other, list):  # it says, too, if each token is the most probable one
                one, own_greedy = one
                other, greedy = other
                if own_greedy != greedy:
                    require(False, f"{task} {i}: {own_greedy}, and transformers {greedy}")
            count += 1
            worst = max(worst, abs(float(one) - float(other)))
    require(
        worst < CLOSE, f"lm_eval, {task}: {count} log-likelihoods differ by {worst:.1e} at most"
    )


def main(programs: Path, model: str, text: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tasks(folder, text.read_text())
        results, theirs = evaluated(programs, folder, "hf", pretrained=model, dtype="float64")
        flags = ["--target", model, "--model-name", "it", "--dtype", "float32"]
        with server(*flags) as (_, port):
            address = f"http://127.0.0.1:{port}/v1/completions"
            asked = dict(model="it", base_url=address, tokenizer=model, num_concurrent=3)
            own_results, ours = evaluated(programs, folder, "local-completions", **asked)
    for task in theirs:
        compare(task, ours[task], theirs[task])
    for metric in ("acc,none", "acc_norm,none"):
        wanted = results["ends"][metric]
        require(own_results["ends"][metric] == wanted, f"lm_eval, {metric}: {wanted}, by both")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    if Path(sys.argv[1], "lm_eval").exists():
        main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
    else:
        print("lm_eval is not installed: log-likelihoods are not compared with its own")
