"""The peers: Hugging Face transformers and llama.cpp, with the same prompts and the same weights.

    python bench.py --against transformers --target NAME
    python bench.py --against llama.cpp --target NAME --gguf FILE      NAME's weights in llama.cpp's own format

All programs read the same tokens and make the same number, greedily, with the same number of threads, in turns: short
prompts that are continued, long prompts, and sixteen texts together. A text is timed from its first token to its last;
a ratio is a median. The same weights give the same tokens, up to near-ties: a wrongly configured peer is noticed.

Invariant: a peer that is not installed is named, with the way to get it.
Not covered: peers' own speculation.
"""

import importlib.util
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from checkpoint.config import Config
from checkpoint.hub import find_folder
from errors import UserError
from generate import Engine, Model
from measure.clock import read_bandwidth, spent
from measure.pair import Effort, at_once, weight_bytes
from measure.steps import LENGTHS, WIDTHS, machine_code
from request import Request, Settings
from tokenizer import Tokenizer

PACKAGES = {"transformers": "transformers", "llama.cpp": "llama_cpp_python"}
TEXTS, OWN = 16, 32  # texts made together; tokens of a prompt, and new ones
Work = Sequence[tuple[int, int]]  # lengths of prompts and answers


class Made(NamedTuple):
    """Texts that were made together: the first text, the seconds until its first token, and all seconds."""

    tokens: list[int]
    first: float
    total: float

    @property
    def rate(self) -> float:
        """Tokens a second, after the first."""
        return (len(self.tokens) - 1) / (self.total - self.first)


class Contestant(NamedTuple):
    """This project, or a peer."""

    name: str
    make: Callable[
        [Sequence[Sequence[int]], int], Made
    ]  # (prompts of one length, count) -> texts of `count` tokens
    bytes: int = 0  # weight bytes read for each token; 0 for a peer
    together: bool = True  # whether it makes several texts in one pass
    seconds: float = 0.0  # until its first text has two tokens, loading included,
    memory: int = 0  # and the peak of memory by then, in bytes


def installed(name: str) -> bool:
    return importlib.util.find_spec(PACKAGES[name].removesuffix("_python")) is not None


def not_compared(name: str) -> str:
    return f"{name} is not installed here, so nothing is compared with it: pip install {PACKAGES[name]}"


def ours(target: str, bits: int) -> Contestant:
    model = Model.load(target, "cpu", torch.float32 if bits == 16 else None, bits)
    limit = model.llama.config.max_position_embeddings

    def make(prompts: Sequence[Sequence[int]], count: int) -> Made:
        longest = min(limit, len(prompts[0]) + count)
        requests = [
            Request(list(prompt), Settings(0.0, seed=0, max_tokens=count)) for prompt in prompts
        ]
        served = at_once(
            Engine(model, None, len(prompts) * longest, longest, len(prompts)), requests
        )
        return Made(served.texts[0], served.first[0], served.seconds)

    kept, computed = (str(dtype)[6:] for dtype in (model.llama.weight_dtype, model.llama.dtype))
    kept = kept if bits == 16 else f"INT{bits}"
    name = kept if kept == computed else f"{kept} in {computed}"
    return Contestant(name, make, weight_bytes(model.llama, read=True))


def reply(model: Any, prompts: Sequence[Sequence[int]], count: int, **more: Any) -> Made:
    """Texts by transformers' `generate`."""
    tokens, times = (
        torch.tensor(prompts, device=model.device),
        list[float](),
    )  # times[0]: when it starts
    streamer = SimpleNamespace(
        put=lambda value: times.append(time.perf_counter()), end=lambda: None
    )
    made = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        streamer=streamer,
        **more,
    )
    return Made(made[0, len(prompts[0]) :].tolist(), times[1] - times[0], times[-1] - times[0])


