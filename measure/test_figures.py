"""Known seconds are known figures: the rows of all tables, by a clock that known work moves."""

import ctypes
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import bench
from automaton import Grammars
from checkpoint.hub import find_folder
from checkpoint.weights import weight_bytes
from kernels import Ops
from measure import (
    clock,
    contestants,
    drafts,
    gpu_cases,
    gpu_peers,
    invariance,
    pair,
    peers,
    profiler,
    report,
    serving,
    steps,
)
from measure.gpu_parts import SHAPES
from measure.serving import Served, random_request
from measure.sizes import QUICK, Sizes
from model import Llama
from runner import ModelRunner
from testing.folders import write_model
from train import perplexity


class Clock:
    """Stands in for time.perf_counter. is_late: as on a GPU, work takes no time until the host
    waits for it, because it asks for a number."""

    def __init__(self, patch: Any):
        self.patch = patch  # pytest's monkeypatch
        self.is_late = False
        self.now = 0.0
        self.queued = 0.0  # seconds of work that the host has not waited for
        patch.setattr("time.perf_counter", lambda: self.now)
        patch.setattr(torch.cuda, "synchronize", self.wait)
        for name in ("item", "tolist"):
            ask = getattr(Tensor, name)
            patch.setattr(Tensor, name, lambda x, ask=ask: (self.wait(), ask(x))[1])

    def wait(self) -> None:
        self.now += self.queued
        self.queued = 0.0

    def work(self, seconds: float) -> None:
        self.queued += seconds
        if not self.is_late:
            self.wait()

    def times(self, owner: Any, name: str, seconds: Callable[..., float]) -> None:
        """Let each call of owner.name take `seconds` of its arguments."""
        does = getattr(owner, name)

        def run(*args: Any, **options: Any) -> Any:
            self.work(seconds(*args, **options))
            return does(*args, **options)

        self.patch.setattr(owner, name, run)


@pytest.fixture
def time(monkeypatch):
    """The clock. Models run in plain torch, which calls one for each pass."""
    monkeypatch.setenv("LLAMA_PLAIN", "1")
    return Clock(monkeypatch)


def time_passes(time, seconds):
    """Let a pass take `seconds(llama)`, and the first one of each shape 100 more: as on a GPU,
    where it compiles kernels."""
    seen = set()

    def of_pass(llama, tokens, *more):
        shape = llama, len(tokens)
        warm_up = 0.0 if shape in seen else 100.0
        seen.add(shape)
        return seconds(llama) + warm_up

    time.is_late = True
    time.times(Llama, "__call__", of_pass)


# ---- The clock itself, and serving


def test_the_bandwidth_is_that_of_the_fastest_read(time):
    seconds = iter([9.0, *[4.0, 2.0, 8.0] * 3])
    time.times(torch.Tensor, "sum", lambda x: next(seconds))
    assert clock.read_bandwidth(1) == 2**20 / 2


def test_a_text_is_timed_by_the_steps_that_gave_it_tokens(time, monkeypatch):
    requests = [random_request(2, 6, 0), random_request(2, 2, 1)]
    script = [(1.0, (3, 0), 50), (2.0, (2, 1), 90), (4.0, (1, 1), 20)]  # seconds, tokens, bytes
    batcher = SimpleNamespace(waiting=[], running=[])

    def step():
        seconds, counts, num_bytes = script.pop(0)
        time.work(seconds)
        batcher.waiting.clear()
        batcher.running = script
        monkeypatch.setattr(serving, "bytes_in_use", lambda caches: num_bytes)
        new_tokens = {request: [7] * n for request, n in zip(requests, counts) if n}
        for request, tokens in new_tokens.items():
            request.tokens += tokens
        return new_tokens

    batcher.add = batcher.waiting.append
    batcher.step = step
    served = serving.serve(SimpleNamespace(batcher=batcher, caches=[]), requests)
    assert served == Served(
        7.0,
        8,
        num_first_tokens=4,
        first_token=[1.0, 3.0],
        gaps=[2.0, 4.0, 4.0],
        cache_bytes=90,
        texts=[[7] * 6, [7] * 2],
    )
    assert (served.tokens_per_second, served.seconds_per_token) == (8 / 7, 10 / 4)


