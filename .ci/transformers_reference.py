"""Ours beside Hugging Face transformers: logits of random models, and greedy text; or speed.

    python .ci/transformers_reference.py SMOLLM2 [speed]   (a folder; with transformers)

Speeds are ratios of medians, measured in turns in one run on one machine.
"""

import logging
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
import torch
from checks import require
from random_models import CASES, greedy, greedy_of, make, move_rope, save
from transformers import AutoModelForCausalLM, AutoTokenizer

from checkpoint.eagle import is_eagle
from generate import generate
from kvcache import KVCache
from loading import Model
from measure.clock import read_bandwidth
from model import Llama

QUESTIONS = [
    "What is the capital of France?",
    "Name three colours.",
    "Write one sentence about the sea.",
    "What is 7 times 8?",
    "Translate 'good morning' into French.",
    "Why is the sky blue?",
    "Tell me a short story about a fox.",
    "List the planets.",
]


@torch.inference_mode()
def random_models() -> None:
    """Every kind of config, with seeds that the stored expectations do not have."""
    worst = 0.0
    num_same = 0
    with tempfile.TemporaryDirectory() as root:
        for i, (case, seed) in enumerate((case, seed) for case in CASES for seed in (100, 101)):
            reference, folder = make(case, seed), Path(root) / f"{case}-{seed}"
            save(case, reference, folder)
            if seed == 100:
                move_rope(folder, ("rope_parameters", "rope_scaling", "type")[i % 3])
            tokens = torch.randint(0, 43, (100,), generator=torch.Generator().manual_seed(seed))
            expected = reference(tokens[None]).logits[0]
            llama = Llama.load(folder, "cpu", torch.float32)
            error = (llama(tokens) - expected).abs().max() / expected.abs().max()
            worst = max(worst, float(error))
            num_same += greedy(llama, tokens[:9]) == greedy_of(reference, tokens[:9])
    require(
        worst < 1e-4,
        f"logits of {2 * len(CASES)} random models in float32: at most {worst:.1e} from "
        "those of transformers, relatively",
    )
    require(num_same == 2 * len(CASES), f"20 greedy tokens of {num_same} of them are the same")


@torch.inference_mode()
def embedded_models() -> None:
    """The models in this repository are Llamas in the world's sense too."""
    for folder in sorted((Path(__file__).parent.parent / "models").iterdir()):
        if is_eagle(folder):
            continue
        tokens = AutoTokenizer.from_pretrained(folder)(
            "Once upon a time, there was a little dog. He was 3 years old!", return_tensors="pt"
        ).input_ids
        ours = Model.load(folder, "cpu", torch.float32)
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits[
            0
        ]
        error = float((ours.llama(tokens[0]) - expected).abs().max() / expected.abs().max())
        same = (
            ours.tokenizer.encode("Once upon a time, there was a little dog. He was 3 years old!")
            == tokens[0].tolist()
        )
        require(
            error < 1e-4 and same,
            f"{folder.name}: the same tokens as in transformers, and logits {error:.1e} from its "
            "own, relatively",
        )


@torch.inference_mode()
def greedy_texts(folder: Path, model: Model, reference: torch.nn.Module) -> None:
    """64 tokens on 8 questions, token for token, with penalties and without."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for question in QUESTIONS:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        for penalty in (1.0, 1.1, 1.3):
            theirs = reference.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=64,
                do_sample=False,
                repetition_penalty=penalty,
            )[0].tolist()
            asked = dict(temperature=0, max_tokens=64, repetition_penalty=penalty)
            ours = generate(question, model, **asked)
            if "France?" in question:
                require("Paris" in ours.text, f"{question} {ours.text}")
            require(
                ours.prompt_tokens + ours.tokens == theirs,
                f"{len(ours.tokens)} greedy tokens with repetition_penalty {penalty}: {question}",
            )


def decode_theirs(reference: torch.nn.Module, prompt: torch.Tensor, n: int) -> float:
    """Seconds a token of transformers' generate, after the first."""

    def run(tokens: int) -> float:
        start = time.perf_counter()
        reference.generate(
            prompt[None],
            attention_mask=torch.ones_like(prompt[None]),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
        )
        return time.perf_counter() - start

    return (run(n + 1) - run(1)) / n


def decode_ours(model: Model, prompt: torch.Tensor, n: int) -> float:
    """Seconds a token of our generate, after the first, as it says itself."""
    text = model.tokenizer.decode(prompt.tolist())
    ends = model.eos_token_ids
    model.eos_token_ids = set()
    result = generate(text, model, temperature=0, max_tokens=n + 1, chat=False)
    model.eos_token_ids = ends
    return 1 / result.tokens_per_second


@torch.inference_mode()
def speed(model: Model, reference: torch.nn.Module, rounds: int = 5) -> None:
    prompt = torch.tensor(model.tokenizer.encode("The history of the sea is long. " * 8))
    pairs = [
        (decode_ours(model, prompt, 32), decode_theirs(reference, prompt, 32))
        for _ in range(rounds)
    ]
    ratio = median(b / a for a, b in pairs)
    require(
        ratio >= 1.35,
        f"decoding in float32 is {ratio:.2f} times as fast as transformers' generate "
        f"(each round: {', '.join(f'{b / a:.2f}' for a, b in pairs)})",
    )
    weights = Llama(model.llama.config, "meta", torch.float32, seed=None).named_tensors()
    read = sum(place.nbytes for name, place in weights.items() if place.ndim == 2)
    shares = [read / decode_ours(model, prompt, 32) / read_bandwidth() for _ in range(5)]
    # where two cores read 30 GB/s it is 75 to 95 %; where they read 55, 43 to 58 %
    require(
        median(shares) >= 0.4 or max(shares) >= 0.8,
        f"which reads {median(shares):.0%} of what this machine's memory can give (goal 80 %; "
        "each time: "
        f"{', '.join(f'{share:.0%}' for share in shares)})",
    )
    # The machine is shared: measured again, and of the best a wider limit counts.
    cost = min(five_over_one(model.llama, prompt) for _ in range(3))
    require(cost <= 2.2, f"a pass of 5 tokens costs {cost:.2f} times a pass of one (goal 1.6)")


def five_over_one(llama: Llama, prompt: torch.Tensor, rounds: int = 25) -> float:
    """What a pass of five tokens costs over a pass of one, after the prompt: the median of the
    ratios, in turns."""
    cache = KVCache(llama.kv_spec(), len(prompt) + 8)
    seq, _ = cache.open(())
    llama(prompt, cache.extend([(seq, prompt)]))

    def seconds(n: int) -> float:
        start = time.perf_counter()
        llama(prompt[:n], cache.extend([(seq, prompt[:n])]))
        cache.truncate(seq, len(prompt))
        return time.perf_counter() - start

    return median(1 / (seconds(1) / seconds(5)) for _ in range(rounds))


def main(folder: Path, *what: str) -> None:
    logging.disable(logging.WARNING)
    model = Model.load(folder, "cpu", torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if what == ("speed",):
        speed(model, reference)
        return
    random_models()
    embedded_models()
    greedy_texts(folder, model, reference)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
