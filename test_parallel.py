"""Two and four processes of this machine have the numbers of one. They are started once, and call
the functions that they are sent."""

import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from app.launch import read_once
from checkpoint.config import Config
from checkpoint.layouts import load_quantization
from checkpoint.weights import weight_bytes
from conftest import examples
from errors import UserError
from generate import Engine
from kvcache import KVCache, KVSpec
from loading import Model, check_draft, load_draft
from model import Llama
from parallel import group_for, num_processes, shard_tensor
from request import Settings
from settings import Options
from testing.folders import write_model
from testing.heads import random_head, write_head
from testing.models import SMALL
from testing.pages import ROOT
from testing.programs import Terminal, heard

WIDE = dict(hidden_size=32, intermediate_size=256, head_dim=64, num_key_value_heads=4)
QUIET = os.environ | {"OMP_NUM_THREADS": "1"}


# ---- The processes


def work(rank: int, folder: str, calls: Connection) -> None:
    """Call what is sent, in a group of the first n processes, until the connection is closed."""
    torch.set_num_threads(1)
    heard()
    size = 0
    while True:
        try:
            n, turn, function, arguments = calls.recv()
        except EOFError:
            os._exit(0)
        if n != size:
            if size > rank:
                dist.destroy_process_group()
            if n > rank:
                store = dist.FileStore(f"{folder}/{turn}", n)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=n)
            size = n
        try:
            calls.send((True, function(*arguments) if rank < n else None))
        except BaseException:
            calls.send((False, traceback.format_exc()))


@pytest.fixture(scope="session")
def everywhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[Any]]]:
    """everywhere(n, function, *arguments): what it returns in each of n processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["test_parallel"])
    folder = str(tmp_path_factory.mktemp("store"))
    pipes = [context.Pipe() for _ in range(4)]
    for rank, (_, theirs) in enumerate(pipes):
        context.Process(target=work, args=(rank, folder, theirs), daemon=True).start()
        theirs.close()
    turns = iter(range(10**6))

    def call(n: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        turn = next(turns)
        for ours, _ in pipes:
            ours.send((n, turn, function, arguments))
        answers = [ours.recv() for ours, _ in pipes]
        failed = [answer for is_well, answer in answers if not is_well]
        assert not failed, "\n".join(failed)
        return [answer for _, answer in answers[:n]]

    yield call
    for ours, _ in pipes:
        ours.close()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    biased = dict(tie_word_embeddings=False, attention_bias=True, mlp_bias=True)
    target = Llama(Config(**SMALL))
    with_rows = random_head(target, seed=3, has_embedding=True)  # of the whole vocabulary
    return {
        "eagle": write_head(folder / "eagle", random_head(target, seed=3)),
        "eagle with rows": write_head(folder / "eagle with rows", with_rows),
        "tied": write_model(folder / "tied"),
        "draft": write_model(folder / "draft", seed=0, num_hidden_layers=1),
        "biased": write_model(folder / "biased", seed=1, **biased),
        "qwen2": write_model(folder / "qwen2", seed=1, model_type="qwen2"),
        "qwen3": write_model(folder / "qwen3", seed=1, model_type="qwen3"),
        "wide": write_model(folder / "wide", seed=2, **WIDE),  # two shards of groups of 128
    }


# ---- The same texts


def texts_of(
    folder: Path,
    bits: int,
    draft: Path | str | None,
    coupled: bool,
    cache: dict[str, Any],
    asked: list[dict[str, Any]],
) -> list[tuple[list[int], int, int, int]]:
    """The texts of these requests, made together: tokens, seed, how often each was preempted, how
    many drafts were accepted."""
    model = Model.load(folder, "cpu", torch.float64, bits)
    engine = Engine(
        model,
        load_draft(draft, model, torch.float64),
        Options(max_len=60, max_batch=3, verify="coupled" if coupled else "block", **cache),
        tokens=300,
    )
    requests = []
    for fields in asked:
        chosen = {name: value for name, value in fields.items() if name != "prompt"}
        requests.append(model.request(fields["prompt"], Settings(**chosen), Options(max_len=60)))
    list(engine.batcher.run(requests))
    texts = []
    for request in requests:
        num_accepted = sum(stats.num_accepted for stats in request.rounds)
        seed = request.settings.seed
        texts.append((request.tokens, seed, request.num_preemptions, num_accepted))
    return texts


@examples(3)
@given(st.data())
def test_texts_are_those_of_one_process(everywhere, models, data):
    def draw(*choices: Any) -> Any:
        return data.draw(st.sampled_from(choices))

    n = draw(2, 4)
    name = draw("tied", "biased")
    draft = draw(None, "draft", "ngram")
    coupled = draw(False, True)
    bits = draw(16, 8)
    cache = dict(kv_bits=draw(16, 8, "8/4"), kv=draw("paged", "paged", "contiguous"))
    asked = []
    for seed in range(draw(1, 4)):
        gamma = None
        if draft:
            gamma = draw(None, 0, 3) if coupled else 2
        prompt = "abc " * draw(1, 3, 5) + "xyz"[: draw(0, 3)]
        chosen = dict(temperature=draw(0.0, 1.0), max_tokens=draw(1, 9, 25), gamma=gamma)
        asked.append(dict(prompt=prompt, seed=seed, **chosen))
    arguments = (models[name], bits, models.get(draft, draft), coupled, cache, asked)
    alone = [tokens for tokens, *_ in texts_of(*arguments)]
    for texts in everywhere(n, texts_of, *arguments):
        assert [tokens for tokens, *_ in texts] == alone


@pytest.mark.parametrize("head, bits", [("eagle", 16), ("eagle with rows", 8)])
def test_a_head_drafts_the_same_in_every_process(everywhere, models, head, bits):
    """With the target's key/value heads shared, and with replicas."""
    chosen = dict(temperature=1.0, max_tokens=12, gamma=2)
    asked = [dict(prompt="abc" * i, seed=i, **chosen) for i in (5, 1)]
    arguments = models["tied"], bits, models[head], False, dict(kv_bits=8), asked
    alone = texts_of(*arguments)
    assert sum(num_accepted for *_, num_accepted in alone)
    for n in (2, 4):
        assert everywhere(n, texts_of, *arguments) == [alone] * n


