"""The same prompts on the same weights by others: Hugging Face transformers, and llama.cpp.

    python bench.py --against transformers --target NAME
    python bench.py --against llama.cpp --target NAME --gguf FILE      NAME's weights in llama.cpp's own format, 8 bits

All read the same tokens and make as many, greedily, with as many threads, in turns. Seconds are counted from the first
token to the last; a ratio is the median over prompts. The same weights give the same tokens, up to near-ties: a peer
that was set up wrongly shows. `RandomTransformers` is what the GPU cases are compared with.

Invariant: a peer that is not installed is named, with the way to get it.
Not covered: peers' own speculation.
"""
import importlib.util
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from generate import Engine, Model
from measure.clock import read_bandwidth
from measure.pair import Effort, at_once, weight_bytes
from request import Request, Settings
from weights import Config, find

PROMPTS = ("Once upon a time, in a village by the sea,", "The first rule of measuring is", "To make bread, one needs",
           "My grandmother used to say that", "The train left the station at", "A computer reads its memory")
PACKAGES = {"transformers": "transformers", "llama.cpp": "llama_cpp"}                   # as Python imports them
INSTALL = {"transformers": "pip install transformers", "llama.cpp": "pip install llama-cpp-python"}
Made = tuple[list[int], float]                          # tokens, and the seconds after the first
Work = Sequence[tuple[int, int]]                        # lengths of prompts and answers


class Contestant(NamedTuple):
    """Ours, or a peer."""
    name: str
    make: Callable[[Sequence[int], int], Made]          # of a prompt, and how many
    bytes: int = 0                                      # read for each token; of ours


def installed(name: str) -> bool:
    return importlib.util.find_spec(PACKAGES[name]) is not None


def not_compared(name: str) -> str:
    return f"{name} is not installed here, so nothing is compared with it: {INSTALL[name]}"


def missing() -> list[str]:
    """The peers that are not installed, with the way to get them."""
    return [f"{name} ({INSTALL[name]})" for name in PACKAGES if not installed(name)]


def ours(target: str, bits: int) -> Contestant:
    model = Model.load(target, "cpu", torch.float32 if bits == 16 else None, bits)
    limit = model.llama.config.max_position_embeddings

    def make(prompt: Sequence[int], count: int) -> Made:
        request, longest = Request(list(prompt), Settings(0.0, seed=0, max_tokens=count)), len(prompt) + count
        at_once(Engine(model, None, longest, min(limit, longest)), [request])
        return request.tokens[request.prompt:], sum(taken.seconds for taken in request.rounds[1:])
    name = "float32" if bits == 16 else f"INT{bits} in {str(model.llama.dtype)[6:]}"
    return Contestant(name, make, weight_bytes(model.llama))


def reply(model: Any, prompt: Sequence[int], count: int, **more: Any) -> tuple[list[int], float, float]:
    """transformers' `generate` -> tokens, the seconds after the first, and the seconds in all."""
    tokens, times = torch.tensor([prompt], device=model.device), list[float]()         # of the prompt and each token
    streamer = SimpleNamespace(put=lambda value: times.append(time.perf_counter()), end=lambda: None)
    made = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, do_sample=False,
                          pad_token_id=0, streamer=streamer, **more)
    return made[0, len(prompt):].tolist(), times[-1] - times[1], times[-1] - times[0]


