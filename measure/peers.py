"""The same prompts on the same weights, made by others: Hugging Face transformers, and llama.cpp.

    python bench.py --against transformers --target NAME
    python bench.py --against llama.cpp --target NAME --gguf FILE           NAME's weights in llama.cpp's own format, 8 bits

Everybody reads the same tokens and makes as many, greedily, with the same number of threads; the prompts go round in turns, and a ratio
is the median over them. Seconds are counted from the first token to the last, so nobody's reading of the prompt is in them. Each answers
with the tokens it made: where the weights are the same numbers they agree, up to near-ties, and a peer that was set up wrongly shows.

Invariant: a peer that is not there is named, with the way to get it; it is never left out in silence.

`RandomTransformers` is what gpu.py compares with: a model of true shapes, one request at a time or by its own continuous batching.

Not covered: peers' own speculation.
"""
import importlib.util
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from config import Config
from engine import Engine
from matmul import read_bandwidth
from measure.pair import Effort, weight_bytes
from pretrained import Model
from request import Request, Settings
from weights import find

PROMPTS = ("Once upon a time, in a village by the sea,", "The first rule of measuring is", "To make bread, one needs", "My grandmother used to say that",
           "The train left the station at", "A computer reads its memory")
PACKAGES = {"transformers": "transformers", "llama.cpp": "llama_cpp"}
INSTALL = {"transformers": "pip install transformers", "llama.cpp": "pip install llama-cpp-python"}
Made = tuple[list[int], float]                          # tokens, and the seconds after the first
Make = Callable[[Sequence[int], int], Made]             # of a prompt, and how many


class Contestant(NamedTuple):
    name: str
    make: Make
    bytes: int = 0                                      # read for each token; of ours


def check(name: str) -> None:
    """ValueError if this peer is not known, or not installed."""
    if name not in PACKAGES:
        raise ValueError(f"--against {name!r}: the peers are {', '.join(PACKAGES)}")
    if not installed(name):
        raise ValueError(f"{name} is not installed here, so nothing is compared with it: {INSTALL[name]}")


def installed(name: str) -> bool:
    return importlib.util.find_spec(PACKAGES[name]) is not None


def missing() -> list[str]:
    """Those that are not here, with the way to get them."""
    return [f"{name} ({INSTALL[name]})" for name in PACKAGES if not installed(name)]


# ---- The contestants ------------------------------------------------------------------------------------------------------------

def ours(target: str, bits: int) -> Contestant:
    model = Model.load(target, "cpu", torch.float32 if bits == 16 else None, bits)
    limit = model.llama.config.max_position_embeddings

    def make(prompt: Sequence[int], count: int) -> tuple[list[int], float]:
        request = Request(list(prompt), Settings(0.0, seed=0, max_tokens=count))
        for _ in Engine(model, None, len(prompt) + count, min(limit, len(prompt) + count)).batch.run([request]):
            pass
        return request.tokens[request.prompt:], sum(taken.seconds for taken in request.rounds[1:])
    return Contestant("float32" if bits == 16 else f"INT{bits} in {str(model.llama.dtype)[6:]}", make, weight_bytes(model.llama))