# ---- A CPU's tables


def test_steps(time, monkeypatch):
    """The host waits for the logits; a pass that warms up, and the tokens before, are not timed.
    Only sizes that the context holds are measured."""
    sizes = {"rows5": (9, 5), "prompt128": (0, 9), "prompt1500": (0, 1500)}
    monkeypatch.setattr(steps, "SIZES", sizes)
    time_passes(time, lambda llama: getattr(llama.config.quantization, "bits", 16) / 2)
    rows = steps.steps(QUICK)
    for width, seconds in (("float32", 8.0), ("INT8", 4.0), ("INT4", 2.0)):
        assert rows[f"tiny, {width}"] == {
            "target": "tiny",
            "width": width,
            "rows5": 8 / seconds,
            "rows5_seconds": seconds,
            "prompt128": 8 / seconds,
            "prompt128_seconds": seconds,
        }
    (table,) = report.sections({"steps": rows})
    cells = dict(zip(table.headers, table.rows[1]))
    assert cells["rows 5"] == "4000 ms, 2x"
    assert "prompt 1500" not in cells


def test_grammars(time, monkeypatch):
    """A step of texts with a grammar takes 5 seconds, one without takes 4; what comes before the
    first tokens does not count."""
    pytest.importorskip("llguidance", reason="the extra 'server' is not installed")
    asked = []

    def seconds(runner, scheduled):
        asked.append([item.request.grammar_state is not None for item in scheduled])
        request = scheduled[0].request
        is_first = len(request.tokens) == request.num_prompt_tokens
        return 100.0 if is_first else 4.0 + all(asked[-1])

    time.times(ModelRunner, "step", seconds)
    time.times(Grammars, "compile", lambda *arguments: 7.0)
    (row,) = steps.grammar_costs(replace(QUICK, turns=2)).values()
    assert row == dict(target="tiny", vocab_size=4096, first_mask=7.0, share=1 - 4 / 5)
    assert asked == ([[False] * 16] * QUICK.longest + [[True] * 16] * QUICK.longest) * 2


def test_drafts(time, monkeypatch):
    """The target is its own draft, so all drafts are accepted: rounds of 3, 3, 3 and 1 tokens, of
    which the first reads the prompt. A draft takes 1 second, and a plain token 4."""
    loaded = []
    asked = []

    def load_draft(*args, **options):
        loaded.append(load(*args, **options))
        return loaded[-1]

    def told(model, draft, prompt, settings):
        asked.append((settings.temperature, settings.gamma))
        return made(model, draft, prompt, settings)

    load = drafts.load_draft
    made = drafts.Told
    monkeypatch.setattr(drafts, "WIDTHS", {"float32": 16})
    monkeypatch.setattr(drafts, "load_draft", load_draft)
    monkeypatch.setattr(drafts, "Told", told)
    time.times(Llama, "__call__", lambda llama, *more: 1.0 if llama in loaded[0].models else 4.0)
    sizes = Sizes(gammas=(2,), num_tokens=10, openings=("Once",))
    rows = drafts.drafts(sizes, "tiny", ["tiny"], None)
    assert asked == [(T, gamma) for T in (0.0, 1.0) for gamma in (0, 2, None)]
    assert rows["tiny, float32, tiny, T 0, 2"] == {
        "target": "tiny, float32",
        "draft": "tiny",
        "temperature": 0.0,
        "gamma": "2",
        "tokens_per_round": 7 / 3,
        "speed_up": 7 * 4 / (6 + 6 + 4),
        "same_texts": 1,
        "texts": 1,
        "draft_cost": 0.25,
        "acceptance": "1.00 1.00",
    }


