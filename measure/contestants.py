"""What peers.py compares: this project, transformers, OpenVINO GenAI, llama.cpp and vLLM.

A contestant makes texts greedily, as many tokens as are asked for, and all but vLLM give the logits
of a text.
Each computes in the way that is fastest on this machine, in as many threads as PyTorch has:

    transformers   PyTorch's own attention; float32, or bfloat16 where the CPU has instructions
    OpenVINO       the target, converted by optimum-intel: as it is (computed in bfloat16 where the
                   CPU has instructions), in INT8 with a scale a row, and in INT4 with groups of 32
                   (embedding and head in INT8). Prompts together are one batch of its paged cache
    llama.cpp      a GGUF, by the calls of its C library; with its flash attention
    vLLM           its engine, in this process; without its compiled graphs, which make it ready in
                   6 seconds in place of 90 (its speed is not measured)

The packages are imported where they are used: `pip install '.[peers]'` brings them, except vLLM,
which needs an environment of its own. llama.cpp comes as source, so pip compiles it for the CPU at
hand.

Invariant: a prompt is read anew each time; no contestant keeps one.
Not covered: GenAI gives no logits, so those of OpenVINO are of the same file, which is run without
GenAI, and keys and values are rounded by its default there as well.
"""

import math
import os
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from numpy.ctypeslib import as_array
from torch import Tensor

from checkpoint.hub import find_folder
from checkpoint.weights import weight_bytes
from loading import Model
from measure.machine import has_bfloat16
from measure.serving import engine_for, serve
from quant import Kind
from request import Request, Settings

Prompts = Sequence[Sequence[int]]
OPENVINO = {  # how optimum-intel rounds weights; None: not at all
    "float32": None,
    "int8": dict(bits=8, sym=False),
    "int4": dict(bits=4, sym=True, group_size=32, ratio=1.0),
}
ROOM = 2048  # tokens that a text may have


class Made(NamedTuple):
    """Texts that were made together: each one's new tokens, and seconds."""

    texts: list[list[int]]
    first: float  # until the first one's first token
    total: float

    @property
    def tokens(self) -> list[int]:
        """The first one's."""
        return self.texts[0]

    @property
    def tokens_per_second(self) -> float:
        """After the first token."""
        return (len(self.tokens) - 1) / (self.total - self.first)


class Contestant(NamedTuple):
    """This project, or a peer."""

    name: str
    make: Callable[[Prompts, int], Made]  # of prompts, and how many tokens each gets
    logits: Callable[[Sequence[int]], Tensor] | None  # of each token: [T, V]; None: not given
    bytes: int = 0  # of weights that a token reads; 0 for a peer

    def seconds(self, prompts: Prompts, count: int) -> float:
        return self.make(prompts, count).total


# ---- This project --------------------------------------------------------------------------------


def ours(target: str | Path, bits: Kind = 16) -> Contestant:
    """Its name tells the width of its weights: bits 16 leaves them in the target's dtype."""
    model = Model.load(target, "cpu", torch.float32, bits)
    dtype = str(model.llama.weight_dtype).removeprefix("torch.")
    name = dtype if bits == 16 else f"INT{bits}"

    def make(prompts: Prompts, count: int) -> Made:
        settings = Settings(temperature=0.0, seed=0, max_tokens=count)
        requests = [Request(prompt, settings) for prompt in prompts]
        served = serve(engine_for(model, None, requests), requests)
        return Made(served.texts, served.first_token[0], served.seconds)

    def logits(tokens: Sequence[int]) -> Tensor:
        return model.llama(torch.tensor(tokens))

    return Contestant(name, make, logits, weight_bytes(model.llama, read=True))


# ---- transformers --------------------------------------------------------------------------------


def transformers(target: str, dtype: str) -> Contestant:
    from transformers import AutoModelForCausalLM, logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(find_folder(target), dtype=dtype).eval()
    model.generation_config.eos_token_id = None  # no text stops early

    def logits(tokens: Sequence[int]) -> Tensor:
        return model(torch.tensor([tokens])).logits[0]

    return Contestant(f"transformers {dtype}", partial(transformers_text, model), logits)


