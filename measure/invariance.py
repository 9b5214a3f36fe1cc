"""The same request by itself, among 4 and among 16: is its output the same?

    python bench.py --invariance                          this program, in all its widths
    python bench.py --invariance --against openvino       another one (see peers.py), or vllm

At temperature 0 an output should depend on its prompt alone. But sums of floating-point numbers
depend on their order, and most programs add in another order if a batch has more rows, so logits
differ in their last bits. Where two tokens are almost equally likely, the other one wins, and from
there on it is another text. A program without this effect is called *batch invariant* (Thinking
Machines Lab, "Defeating Nondeterminism in LLM Inference", 2025).

Invariant: a program gets the same requests in each size of its batch, and no output ends early.
Not covered: other companions of the same number; temperatures above 0.
"""

import torch

from loading import Model
from measure import peers
from measure.contestants import Contestant, Prompts
from measure.sizes import BEGINNING, SENTENCES, Sizes
from measure.steps import Rows, label

BATCHES = (1, 4, 16)  # requests that run together
FORMS = (  # of a request: prompts of unequal lengths
    "Translate into French: {}",
    BEGINNING + "{} What happens next?",
)


@torch.inference_mode()
def invariance(name: str | None, target: str, gguf: str | None, sizes: Sizes) -> Rows:
    """A row for each width of the peer, or of ours. UserError if the peer cannot run."""
    if name is None:
        programs = {f"this program, {one.name}": one for one in peers.our_widths(target)}
    else:
        peers.check_peer(name, gguf)
        programs = {one.name: one for one in peers.rivals_of(name, target, gguf)}
    encode = Model.load(target, "cpu", torch.float32).encode  # by its chat template, if it has one
    prompts = []
    for sentence in SENTENCES[: sizes.num_requests]:
        prompts += [encode(form.format(sentence)) for form in FORMS]
    rows = {}
    for program, one in programs.items():
        counts = count_outputs(one, prompts, sizes.num_tokens)
        rows[f"{label(target)}, {program}"] = {
            "target": label(target),
            "program": program,
            "requests": len(prompts),
            "varying": sum(n > 1 for n in counts),
            "outputs": sum(counts),
        }
    return rows


def count_outputs(one: Contestant, prompts: Prompts, count: int) -> list[int]:
    """How many outputs each request has, of `count` tokens, in batches of all these sizes."""
    found: list[set[tuple[int, ...]]] = [set() for _ in prompts]
    for size in BATCHES:
        for start in range(0, len(prompts), size):
            made = one.make(prompts[start : start + size], count)
            for outputs, text in zip(found[start:], made.texts):
                outputs.add(tuple(text))
    return [len(outputs) for outputs in found]