def test_peers(time, monkeypatch, tmp_path):
    """Of a prompt transformers reads 8 tokens a second and we 32; of new tokens it makes 1/2 a
    second, and we 1. In bfloat16 it is twice as fast, and makes other tokens than our 0. Its first
    text is slow. To us all 1000 tokens are alike; to transformers the next one is the last."""

    def from_pretrained(folder, dtype):
        speed = {"float32": 1, "bfloat16": 2}[dtype]
        warm_up = [1000.0]

        class Stand:
            generation_config = SimpleNamespace()
            device = "cpu"

            def eval(self):
                return self

            def __call__(self, tokens):
                return SimpleNamespace(logits=100 * F.one_hot(tokens.roll(-1), 1000).float())

            def generate(self, tokens, streamer, max_new_tokens, **options):
                streamer.put(tokens)
                time.work(tokens.numel() / 8 / speed)
                streamer.put(None)
                for _ in range(max_new_tokens - 1):
                    time.work(warm_up.pop() if warm_up else 2 / speed)
                    streamer.put(None)
                return F.pad(tokens, (0, max_new_tokens), value=speed - 1)

        return Stand()

    module = SimpleNamespace(
        logging=SimpleNamespace(disable_progress_bar=lambda: None),
        AutoModelForCausalLM=SimpleNamespace(from_pretrained=from_pretrained),
    )
    monkeypatch.setitem(sys.modules, "transformers", module)
    monkeypatch.setattr(peers, "check_peer", lambda name, gguf: None)
    monkeypatch.setattr(peers, "has_bfloat16", lambda: True)
    windows = []
    monkeypatch.setattr(peers, "TEXT", tmp_path / "text")
    monkeypatch.setattr(peers, "TEXT_LENGTH", 7)
    peers.TEXT.write_text("the cat, the dog, the cat and the dog")
    measure = peers.perplexity_of
    monkeypatch.setattr(
        peers, "perplexity_of", lambda one, texts: windows.append(texts) or measure(one, texts)
    )
    shape = dict(vocab_size=1000, max_position_embeddings=600, tie_word_embeddings=False)
    target = str(write_model(tmp_path / "model", scale=0.0, **shape))
    llama = Llama.load(target, "cpu", torch.float32)
    read = weight_bytes(llama) - llama.embed.weight.nbytes
    roofs = [1.0 * read, 2.0 * read]
    monkeypatch.setattr(peers, "read_bandwidth", lambda: roofs.pop(0))
    time.times(Llama, "__call__", lambda llama, x, *more: 1.0 if len(x) <= 16 else len(x) / 32)
    sizes = replace(QUICK, openings=("Once", "One day"))
    rows = peers.against("transformers", target, None, sizes)
    theirs = ("transformers float32", "transformers bfloat16")
    ours = ("float32", "INT8", "INT4", "INT4, groups of 32")
    assert [*rows] == [f"model, {mine}, {peer}" for peer in theirs for mine in ours]
    assert windows == [windows[0]] * 6 and [len(tokens) for tokens in windows[0]] == [7]
    row = rows["model, float32, transformers float32"]
    assert row == {
        "target": "model",
        "ours": "float32",
        "peer": theirs[0],
        "tokens_per_second": 1.0,
        "peer_tokens_per_second": 0.5,
        "ratio": 2.0,
        "bandwidth": 0.75,
        "same_texts": 2,
        "texts": 2,
        "perplexity": pytest.approx(1000),
        "peer_perplexity": pytest.approx(1),
        "prompt128": 4.0,
        "prompt512": 4.0,
        "together": (512 / 8 + 31 * 2) / (512 / 32 + 31),
    }
    halves = {"peer": theirs[1], "peer_tokens_per_second": 1.0, "same_texts": 0}
    halves |= {name: row[name] / 2 for name in ("ratio", "prompt128", "prompt512", "together")}
    assert rows["model, float32, transformers bfloat16"] == row | halves


def test_a_batch_of_transformers_is_padded_on_the_left():
    def generate(tokens, attention_mask, streamer, **options):
        assert tokens.tolist() == [[1, 2, 3], [0, 0, 4]]
        assert attention_mask.tolist() == [[1, 1, 1], [0, 0, 1]]
        for _ in range(3):
            streamer.put(None)
        return torch.cat((tokens, tokens[:, -1:] + 1, tokens[:, -1:] + 2), 1)

    model = SimpleNamespace(generate=generate, device="cpu")
    assert contestants.transformers_text(model, [[1, 2, 3], [4]], 2).texts == [[4, 5], [5, 6]]