def transformers_text(model: Any, prompts: Prompts, count: int) -> Made:
    """Texts by transformers' `generate`, in one batch that is padded on the left."""
    longest = max(map(len, prompts))
    tokens = torch.zeros(len(prompts), longest, dtype=torch.int64, device=model.device)
    mask = torch.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    times: list[float] = []  # when it gets the prompt, and each token
    streamer = SimpleNamespace(
        put=lambda value: times.append(time.perf_counter()), end=lambda: None
    )
    texts = model.generate(
        tokens,
        attention_mask=mask,
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        streamer=streamer,
    )
    return Made(texts[:, longest:].tolist(), times[1] - times[0], times[-1] - times[0])


# ---- OpenVINO ------------------------------------------------------------------------------------


def convert_to_openvino(target: str, width: str, folder: Path) -> None:
    """Write the target in OpenVINO's format, its weights rounded."""
    from openvino import save_model
    from openvino_tokenizers import convert_tokenizer
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
    from transformers import AutoTokenizer

    source = find_folder(target)
    rounding = OPENVINO[width]
    model = OVModelForCausalLM.from_pretrained(
        source,
        export=True,
        compile=False,
        load_in_8bit=False,
        quantization_config=OVWeightQuantizationConfig(**rounding) if rounding else None,
    )
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(source)
    both = convert_tokenizer(tokenizer, with_detokenizer=True)  # GenAI wants them in the folder
    for name, model in zip(("tokenizer", "detokenizer"), both):
        save_model(model, folder / f"openvino_{name}.xml")


def openvino(target: str, width: str) -> Contestant:
    """The target in one of the widths of OPENVINO."""
    import openvino_genai as genai
    from openvino import Core
    from openvino import Tensor as Numbers

    scratch = TemporaryDirectory()  # it lasts as long as `logits`, which reads it
    convert_to_openvino(target, width, Path(scratch.name))
    computed = "bf16" if has_bfloat16() else "f32"
    properties = {
        "INFERENCE_PRECISION_HINT": computed,
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "PERFORMANCE_HINT": "LATENCY",
    }
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1  # GB
    scheduler.max_num_batched_tokens = 2 * ROOM  # a prompt is one pass
    scheduler.dynamic_split_fuse = False
    scheduler.enable_prefix_caching = False
    pipeline = genai.ContinuousBatchingPipeline(scratch.name, scheduler, "CPU", properties)

    def make(prompts: Prompts, count: int) -> Made:
        settings = genai.GenerationConfig()
        settings.max_new_tokens = count
        settings.ignore_eos = True
        settings.do_sample = False
        inputs = [Numbers(torch.tensor([prompt]).numpy()) for prompt in prompts]
        start = time.perf_counter()
        results = pipeline.generate(inputs, [settings] * len(inputs))
        total = time.perf_counter() - start
        first = results[0].perf_metrics.get_ttft().mean / 1000  # milliseconds
        return Made([list(result.m_generation_ids[0]) for result in results], first, total)

    def logits(tokens: Sequence[int]) -> Tensor:
        model = Core().compile_model(f"{scratch.name}/openvino_model.xml", "CPU", properties)
        positions = torch.arange(len(tokens))[None]
        inputs = {
            "input_ids": torch.tensor([tokens]),
            "attention_mask": torch.ones_like(positions),
            "position_ids": positions,
            "beam_idx": torch.zeros(1, dtype=torch.int32),
        }
        names = {name for place in model.inputs for name in place.names}
        given = {name: inputs[name].numpy() for name in names}
        return torch.tensor(model.create_infer_request().infer(given)["logits"][0])

    if width == "float32" and computed == "bf16":
        width = "bfloat16"
    return Contestant(f"OpenVINO {width}", make, logits)