class Clock:
    """Told of each token by transformers' `generate`: when the first one came, and the last."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())          # the prompt, then token by token

    def end(self) -> None:
        pass

    @property
    def seconds(self) -> float:
        return self.times[-1] - self.times[1]


def transformers(target: str) -> Contestant:
    from transformers import AutoModelForCausalLM, logging
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(find(target), dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None         # nobody stops early

    def make(prompt: Sequence[int], count: int) -> tuple[list[int], float]:
        clock, tokens = Clock(), torch.tensor([list(prompt)])
        made = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, do_sample=False, pad_token_id=0, streamer=clock)
        return made[0, len(prompt):].tolist(), clock.seconds
    return Contestant("transformers float32", make)


def llama_cpp(gguf: str) -> Contestant:
    from llama_cpp import Llama
    model = Llama(gguf, n_ctx=1024, n_threads=torch.get_num_threads(), n_threads_batch=torch.get_num_threads(), verbose=False)

    def make(prompt: Sequence[int], count: int) -> tuple[list[int], float]:
        made, times = [], []
        model.reset()
        for token in model.generate(list(prompt), temp=0.0, repeat_penalty=1.0, reset=True):
            made.append(int(token))
            times.append(time.perf_counter())
            if len(made) == count:
                break
        return made, times[-1] - times[0]
    return Contestant(f"llama.cpp {Path(gguf).stem.rsplit('.', 1)[-1].rsplit('-', 1)[-1]}", make)


class RandomTransformers:
    """A model of this shape with random weights, as transformers has it. Nobody stops early: there is no end of text."""

    def __init__(self, config: Config, device: str, dtype: torch.dtype):
        from transformers import LlamaConfig, LlamaForCausalLM, logging
        logging.set_verbosity_error()
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
                 "max_position_embeddings", "tie_word_embeddings")
        shape = LlamaConfig(**{name: getattr(config, name) for name in names}, bos_token_id=None, eos_token_id=None)
        with torch.inference_mode(False), torch.device(device):                # its continuous batching has a thread of its own, in no such mode
            self.model, self.device, self.vocab = LlamaForCausalLM(shape).to(dtype).eval().requires_grad_(False), device, config.vocab_size

    def seconds(self, prompt: int, count: int, **more: str) -> float:
        """`generate`, greedily."""
        tokens, start = torch.zeros(1, prompt, dtype=torch.int64, device=self.device), time.perf_counter()
        made = self.model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, do_sample=False, pad_token_id=0, **more)
        made[0, -1].item()                                                     # waits for the device
        return time.perf_counter() - start

    def seconds_a_token(self, prompt: int, count: int, turns: int) -> dict[str, float]:
        """After a prompt: `generate` as it is, and on a GPU with its static cache, which it compiles for."""
        spent = {}
        for kind, more in (("transformers", {}), *([("its static cache", dict(cache_implementation="static"))] if self.device == "cuda" else [])):
            self.seconds(prompt, count, **more)                                # once to warm up, or to compile
            spent[kind] = median((self.seconds(prompt, count, **more) - self.seconds(prompt, 1, **more)) / (count - 1) for _ in range(turns))
        return spent

    def one_at_a_time(self, work: Sequence[tuple[int, int]]) -> float:
        """Tokens a second of these (prompt, answer)."""
        self.seconds(*work[0])                                                 # once to warm up
        return sum(count for _, count in work) / sum(self.seconds(*one) for one in work)

    def batched(self, work: Sequence[tuple[int, int]]) -> float:
        """The same by its continuous batching, which warms up by itself: all arrive at once. RuntimeError for one that it did not serve whole."""
        from transformers import ContinuousBatchingConfig, GenerationConfig
        from transformers.generation.continuous_batching.utils import WorkloadHints
        generator = torch.Generator().manual_seed(0)
        prompts = [torch.randint(self.vocab, (prompt,), generator=generator).tolist() for prompt, _ in work]
        settings = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=max(count for _, count in work))
        size = WorkloadHints(max_prompt_length=max(map(len, prompts)), max_generated_length=settings.max_new_tokens, num_requests=len(work))
        room = ContinuousBatchingConfig() if self.device == "cuda" else ContinuousBatchingConfig(num_blocks=64)         # or all of the main memory
        begin = partial(self.model.continuous_batching_context_manager, settings, continuous_batching_config=room, workload_hints=size)
        with torch.inference_mode(False), torch.no_grad(), begin() as manager:
            start = time.perf_counter()
            wanted = {manager.add_request(prompt, max_new_tokens=count): count for prompt, (_, count) in zip(prompts, work)}
            while wanted:
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    raise RuntimeError(f"its loop ended with {len(wanted)} requests unserved")
                if result is not None and result.is_finished():
                    if result.error or len(result.generated_tokens) != wanted.pop(result.request_id):
                        raise RuntimeError(result.error or f"{len(result.generated_tokens)} tokens are not as many as were asked for")
            return sum(count for _, count in work) / (time.perf_counter() - start)


# ---- In turns -------------------------------------------------------------------------------------------------------------------

@torch.inference_mode()
def against(name: str, target: str, gguf: str | None, effort: Effort) -> dict[str, dict[str, Any]]:
    """Our float32 and INT8 beside a peer -> a row for each. ValueError, with the way out, where it is not there."""
    check(name)
    if name == "llama.cpp" and gguf is None:
        raise ValueError("llama.cpp reads a format of its own: --gguf FILE, made of --target with its convert_hf_to_gguf.py --outtype q8_0")
    peer = transformers(target) if name == "transformers" else llama_cpp(gguf)
    own, roofs, turns = [ours(target, bits) for bits in (16, 8)], [], []
    tokenizer = Model.load(target, "cpu", torch.float32).tokenizer
    prompts = [tokenizer.prompt(prompt) for prompt in PROMPTS[:2 * effort.turns]]
    for one in (peer, *own):
        one.make(prompts[0], 4)                                                # once to warm up
    for prompt in prompts:
        roofs.append(read_bandwidth())
        turns.append([one.make(prompt, effort.count // 2) for one in (peer, *own)])
    rows = [row(label(target), one, peer, [(turn[0], turn[i]) for turn in turns], roofs) for i, one in enumerate(own, 1)]
    return {f"{row['target']}, {row['ours']}, {row['peer']}": row for row in rows}


def label(target: str) -> str:
    """A model's name without the folders that it lies in on this machine."""
    return target if not Path(target).is_dir() else Path(target).absolute().name


def row(target: str, one: Contestant, peer: Contestant, turns: Sequence[tuple[Made, Made]], roofs: Sequence[float]) -> dict[str, Any]:
    """turns: of each prompt, what the peer made and what we made; roofs: bytes a second that the machine read just before."""
    rates = lambda i: [(len(turn[i][0]) - 1) / turn[i][1] for turn in turns]
    return dict(target=target, ours=one.name, peer=peer.name, tokens_per_second=median(rates(1)), peer_tokens_per_second=median(rates(0)),
                ratio=median(theirs[1] / own[1] for theirs, own in turns), bandwidth=median(rate * one.bytes / roof for rate, roof in zip(rates(1), roofs)),
                same_texts=sum(theirs[0] == own[0] for theirs, own in turns), texts=len(turns))