def test_openvino_reads_each_prompt_anew_with_all_threads(time, monkeypatch):
    """A prompt's token takes a second, a new one two; its logits are of the number after it."""
    made = []

    def pipeline(folder, scheduler, device, properties):
        assert (device, properties["INFERENCE_NUM_THREADS"]) == ("CPU", 7)
        assert properties["INFERENCE_PRECISION_HINT"] == "bf16"
        assert not scheduler.enable_prefix_caching

        def generate(inputs, settings):
            assert len(inputs) == len(settings) and settings[0].ignore_eos
            first = inputs[0].size
            count = settings[0].max_new_tokens
            time.work(first + 2 * (count - 1))
            milliseconds = SimpleNamespace(mean=1000 * first)
            metrics = SimpleNamespace(get_ttft=lambda: milliseconds)
            return [
                SimpleNamespace(m_generation_ids=[[n.item(-1)] * count], perf_metrics=metrics)
                for n in inputs
            ]

        return SimpleNamespace(generate=generate)

    def infer(inputs):
        tokens = torch.tensor(inputs["input_ids"])
        assert inputs["attention_mask"].shape == tokens.shape
        return {"logits": F.one_hot(tokens + 1, 50).float().numpy()}

    compiled = SimpleNamespace(
        inputs=[SimpleNamespace(names={"input_ids"}), SimpleNamespace(names={"attention_mask"})],
        create_infer_request=lambda: SimpleNamespace(infer=infer),
    )
    core = SimpleNamespace(compile_model=lambda *arguments: compiled)
    genai = SimpleNamespace(
        SchedulerConfig=SimpleNamespace,
        GenerationConfig=SimpleNamespace,
        ContinuousBatchingPipeline=pipeline,
    )
    monkeypatch.setitem(sys.modules, "openvino_genai", genai)
    openvino = SimpleNamespace(Core=lambda: core, Tensor=lambda numbers: numbers)
    monkeypatch.setitem(sys.modules, "openvino", openvino)
    monkeypatch.setattr(contestants, "convert_to_openvino", lambda *to: made.append(to[:2]))
    monkeypatch.setattr(contestants, "has_bfloat16", lambda: True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    names = []
    for width in contestants.OPENVINO:
        peer = contestants.openvino("model", width)
        names.append(peer.name)
        made_texts = [[3] * 4, [5] * 4]
        assert peer.make([[1, 2, 3], [4, 5]], 4) == contestants.Made(made_texts, 3.0, 9.0)
        assert peer.logits([1, 5, 7]).argmax(-1).tolist() == [2, 6, 8]
    assert made == [("model", width) for width in contestants.OPENVINO]
    assert names == ["OpenVINO bfloat16", "OpenVINO int8", "OpenVINO int4"]


def test_llama_cpp_reads_each_prompt_anew_with_all_threads(time, monkeypatch):
    """Each token takes a second, and its logits are of the number after it."""

    class Stand:
        llama_log_callback = staticmethod(lambda function: function)

        def __getattr__(self, name):
            return lambda *arguments: arguments

        def llama_log_set(self, callback, data):
            self.callback = weakref.ref(callback)  # C holds no reference to it

        def llama_vocab_n_tokens(self, vocab):
            return 50

        def llama_context_default_params(self):
            return SimpleNamespace()

        def llama_init_from_model(self, model, settings):
            assert settings.n_threads == settings.n_threads_batch == 7
            assert self.callback() is not None
            return SimpleNamespace(known={text: [] for text in range(settings.n_seq_max)})

        def llama_get_memory(self, context):
            return context

        def llama_memory_clear(self, context, data):
            context.known = {text: [] for text in context.known}

        def llama_batch_init(self, n, embeddings, texts):
            rows = {name: [0] * n for name in ("token", "pos", "n_seq_id", "logits")}
            return SimpleNamespace(seq_id=[[0] for _ in range(n)], **rows)

        def llama_decode(self, context, batch):
            context.batch = batch
            for i in range(batch.n_tokens):
                time.work(1.0)
                known = context.known[batch.seq_id[i][0]]
                assert batch.pos[i] == len(known)
                known.append(batch.token[i])
            return 0

        def llama_get_logits_ith(self, context, i):
            assert context.batch.logits[i]
            row = (ctypes.c_float * 50)()
            row[context.batch.token[i] + 1] = 9.0
            return ctypes.cast(row, ctypes.POINTER(ctypes.c_float))

    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setitem(sys.modules, "llama_cpp", Stand())
    peer = contestants.llama_cpp("a-Q8_0.gguf")
    assert peer.name == "llama.cpp q8_0"
    made = [peer.make([[1, 2, 3]], 3) for _ in range(2)]
    assert made == [contestants.Made([[4, 5, 6]], 3.0, 5.0)] * 2
    together = contestants.Made([[4, 5, 6], [9, 10, 11]], 5.0, 9.0)
    assert peer.make([[1, 2, 3], [7, 8]], 3) == together
    assert peer.logits([1, 5, 7]).argmax(-1).tolist() == [2, 6, 8]


def test_vllm_makes_texts_in_batches(time, monkeypatch):
    class Stand:
        def __init__(self, folder, dtype, **options):
            assert (folder, dtype) == (str(find_folder("tiny")), "float32")
            assert not options["enable_prefix_caching"]

        def generate(self, inputs, settings, use_tqdm):
            time.work(2.0)
            assert settings == dict(temperature=0, max_tokens=2, ignore_eos=True)
            firsts = [one["prompt_token_ids"][-1] for one in inputs]
            texts = [SimpleNamespace(token_ids=(first + 1, first + 2)) for first in firsts]
            return [SimpleNamespace(outputs=[text]) for text in texts]

    module = SimpleNamespace(LLM=Stand, SamplingParams=dict)
    monkeypatch.setitem(sys.modules, "vllm", module)
    peer = contestants.vllm("tiny", "float32")
    made = peer.make([[1, 2], [5]], 2)
    assert (peer.name, made.texts, made.total) == ("vLLM float32", [[3, 4], [6, 7]], 2.0)


def test_the_combined_table(time, monkeypatch):
    """One request makes 2, 4 and 1 tokens a second in the turns of the first row, and 8 in those of
    the second; then five requests make 4, 8 and 4 a second."""
    seconds = {"a": [4.0, 2.0, 8.0], "b": [1.0] * 3, "c": [2.0] * 3}
    seconds |= {"d": [1.0] * 3, "e": [2.0] * 3}
    served = []

    def serve_row(row, model, lengths):
        left = seconds[row.name]
        served.append((row.name, weight_bytes(model.llama), len(lengths)))
        return Served(
            left.pop(0),
            8,
            num_first_tokens=2,
            first_token=[1.0, 2.0, 9.0 - len(left)],
            gaps=[],
            cache_bytes=10 * len(left),
            texts=[[1], [3 if row.name == "b" else 2]],
        )

    monkeypatch.setattr(pair, "ONE", (pair.Technique("a", {}), pair.Technique("b", {}, 8)))
    monkeypatch.setattr(pair, "MANY", tuple(pair.Technique(name, {}, 8) for name in "cde"))
    monkeypatch.setattr(pair, "serve_row", serve_row)
    rows = pair.stack(Sizes(num_requests=5))
    plain, small = (
        weight_bytes(Llama.load("tiny", "cpu", torch.float32, bits=bits)) for bits in (16, 8)
    )
    assert served[:6] == [("a", plain, 1), ("b", small, 1)] * 3
    assert served[6:] == [(name, small, 5) for name in "cde"] * 3
    costs = dict(target="tiny", first_token=2.0, cache_bytes=20)
    first = costs | dict(name="a", tokens_per_second=2.0, weight_bytes=plain, texts=1)
    first |= dict(speed_up=1.0, gain=1.0, same_texts=2)
    second = costs | dict(name="b", tokens_per_second=8.0, weight_bytes=small, texts=1)
    second |= dict(speed_up=4.0, gain=4.0, same_texts=1)
    third = costs | dict(name="c", tokens_per_second=4.0, weight_bytes=small, texts=5)
    third |= dict(speed_up=1.0, gain=1.0, same_texts=2)
    assert list(rows.values())[:3] == [first, second, third]
    assert [row["gain"] for row in rows.values()] == [1.0, 4.0, 1.0, 2.0, 0.5]


def test_the_outputs_of_a_request_are_counted(time, monkeypatch):
    """A program that makes another second token among 4, and if the prompt is long another first
    one among 16."""
    sizes = []

    def make(prompts, count):
        n = len(prompts)
        sizes.append((n, count))
        texts = [[n if n > 4 and len(prompt) > 60 else 0, n == 4] for prompt in prompts]
        return contestants.Made(texts, 1.0, 2.0)

    peer = contestants.Contestant("peer", make, None)
    monkeypatch.setattr(peers, "check_peer", lambda *arguments: None)
    monkeypatch.setattr(peers, "rivals_of", lambda *arguments: [peer])
    monkeypatch.setattr(peers, "our_widths", lambda target: [peer])
    wanted = dict(target="tiny", program="peer", requests=32, varying=32, outputs=80)
    assert invariance.invariance("openvino", "tiny", None, Sizes(num_tokens=2)) == {
        "tiny, peer": wanted
    }
    assert sizes == [(1, 2)] * 32 + [(4, 2)] * 8 + [(16, 2)] * 2
    rows = invariance.invariance(None, "tiny", None, Sizes(num_tokens=2))
    assert rows == {"tiny, this program, peer": wanted | {"program": "this program, peer"}}


def test_bits(monkeypatch):
    """Texts that calibrate are not measured."""

    def table(name, texts, calibration, wanted, device, llama):
        told = {text[0].item() for text in texts}
        assert len(told) == 6 and told.isdisjoint(text[0].item() for text in calibration)
        return [perplexity.Row("w", "16", 9, 9, perplexity=ppl) for ppl in (4.0, 5.0)]

    corpus = SimpleNamespace(tokens=torch.arange(8 * 73))
    monkeypatch.setattr(pair, "sample_corpus", lambda *args, **options: corpus)
    monkeypatch.setattr(pair, "table", table)
    rows = pair.bits(QUICK)
    assert [(row["loss"], row["tokens"]) for row in rows] == [(0.0, 6 * 73), (0.25, 6 * 73)]


def test_phases(capsys):
    events = [("verify", 3e6, 1e6), ("draft", 1e6, 2e6), ("aten::mm", 9e6, 9e6)]
    trace = SimpleNamespace(
        key_averages=lambda: [
            SimpleNamespace(key=key, cpu_time_total=cpu, device_time_total=gpu)
            for key, cpu, gpu in events
        ]
    )
    profiler.say_phases(trace, 8.0)
    told = [line.split() for line in capsys.readouterr().err.splitlines()]
    assert told == [["verify", "3.000", "s", "37.5%"], ["draft", "2.000", "s", "25.0%"]]


# ---- A GPU's

SCALE = replace(QUICK, count=15, repeats=5)  # 15 tokens are rounds of 3, and of 5
TINY = SHAPES["tiny"]
# Those of a prompt, and of the gate and up product:
ATTENTION_BYTES = 2 * SCALE.prompt * TINY.num_key_value_heads * TINY.head_dim * 4
PRODUCT_BYTES = 2 * TINY.intermediate_size * TINY.hidden_size * 4


class Profile:
    """Of 14 tokens: two kernels, and something else."""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def key_averages(self):
        cuda, cpu = (SimpleNamespace(name=name) for name in ("CUDA", "CPU"))
        rows = [("b(int)", 14e3, 14, cuda), ("a", 28e3, 28, cuda), ("c", 99.0, 99, cpu)]
        names = "key self_device_time_total count device_type".split()
        return [SimpleNamespace(**dict(zip(names, row))) for row in rows]


GPU_ROWS = {  # a key, and the bandwidth -> its cells, where a target's pass takes 2 seconds, a
    # draft's 1/2, and each operation of a kernel 2
    ("machine", "this"): (1.0, [f"{48**3 / 1e12:.3g}", "facts"]),
    ("kernels", "attention", 1, 48, "16"): (ATTENTION_BYTES, ["2e+03", "50%"]),
    ("kernels", "attention", 2, 1, "16"): (ATTENTION_BYTES, ["2e+03", "100%"]),
    ("kernels", "product", "16 bits", 8): (PRODUCT_BYTES, ["2e+03", "50%"]),
    ("decode", "tiny", "16 bits"): (weight_bytes(Llama(TINY, "meta", seed=None)), ["0.5", "50%"]),
    ("profile", "16 bits"): (1.0, ["3.000", "3", "a 2000.0, b 1000.0"]),
    # 3 tokens for 2 + 2/2 seconds, and 5 for 2 + 4/2, in place of 1 for 2
    ("speculation", "16 bits", "16 bits", 1.0): (1.0, ["2.00", "2.50"]),
    # 101 tokens in 12 steps
    ("serving", 16): (1.0, ["4", "2e+03"]),
    ("peers", "transformers"): (1.0, ["4000", "2000", "2.00"]),
}


@pytest.mark.parametrize("key", GPU_ROWS, ids=lambda key: ", ".join(map(str, key)))
@torch.inference_mode()
def test_gpu_rows(key, time, monkeypatch):
    bandwidth, cells = GPU_ROWS[key]
    case, *key = key
    monkeypatch.setitem(SHAPES, "draft", replace(TINY, intermediate_size=32))
    monkeypatch.setattr(gpu_cases, "profile", Profile)
    monkeypatch.setattr(gpu_cases, "driver_facts", lambda: "facts")
    made = contestants.Made([[7] * 5], 1.0, 17.0)
    monkeypatch.setattr(gpu_peers, "random_transformers", lambda sizes: None)
    monkeypatch.setattr(gpu_peers, "transformers_text", lambda *args: made)
    time_passes(time, lambda llama: 0.5 if llama.config.intermediate_size == 32 else 2.0)
    if case in ("machine", "kernels"):
        time.is_late = False  # a CPU does not wait
        for owner, name in ((torch, "mm"), (Ops, "attend"), (Ops, "linear")):
            time.times(owner, name, lambda *args: 2.0)
    sizes = replace(SCALE, draft="draft", bandwidth=bandwidth)
    row = gpu_cases.CASES[case].row(sizes, *key)
    assert row[: len(cells)] == cells


@torch.inference_mode()
def test_their_attention_is_causal_where_it_is_a_prompts(monkeypatch):
    """The first query of a prompt sees its own value alone; that of a newest token sees all."""
    seen = []
    attention = F.scaled_dot_product_attention

    def observed(q, k, v, **options):
        out = attention(q, k, v, **options)
        seen.append((out[:, :, 0] - v[:, :, 0].repeat_interleave(2, 1)).abs().max().item())

    monkeypatch.setattr(F, "scaled_dot_product_attention", observed)
    monkeypatch.setattr(gpu_peers, "stopwatch", lambda run, sizes: run)
    for shape in ((1, SCALE.prompt), (4, 1)):
        gpu_peers.sdpa("FLASH_ATTENTION", SCALE, *shape)()
    assert seen[0] < 1e-6 < 0.1 < seen[1]


# ---- What is wrong


def test_a_wrong_row_is_the_commands_status(monkeypatch, tmp_path):
    """An error, too."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for cells, status in ((["ok"], 0), (["WRONG"], 1), ([], 1)):
        case = gpu_cases.Case(("a", "b"), lambda sizes: [("x",), ("y",)], lambda *key: [cells[0]])
        monkeypatch.setitem(gpu_cases.CASES, "decode", case)
        assert bench.main(["--gpu", "decode", "--quick"]) == status