def test_preempted_requests_have_the_same_texts(everywhere, models):
    c = Config.load(models["biased"])
    asked = [dict(prompt="abc" * i, seed=i, temperature=1.0, max_tokens=40) for i in (3, 1, 2)]

    def six_blocks(n: int) -> dict[str, int]:
        kv_heads = c.num_key_value_heads // n
        return dict(kv_memory=6 * KVSpec(2, kv_heads, c.head_dim, dtype=torch.float64).bytes(16))

    alone = texts_of(models["biased"], 16, None, True, six_blocks(1), asked)
    assert sum(times for _, _, times, _ in alone)
    texts = everywhere(2, texts_of, models["biased"], 16, None, True, six_blocks(2), asked)
    assert texts == [alone] * 2


def test_seeds_and_measured_times_are_the_first_processes(everywhere, models):
    """No seed, and γ by the clock: all make the same texts, or they would wait for ever."""
    asked = [dict(prompt="abc", temperature=1.0, max_tokens=30) for _ in range(3)]
    a, b = everywhere(2, texts_of, models["biased"], 16, models["draft"], False, {}, asked)
    assert a == b and len({seed for _, seed, *_ in a}) == 3


def logits_of(folder: Path, bits: int, dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode():
        llama = Llama.load(folder, "cpu", dtype, bits=bits)
        cache = KVCache(llama.kv_spec(), 40)
        seq, _ = cache.open(())
        tokens = torch.arange(40) * 6
        return llama(tokens, cache.extend([(seq, tokens.tolist())])).double()


def test_logits_are_those_of_one_process(everywhere, models):
    for n, name, bits, dtype, tolerance in (
        (2, "tied", 16, torch.float32, 1e-4),
        (2, "biased", 8, torch.float32, 1e-3),
        (4, "biased", 16, torch.float64, 1e-12),
        (2, "qwen2", 8, torch.float64, 1e-12),
        (4, "qwen3", 16, torch.float64, 1e-12),
        (2, "wide", 4, torch.float64, 1e-12),
        (2, "wide", 8, torch.bfloat16, 0.05),
    ):
        alone = logits_of(models[name], bits, dtype)
        shared = everywhere(n, logits_of, models[name], bits, dtype)
        for logits in shared:
            assert logits.shape == alone.shape
            assert (logits - alone).abs().max() <= tolerance * alone.abs().max()
            assert torch.equal(logits, shared[0])


# ---- Shards


@given(st.sampled_from([1, 2, 3, 4, 8]), st.data())
def test_shards_together_are_the_tensor(n, data):
    """With more processes than key/value heads, some have replicas of one shard."""
    rows = data.draw(st.integers(1, 4))
    columns = data.draw(st.integers(1, 5))
    replicas = data.draw(st.sampled_from([r for r in (1, 2, 4) if n % r == 0]))
    whole = torch.arange(n // replicas * rows * columns).view(-1, columns)
    for x, shape, dim in ((whole, (rows, columns), 0), (whole.T, (columns, rows), 1)):
        shards = [shard_tensor(x, shape, rank, n) for rank in range(n)]
        assert torch.equal(torch.cat(shards[::replicas], dim), x)
        for rank, shard in enumerate(shards):
            assert torch.equal(shard, shards[rank - rank % replicas])
            assert shard.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert torch.equal(shard_tensor(whole, whole.shape, n - 1, n), whole)
    V = n * n + data.draw(st.integers(0, 20))
    vocabulary = torch.arange(1, V + 1)
    for x in (vocabulary, vocabulary[:, None]):
        shape = (-(-V // n), *x.shape[1:])
        padded = torch.cat([shard_tensor(x, shape, rank, n) for rank in range(n)])
        assert torch.equal(padded[:V], x) and not padded[V:].any()


@given(
    st.sampled_from([2, 3, 4, 8]),
    st.sampled_from([1, 2, 3, 4, 6]),
    st.sampled_from([1, 2, 3]),
    st.integers(1, 40),
)
def test_a_model_that_cannot_be_shared_is_refused_by_name(n, G, R, F):
    heads = dict(num_attention_heads=G * R, num_key_value_heads=G, intermediate_size=F)
    config = Config(**SMALL | heads)
    wrong = []
    if G * R % n:
        wrong.append("num_attention_heads")
    if G % n and n % G:
        wrong.append("num_key_value_heads")
    if F % n:
        wrong.append("intermediate_size")
    if wrong:
        with pytest.raises(UserError, match=f"^{wrong[0]} is .*which {n} processes cannot share"):
            config.shard(n)
    else:
        shard = config.shard(n)
        assert shard.query_size * n == config.query_size
        assert shard.kv_size == max(config.kv_size // n, config.head_dim)


def test_groups_of_columns_are_cut_whole_or_refused():
    config = Config(**SMALL | dict(intermediate_size=96))
    gptq = dict(quant_method="gptq", bits=8, group_size=32, sym=True)
    ours = dict(quant_method="quant.py", group=64, head_bits=16, method="rtn")

    def stored_as(fields: dict[str, Any]) -> Config:
        return replace(config, quantization=load_quantization(fields))

    for fields, says in (
        (gptq, r"intermediate_size is 96, .* a multiple of 64 \(2 processes · 32 columns"),
        (gptq | dict(desc_act=True), r"another order \(act-order\)"),
        (ours | dict(bits="nf4"), "· 64 columns"),
    ):
        with pytest.raises(UserError, match=says):
            stored_as(fields).shard(2)
    fp8 = ours | dict(bits="fp8", group=128, head_bits=8)
    for fields in (gptq | dict(group_size=-1), fp8):
        assert stored_as(fields).shard(2).intermediate_size == 48
    with pytest.raises(
        UserError, match="vocab_size is 15, which 4 processes cannot share: it must be at least 16;"
    ):
        replace(config, vocab_size=15).shard(4)


# ---- Cost


def bytes_sent(folder: Path, T: int) -> int:
    """Bytes that a pass gives to the other processes."""
    llama = Llama.load(folder, "cpu", torch.float64)
    all_reduce = dist.all_reduce
    all_gather = dist.all_gather
    sent = []

    def counted_reduce(x: torch.Tensor) -> None:
        sent.append(x.nbytes)
        all_reduce(x)

    def counted_gather(shards: list[torch.Tensor], x: torch.Tensor) -> None:
        sent.append(x.nbytes)
        all_gather(shards, x)

    try:
        dist.all_reduce = counted_reduce
        dist.all_gather = counted_gather
        llama(torch.arange(T))
    finally:
        dist.all_reduce = all_reduce
        dist.all_gather = all_gather
    return sum(sent)


def test_the_bytes_of_a_token_are_those_of_the_formula(everywhere, models):
    c = Config.load(models["biased"])
    numbers = (2 * c.num_hidden_layers + 1) * c.hidden_size + math.ceil(c.vocab_size / 4)
    expected = 7 * 8 * numbers  # tokens, bytes of a float64
    assert everywhere(4, bytes_sent, models["biased"], 7) == [expected] * 4


def told_and_held(folder: Path) -> tuple[int, int]:
    """The bytes that are told of the weights, and those that they have before they are packed."""
    llama = Llama.load(folder, "cpu", torch.float32, trainable=True)
    held = sum(tensor.nbytes for tensor in llama.named_tensors().values())
    return weight_bytes(llama.pack_weights()), held


def test_each_process_tells_the_weights_that_it_holds(everywhere, models):
    for told, held in everywhere(2, told_and_held, models["tied"]):
        assert told == held


def kilobytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1])
    raise KeyError(key)


def peak_memory(folder: Path, small: Path) -> int:
    """Bytes that loading takes at its peak."""
    Llama.load(small, "cpu", torch.float32)
    Path("/proc/self/clear_refs").write_text("5")
    start = kilobytes("VmRSS")
    Llama.load(folder, "cpu", torch.float32)
    return 1024 * (kilobytes("VmHWM") - start)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux's /proc has the peak")
def test_loading_takes_a_shard_and_one_tensor(everywhere, models, tmp_path):
    shape = dict(hidden_size=512, intermediate_size=2048, num_hidden_layers=3, vocab_size=2048)
    heads = dict(num_attention_heads=8, num_key_value_heads=4, head_dim=64)
    write_model(tmp_path, **shape, **heads, tie_word_embeddings=False)
    tensors = Llama(Config.load(tmp_path), "meta", seed=None).named_tensors().values()
    sizes = [tensor.nbytes for tensor in tensors]
    limit = sum(sizes) / 2 + 2 * max(sizes) + 4e6
    assert limit < 0.85 * sum(sizes)
    peaks = (max(everywhere(2, peak_memory, tmp_path, models["tied"])) for _ in range(3))
    assert any(peak < limit for peak in peaks)  # now and then the system counts other pages, too


# ---- What the first process decides


def decisions(folder: Path) -> list[Any]:
    rank = dist.get_rank()
    cpu = torch.device("cpu")
    group = group_for(cpu)
    answers = [num_processes(), group.memory(1000 * (rank + 1), cpu)]
    answers += [group.agree([rank, 7]), group.agree([[rank + 5]])]
    lines = iter([f"line {rank}"])
    answers += [read_once(lambda: next(lines)), rank == 0 or next(lines) == "line 1"]
    for load in (lambda: Llama.load(folder, "cpu", bits=4), lambda: check_draft(folder, 4)):
        try:
            load()
        except UserError as error:
            answers.append(str(error))
    return answers


def test_memory_is_shared_and_what_is_read_is_the_first_processes(everywhere, models):
    a, b = everywhere(2, decisions, models["tied"])
    assert a == b
    *answers, refused, draft_refused = a
    assert answers == [2, 500, [0, 7], [[5]], "line 0", True]
    assert "128 columns" in refused  # before memory is asked for
    assert draft_refused == refused


# ---- The command line


def children(pid: int) -> list[int]:
    """The processes that it has started."""
    return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


@pytest.mark.slow
def test_torchrun_starts_it_too():
    flags = ["generate.py", "--seed", "1", "--max-tokens", "8", "--json", "-"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *flags],
        input="Once upon",
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=QUIET,
    )
    assert done.returncode == 0, done.stderr
    (result,) = map(json.loads, done.stdout.splitlines())
    model = Model.load("tiny", "cpu")
    request = model.request("Once upon", Settings(seed=1, max_tokens=8))
    assert result["prompt"] == "Once upon" and result["prompt_tokens"] == request.tokens
    list(Engine(model, None, Options(max_len=100, max_batch=1), tokens=100).batcher.run([request]))
    assert result["tokens"] == request.tokens[request.num_prompt_tokens :]
    assert done.stderr.count("8 tokens (") == 1


on_linux = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="Linux's /proc has the children of a process"
)
FOREVER = json.dumps(dict(prompt="Once", max_tokens=900, stop="no such text"))
NOBODY = "error: process 2 of 2 was killed, so all of them end"


def shared_out(*flags: str) -> subprocess.Popen[str]:
    """generate.py --tensor-parallel 2, in a session of its own, as a terminal has one."""
    return subprocess.Popen(
        [sys.executable, "generate.py", "--tensor-parallel", "2", *flags],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=QUIET,
        start_new_session=True,
        preexec_fn=heard,
    )


def errors(said: str) -> list[str]:
    return [line for line in said.splitlines() if not re.match("running|keys|.*tokens", line)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "lines, status, told",
    [
        ('{"prompt": 5}', 1, ["line 1 is left out: prompt is 5: it must be a text"]),
        ("\udcff", 2, ["error: \\udcff has bytes that are not valid text: write it in UTF-8"]),
    ],
)
def test_what_is_wrong_is_said_once_and_the_status_is_the_first_processes(lines, status, told):
    flags = ["--prompts", "-"] if status == 1 else [lines]
    done = shared_out(*flags)
    out, said = done.communicate(lines if status == 1 else None)
    assert done.returncode == status and out.count("\n") == (status == 1)
    assert [line[: len(start)] for line, start in zip(errors(said), told, strict=True)] == told


@on_linux
@pytest.mark.slow
@pytest.mark.parametrize(
    "number, status, told",
    [(signal.SIGINT, 130, []), (signal.SIGTERM, 143, []), (signal.SIGKILL, 2, [NOBODY])],
)
def test_amid_a_batch_all_processes_end_at_once(number, status, told):
    """After a signal to the group of a terminal; or when one of them is killed."""
    first = shared_out("--prompts", "-")
    short = json.dumps(dict(prompt="Once", max_tokens=1))
    first.stdin.write("\n".join([FOREVER, FOREVER, short]))
    first.stdin.close()
    assert json.loads(first.stdout.readline())["index"] == 2
    processes = children(first.pid)
    assert len(processes) == 2
    begin = time.perf_counter()
    if number == signal.SIGKILL:
        os.kill(processes[1], number)
    else:
        os.killpg(first.pid, number)
    said = first.stderr.read()  # until the last process has closed it
    assert time.perf_counter() - begin < 10
    assert (first.wait(), errors(said)) == (status, told)
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes)


@on_linux
@pytest.mark.slow
def test_an_interrupt_while_processes_begin_ends_all_in_silence():
    first = shared_out("Once")
    while first.poll() is None and len(children(first.pid)) < 2:
        time.sleep(0.01)
    time.sleep(1)  # until now Python itself tells a signal
    os.killpg(first.pid, signal.SIGINT)
    assert first.communicate() == ("", "") and first.returncode == 130


@on_linux
@pytest.mark.slow
def test_in_a_chat_the_first_process_has_the_terminal_and_ctrl_c_ends_all():
    terminal = Terminal("--tensor-parallel", "2", "--max-tokens", "20", "--seed", "1")
    terminal.read_until("> ")
    assert " tokens (" in terminal.type("Once upon a time")
    time.sleep(0.5)  # readline loses a signal that comes between its prompt and its wait
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.process.wait(timeout=30) == 130