def transformers(target: str) -> Contestant:
    from transformers import AutoModelForCausalLM, logging
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(find(target), dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None         # nobody stops early
    return Contestant("transformers float32", lambda prompt, count: reply(model, prompt, count)[:2])


def llama_cpp(gguf: str) -> Contestant:
    from llama_cpp import Llama
    threads = torch.get_num_threads()
    model = Llama(gguf, n_ctx=1024, n_threads=threads, n_threads_batch=threads, verbose=False)

    def make(prompt: Sequence[int], count: int) -> Made:
        model.reset()
        tokens = model.generate(list(prompt), temp=0.0, repeat_penalty=1.0, reset=True)
        made, times = zip(*((int(token), time.perf_counter()) for token in islice(tokens, count)))
        return list(made), times[-1] - times[0]
    return Contestant(f"llama.cpp {Path(gguf).stem.rsplit('.', 1)[-1].rsplit('-', 1)[-1]}", make)


class RandomTransformers:
    """A model of this shape with random weights, as transformers has it, and no end of text: nobody stops early."""

    def __init__(self, config: Config, device: str, dtype: torch.dtype):
        from transformers import LlamaConfig, LlamaForCausalLM, logging
        logging.set_verbosity_error()
        shape = LlamaConfig.from_dict(config.to_dict() | dict(bos_token_id=None, eos_token_id=None))
        self.on_gpu, self.vocab = device == "cuda", config.vocab_size
        with torch.inference_mode(False), torch.device(device):         # a thread of its batching is in no such mode
            self.model = LlamaForCausalLM(shape).to(dtype).eval().requires_grad_(False)

    def seconds_a_token(self, prompt: int, count: int, turns: int) -> dict[str, float]:
        """After a prompt: `generate` as it is, and on a GPU with its static cache, which it compiles for."""
        spent = {}
        for kind, cache in (("transformers", None), ("its static cache", "static"))[:1 + self.on_gpu]:
            runs = [reply(self.model, [0] * prompt, count, cache_implementation=cache)[1] for _ in range(turns + 1)]
            spent[kind] = median(runs[1:]) / (count - 1)                                    # one warms up, or compiles
        return spent

    def one_at_a_time(self, work: Work) -> float:
        """Tokens a second."""
        runs = [reply(self.model, [0] * prompt, count)[2] for prompt, count in (work[0], *work)]        # one warms up
        return sum(count for _, count in work) / sum(runs[1:])

    def batched(self, work: Work) -> float:
        """The same by continuous batching, which warms up by itself. RuntimeError if a request is not served whole."""
        from transformers import ContinuousBatchingConfig, GenerationConfig
        from transformers.generation.continuous_batching.utils import WorkloadHints
        generator, longest = torch.Generator().manual_seed(0), max(count for _, count in work)
        prompts = [torch.randint(self.vocab, (prompt,), generator=generator).tolist() for prompt, _ in work]
        settings = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=longest)
        room = ContinuousBatchingConfig(**({} if self.on_gpu else dict(num_blocks=64)))     # or all of the main memory
        hints = WorkloadHints(max(map(len, prompts)), longest, len(work))
        batching = self.model.continuous_batching_context_manager
        with (torch.inference_mode(False), torch.no_grad(),
              batching(settings, continuous_batching_config=room, workload_hints=hints) as manager):
            start, counts = time.perf_counter(), [count for _, count in work]
            unserved = {manager.add_request(p, max_new_tokens=count): count for p, count in zip(prompts, counts)}
            for result in manager:
                made = len(result.generated_tokens)
                if result.is_finished() and (unserved.pop(result.request_id) != made or result.error):
                    raise RuntimeError(result.error or f"{made} tokens are not as many as were asked for")
                if not unserved:
                    return sum(counts) / (time.perf_counter() - start)
            raise RuntimeError(f"its loop ended with {len(unserved)} requests unserved")


@torch.inference_mode()
def against(name: str, target: str, gguf: str | None, effort: Effort) -> dict[str, dict[str, Any]]:
    """Our float32 and INT8 beside a peer -> a row for each. ValueError, with the way out, where it cannot be."""
    if name not in PACKAGES:
        raise ValueError(f"--against {name!r}: the peers are {', '.join(PACKAGES)}")
    if not installed(name):
        raise ValueError(not_compared(name))
    if name == "llama.cpp" and gguf is None:
        raise ValueError("llama.cpp reads a format of its own: --gguf FILE, "
                         "made of --target with its convert_hf_to_gguf.py --outtype q8_0")
    peer = transformers(target) if name == "transformers" else llama_cpp(gguf)
    everyone, roofs, turns = [peer, *(ours(target, bits) for bits in (16, 8))], [], []
    tokenizer = Model.load(target, "cpu", torch.float32).tokenizer
    prompts = [tokenizer.prompt(prompt) for prompt in PROMPTS[:2 * effort.turns]]
    for one in everyone:
        one.make(prompts[0], 4)                         # to warm up
    for prompt in prompts:
        roofs.append(read_bandwidth())
        turns.append([one.make(prompt, effort.count // 2) for one in everyone])
    made = list(zip(*turns))
    rows = [row(label(target), everyone[i], peer, list(zip(made[0], made[i])), roofs) for i in (1, 2)]
    return {f"{row['target']}, {row['ours']}, {row['peer']}": row for row in rows}


def label(target: str) -> str:
    """A model's name without its folder on this machine."""
    return Path(target).absolute().name if Path(target).is_dir() else target


def row(target: str, one: Contestant, peer: Contestant, turns: Sequence[tuple[Made, Made]],
        roofs: Sequence[float]) -> dict[str, Any]:
    """turns: for each prompt, what the peer made and what we made; roofs: bytes a second, measured just before."""
    theirs, own = ([(len(tokens) - 1) / seconds for tokens, seconds in made] for made in zip(*turns))
    return dict(target=target, ours=one.name, peer=peer.name, tokens_per_second=median(own),
                peer_tokens_per_second=median(theirs), ratio=median(they[1] / we[1] for they, we in turns),
                bandwidth=median(rate * one.bytes / roof for rate, roof in zip(own, roofs)),
                same_texts=sum(they[0] == we[0] for they, we in turns), texts=len(turns))