def transformers(target: str) -> Contestant:
    from transformers import AutoModelForCausalLM, logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(find_folder(target), dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # no text stops early
    return Contestant("transformers float32", partial(reply, model))


def llama_cpp(gguf: str) -> Contestant:
    from llama_cpp import Llama

    threads = torch.get_num_threads()
    model = Llama(gguf, n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False)

    def make(prompts: Sequence[Sequence[int]], count: int) -> Made:
        model.reset()
        start = time.perf_counter()
        tokens = model.generate(list(prompts[0]), temp=0.0, repeat_penalty=1.0, reset=True)
        made, times = zip(*((int(token), time.perf_counter()) for token in islice(tokens, count)))
        return Made(list(made), times[0] - start, times[-1] - start)

    return Contestant(
        f"llama.cpp {Path(gguf).stem.rsplit('.', 1)[-1].rsplit('-', 1)[-1]}", make, together=False
    )


def ready(load: Callable[[], Contestant], prompt: Sequence[int]) -> Contestant:
    (one, _), seconds, memory = spent(lambda: (one := load(), one.make([prompt], 2)))
    return one._replace(seconds=seconds, memory=memory)


class RandomTransformers:
    """transformers' model of this shape, with random weights and no end-of-text token: no text stops early."""

    def __init__(self, config: Config, device: str, dtype: torch.dtype):
        from transformers import LlamaConfig, LlamaForCausalLM, logging

        logging.set_verbosity_error()
        shape = LlamaConfig.from_dict(config.to_dict() | dict(bos_token_id=None, eos_token_id=None))
        self.on_gpu, self.vocab = device == "cuda", config.vocab_size
        with (
            torch.inference_mode(False),
            torch.device(device),
        ):  # its batching thread has no inference_mode
            self.model = LlamaForCausalLM(shape).to(dtype).eval().requires_grad_(False)
        self.attention = self.model.config._attn_implementation  # as it finally chose

    def seconds_a_token(self, prompt: int, count: int, turns: int, cache: str) -> float:
        """Seconds of a token after a prompt, by `generate`, which compiles for a static cache on a GPU."""
        runs = [
            reply(self.model, [[0] * prompt], count, cache_implementation=cache)
            for _ in range(turns + 1)
        ]
        return 1 / median(made.rate for made in runs[1:])  # one warms up, or compiles

    def batched(self, work: Work) -> float:
        """Tokens a second by continuous batching, which warms up by itself. RuntimeError if a request is not whole."""
        from transformers import ContinuousBatchingConfig, GenerationConfig
        from transformers.generation.continuous_batching.utils import WorkloadHints

        generator, longest = torch.Generator().manual_seed(0), max(count for _, count in work)
        prompts = [
            torch.randint(self.vocab, (prompt,), generator=generator).tolist() for prompt, _ in work
        ]
        settings = GenerationConfig(
            do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=longest
        )
        room = ContinuousBatchingConfig(
            **({} if self.on_gpu else dict(num_blocks=64))
        )  # or all of the main memory
        hints = WorkloadHints(max(map(len, prompts)), longest, len(work))
        batching = self.model.continuous_batching_context_manager
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            batching(settings, continuous_batching_config=room, workload_hints=hints) as manager,
        ):
            start, counts = time.perf_counter(), [count for _, count in work]
            unserved = {
                manager.add_request(p, max_new_tokens=count): count
                for p, count in zip(prompts, counts)
            }
            for result in manager:
                made, self.attention = (
                    len(result.generated_tokens),
                    self.model.config._attn_implementation,
                )
                if result.is_finished() and (
                    unserved.pop(result.request_id) != made or result.error
                ):
                    raise RuntimeError(
                        result.error or f"{made} tokens are not as many as were asked for"
                    )
                if not unserved:
                    return sum(counts) / (time.perf_counter() - start)
            raise RuntimeError(f"its loop ended with {len(unserved)} requests unserved")


@torch.inference_mode()
def against(name: str, target: str, gguf: str | None, effort: Effort) -> dict[str, dict[str, Any]]:
    """Compare our float32, INT8 and INT4 with a peer -> a row for each. ValueError if the peer cannot run."""
    if name not in PACKAGES:
        raise UserError(f"--against {name!r}: the peers are {', '.join(PACKAGES)}")
    if not installed(name):
        raise UserError(not_compared(name))
    if name == "llama.cpp" and gguf is None:
        raise UserError(
            "llama.cpp reads a format of its own: --gguf FILE, "
            "made of --target with its convert_hf_to_gguf.py --outtype q8_0, or its llama-quantize"
        )
    loads = [
        partial(transformers, target) if name == "transformers" else partial(llama_cpp, gguf),
        *(partial(ours, target, bits) for bits in WIDTHS.values()),
    ]
    limit, tokenizer = (
        Config.load(find_folder(target)).max_position_embeddings,
        Tokenizer.load(find_folder(target)),
    )
    everyone, roofs, short = (
        [ready(load, tokenizer.prompt(effort.openings[0])) for load in loads],
        [],
        [],
    )
    peer = everyone[0]
    for prompt in map(tokenizer.prompt, [effort.openings[0], *effort.openings]):
        roofs.append(read_bandwidth())
        short.append([one.make([prompt], effort.count // 2) for one in everyone])
    texts = [random.Random(i).choices(range(1000), k=OWN) for i in range(TEXTS)]
    others = {f"prompt{n}": ([(texts[0] * n)[:n]], 1) for n in LENGTHS if n < limit}
    others |= {"together": (texts, OWN)} if peer.together else {}
    long = {
        name: [[one.make(*work).total for one in everyone] for _ in range(effort.turns)]
        for name, work in others.items()
    }
    rows = [
        row(
            label(target), one, peer, [(turn[0], turn[i]) for turn in short[1:]], roofs[1:]
        )  # one warms up
        | {name: median(turn[0] / turn[i] for turn in turns) for name, turns in long.items()}
        for i, one in enumerate(everyone[1:], 1)
    ]
    return {f"{row['target']}, {row['code']}, {row['ours']}, {row['peer']}": row for row in rows}


def label(target: str) -> str:
    """A model's name, without the folder that holds it on this machine."""
    return Path(target).absolute().name if Path(target).is_dir() else target


def row(
    target: str,
    one: Contestant,
    peer: Contestant,
    turns: Sequence[tuple[Made, Made]],
    roofs: Sequence[float],
) -> dict[str, Any]:
    """turns: for each prompt, what the peer made and what we made; roofs: bytes a second, measured just before."""
    return dict(
        target=target,
        code=machine_code(),
        ours=one.name,
        peer=peer.name,
        tokens_per_second=median(we.rate for _, we in turns),
        peer_tokens_per_second=median(they.rate for they, _ in turns),
        ratio=median(we.rate / they.rate for they, we in turns),
        seconds=one.seconds,
        peer_seconds=peer.seconds,
        memory=one.memory,
        peer_memory=peer.memory,
        bandwidth=median(we.rate * one.bytes / roof for (_, we), roof in zip(turns, roofs)),
        same_texts=sum(they.tokens == we.tokens for they, we in turns),
        texts=len(turns),
    )