# ---- vLLM ----------------------------------------------------------------------------------------


def vllm(target: str, dtype: str) -> Contestant:
    """Only its texts: it keeps its logits and the times of its tokens to itself."""
    os.environ |= {
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GB
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    from vllm import LLM, SamplingParams

    engine = LLM(
        str(find_folder(target)),
        dtype=dtype,
        max_model_len=ROOM,
        enable_prefix_caching=False,
        enforce_eager=True,
    )

    def make(prompts: Prompts, count: int) -> Made:
        settings = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        start = time.perf_counter()
        results = engine.generate(inputs, settings, use_tqdm=False)
        total = time.perf_counter() - start
        return Made([list(result.outputs[0].token_ids) for result in results], math.nan, total)

    return Contestant(f"vLLM {dtype}", make, logits=None)


# ---- llama.cpp -----------------------------------------------------------------------------------


def llama_cpp(gguf: str) -> Contestant:
    """By the calls of its C library, as its Python class makes one text at a time."""
    import llama_cpp as lib

    quiet = lib.llama_log_callback(lambda level, text, data: None)
    lib.llama_log_set(quiet, None)
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(gguf.encode(), lib.llama_model_default_params())
    vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))

    @cache
    def context(count: int) -> Any:
        """For `count` texts at once."""
        settings = lib.llama_context_default_params()
        settings.n_ctx = max(ROOM, 512 * count)
        settings.n_batch = ROOM
        settings.n_seq_max = count
        settings.kv_unified = False  # a text attends to its own keys
        settings.flash_attn_type = 1
        settings.n_threads = settings.n_threads_batch = torch.get_num_threads()
        return lib.llama_init_from_model(model, settings)

    def read(count: int, entries: Sequence[tuple[int, int, int, bool]]) -> Tensor:
        """Read tokens: (text, position, token, whether its logits are wanted) -> logits [R, V]."""
        batch = lib.llama_batch_init(len(entries), 0, 1)
        batch.n_tokens = len(entries)
        for i, (text, position, token, is_wanted) in enumerate(entries):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = text
            batch.logits[i] = is_wanted
        if lib.llama_decode(context(count), batch):
            raise RuntimeError("llama.cpp cannot read these tokens")
        lib.llama_batch_free(batch)
        rows = []
        for i, (*_, is_wanted) in enumerate(entries):
            if is_wanted:
                row = lib.llama_get_logits_ith(context(count), i)
                rows.append(torch.tensor(as_array(row, (vocab_size,))))
        return torch.stack(rows)

    def begin(prompts: Prompts, all_logits: bool = False) -> Tensor:
        """Read prompts anew -> the logits of each one's last token, or of all."""
        lib.llama_memory_clear(lib.llama_get_memory(context(len(prompts))), True)
        entries = []
        for text, prompt in enumerate(prompts):
            last = len(prompt) - 1
            for i, token in enumerate(prompt):
                entries.append((text, i, token, all_logits or i == last))
        return read(len(prompts), entries)

    def make(prompts: Prompts, count: int) -> Made:
        steps = []  # each one's new tokens
        times = []
        start = time.perf_counter()
        logits = begin(prompts)
        for i in range(count):
            steps.append(logits.argmax(-1).tolist())
            times.append(time.perf_counter() - start)
            if i + 1 < count:
                entries = []
                for text, token in enumerate(steps[-1]):
                    entries.append((text, len(prompts[text]) + i, token, True))
                logits = read(len(prompts), entries)
        return Made([list(text) for text in zip(*steps)], times[0], times[-1])

    make.quiet = quiet  # the library holds no reference to it, and calls it to the end
    logits = partial(begin, all_logits=True)
    name = f"llama.cpp {stored_width(gguf)}"
    return Contestant(name, make, lambda tokens: logits([tokens]))


def stored_width(gguf: str) -> str:
    """Of a GGUF, by its name: q8_0, say."""
    return Path(gguf).stem.lower().replace("-", ".").split(".")[-1]
