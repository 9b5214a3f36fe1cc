"""Two and four processes of this machine hold the numbers of one. They are started once, and call the functions they are sent."""

import json
import multiprocessing
import os
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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.processes import Later, read_once, several
from checkpoint.config import Config
from checkpoint.layouts import load_quantization
from conftest import ROOT, SMALL, write_model
from generate import Engine, Model, load_draft
from kernels import ops_for
from kvcache import kv_bytes
from model import Llama
from parallel import share_config, share_tensor, traffic
from request import Settings, Writer

WIDE = dict(
    hidden_size=32, intermediate_size=256, head_dim=64, num_key_value_heads=4
)  # groups of 128 divide among two


# ---- The processes


def work(rank: int, folder: str, asked: Connection) -> None:
    """Call what is sent, in a group of the first n processes, until the connection is closed."""
    torch.set_num_threads(1)
    size = 0
    for turn in iter(int, None):
        try:
            n, function, arguments = asked.recv()
        except EOFError:
            break
        if n != size:
            if size > rank:
                dist.destroy_process_group()
            if n > rank:
                dist.init_process_group(
                    "gloo",
                    store=dist.FileStore(f"{folder}/{n}-{arguments[0]}", n),
                    rank=rank,
                    world_size=n,
                )
            size = n
        try:
            asked.send((True, function(*arguments[1:]) if rank < n else None))
        except BaseException:
            asked.send((False, traceback.format_exc()))
    os._exit(0)


@pytest.fixture(scope="session")
def everywhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[Any]]]:
    """everywhere(n, function, *arguments): what it returns in each of n processes."""
    context, folder = multiprocessing.get_context("forkserver"), tmp_path_factory.mktemp("store")
    context.set_forkserver_preload(["test_parallel"])
    lines, processes, count = [context.Pipe() for _ in range(4)], [], iter(range(10**6))
    for rank, (_, theirs) in enumerate(lines):
        processes.append(
            context.Process(target=work, args=(rank, str(folder), theirs), daemon=True)
        )
        processes[-1].start()
        theirs.close()

    def call(n: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        turn = next(count)
        for own, _ in lines:
            own.send((n, function, (turn, *arguments)))
        done = [own.recv() for own, _ in lines]
        failed = [result for well, result in done if not well]
        assert not failed, "\n".join(failed)
        return [result for _, result in done[:n]]

    yield call
    for own, _ in lines:
        own.close()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "tied": write_model(folder / "tied"),
        "draft": write_model(folder / "draft", seed=0, num_hidden_layers=1),
        "biased": write_model(
            folder / "biased", seed=1, tie_word_embeddings=False, attention_bias=True, mlp_bias=True
        ),
        "wide": write_model(folder / "wide", seed=2, **WIDE),
    }


# ---- The same texts


def served(
    folder: Path,
    bits: int,
    draft: Path | str | None,
    coupled: bool,
    how: dict[str, Any],
    asked: list[dict[str, Any]],
) -> list[tuple[list[int], int, int]]:
    """The texts of these requests, made together: tokens, seed, and how often each gave way to others."""
    model = Model.load(folder, "cpu", torch.float64, bits)
    engine = Engine(model, load_draft(draft, model, torch.float64), 300, 60, 3, coupled, **how)
    requests = [
        model.request(prompt, Settings(**rest), max_len=60)
        for prompt, rest in ((one.pop("prompt"), one) for one in map(dict, asked))
    ]
    list(engine.batch.run(requests))
    return [(request.tokens, request.settings.seed, request.preempted) for request in requests]


@settings(
    max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_the_texts_are_those_of_one_process(everywhere, models, data):
    draw = lambda *choices: data.draw(st.sampled_from(choices))
    n, name, drafted, coupled = (
        draw(2, 4),
        draw("tied", "biased"),
        draw(None, "draft", "ngram"),
        draw(False, True),
    )
    bits, how = (
        draw(16, 8),
        dict(kv_bits=draw(16, 8, "8/4"), kv=draw("paged", "paged", "contiguous")),
    )
    asked = [
        dict(
            prompt="abc " * draw(1, 3, 5) + "xyz"[: draw(0, 3)],
            seed=i,
            temperature=draw(0.0, 1.0),
            max_tokens=draw(1, 9, 25),
            gamma=draw(None, 0, 3) if coupled and drafted else 2 if drafted else None,
        )
        for i in range(draw(1, 4))
    ]
    ask = (models[name], bits, models.get(drafted, drafted), coupled, how, asked)
    alone = served(*ask)
    for found in everywhere(n, served, *ask):
        assert [text for text, *_ in found] == [text for text, *_ in alone]


def test_texts_that_give_way_to_others_are_the_same(everywhere, models):
    c, asked = (
        Config.load(models["biased"]),
        [dict(prompt="abc" * i, seed=i, temperature=1.0, max_tokens=40) for i in (3, 1, 2)],
    )
    memory = lambda n: (
        6 * kv_bytes(2, c.num_key_value_heads // n, c.head_dim, 16, torch.float64)
    )  # six blocks
    alone = served(models["biased"], 16, None, True, dict(kv_memory=memory(1)), asked)
    assert (
        sum(times for *_, times in alone)
        and everywhere(
            2, served, models["biased"], 16, None, True, dict(kv_memory=memory(2)), asked
        )
        == [alone] * 2
    )


def test_what_is_random_or_measured_is_the_firsts(everywhere, models):
    """No seed, and γ by the clock: all processes make the same texts, or they would wait for each other for ever."""
    asked = [dict(prompt="abc", temperature=1.0, max_tokens=30) for _ in range(3)]
    a, b = everywhere(2, served, models["biased"], 16, models["draft"], False, {}, asked)
    assert a == b and len({seed for _, seed, _ in a}) == 3


def logits(folder: Path, bits: int, dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode():
        return Llama.load(folder, "cpu", dtype, bits=bits)(torch.arange(40) * 6).double()


@pytest.mark.parametrize(
    "name, bits, dtype, within",
    [
        ("tied", 16, torch.float32, 1e-4),
        ("biased", 8, torch.float32, 1e-4),
        ("wide", 4, torch.float64, 1e-12),
        ("wide", 8, torch.bfloat16, 0.05),
    ],
)
def test_the_logits_are_those_of_one_process(everywhere, models, name, bits, dtype, within):
    whole = logits(models[name], bits, dtype)
    for found in everywhere(2, logits, models[name], bits, dtype):
        assert (
            found.shape == whole.shape and (found - whole).abs().max() <= within * whole.abs().max()
        )


# ---- Shares


@given(st.sampled_from([1, 2, 3, 4, 8]), st.data())
def test_shares_are_the_whole(n, data):
    """Put together, they are the tensor; where there are more processes than K/V heads, some have the same."""
    draw = lambda most: data.draw(st.integers(1, most))
    own, others, repeated = (
        draw(4),
        draw(5),
        data.draw(st.sampled_from([r for r in (1, 2, 4) if n % r == 0])),
    )
    whole = torch.arange(n // repeated * own * others).view(-1, others)
    for x, shape, dim in ((whole, (own, others), 0), (whole.T, (others, own), 1)):
        found = [share_tensor(x, shape, rank, n) for rank in range(n)]
        assert torch.equal(torch.cat(found[::repeated], dim), x) and all(
            map(torch.equal, found, [f for f in found[::repeated] for _ in range(repeated)])
        )
        assert all(
            part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for part in found
        )
    V = n + draw(20)
    rows = [share_tensor(torch.arange(1, V + 1), (-(-V // n),), rank, n) for rank in range(n)]
    assert (
        torch.equal(torch.cat(rows)[:V], torch.arange(1, V + 1)) and not torch.cat(rows)[V:].any()
    )
    assert torch.equal(share_tensor(whole, whole.shape, n - 1, n), whole)


@given(
    st.sampled_from([2, 3, 4, 8]),
    st.sampled_from([1, 2, 3, 4, 6]),
    st.sampled_from([1, 2, 3]),
    st.integers(1, 40),
)
def test_a_model_that_cannot_be_shared_is_refused_by_name(n, G, R, F):
    config = Config(
        **SMALL | dict(num_attention_heads=G * R, num_key_value_heads=G, intermediate_size=F)
    )
    wrong = [
        name
        for name, well in (
            ("num_attention_heads", G * R % n == 0),
            ("num_key_value_heads", G % n == 0 or n % G == 0),
            ("intermediate_size", F % n == 0),
        )
        if not well
    ]
    if wrong:
        with pytest.raises(
            ValueError,
            match=f"^{wrong[0]} is .*which {n} processes cannot share: start another number",
        ):
            share_config(config, n)
    else:
        own = share_config(config, n)
        assert own.query_size * n == config.query_size and own.kv_size == max(
            config.kv_size // n, config.head_dim
        )


def test_stored_groups_and_orders_of_columns_are_cut_whole_or_refused():
    config, foreign = (
        Config(**SMALL | dict(intermediate_size=96)),
        dict(quant_method="gptq", bits=8, group_size=32, sym=True),
    )
    for how, says in (
        (foreign, "intermediate_size is 96, .* have groups of 32"),
        (foreign | dict(desc_act=True), r"another order \(act-order\)"),
        (
            dict(quant_method="quant.py", bits="nf4", group=64, head_bits=16, method="rtn"),
            "groups of 64",
        ),
    ):
        with pytest.raises(ValueError, match=says):
            share_config(replace(config, quantization=load_quantization(how)), 2)
    for how in (
        foreign | dict(group_size=-1),
        dict(quant_method="quant.py", bits="fp8", group=128, head_bits=8, method="rtn"),
    ):
        assert (
            share_config(replace(config, quantization=load_quantization(how)), 2).intermediate_size
            == 48
        )


def refused(folder: Path, bits: int) -> str:
    with pytest.raises(ValueError) as told:
        Llama.load(folder, "cpu", bits=bits)
    return str(told.value)


def test_groups_of_four_bits_that_do_not_divide_are_refused_before_memory_is_asked_for(
    everywhere, models
):
    assert all(
        "groups of 128" in why and "intermediate_size is 256" in why
        for why in everywhere(4, refused, models["wide"], 4)
    )


# ---- Cost


def counted(folder: Path, T: int) -> int:
    """Bytes that a pass gives to the others."""
    llama, sent, reduce, gather = (
        Llama.load(folder, "cpu", torch.float64),
        [],
        dist.all_reduce,
        dist.all_gather,
    )
    try:
        dist.all_reduce = lambda x: (sent.append(x.nbytes), reduce(x))
        dist.all_gather = lambda every, x: (sent.append(x.nbytes), gather(every, x))
        llama(torch.arange(T))
    finally:
        dist.all_reduce, dist.all_gather = reduce, gather
    return sum(sent)


def test_the_bytes_of_a_token_are_those_of_the_formula(everywhere, models):
    assert (
        everywhere(4, counted, models["biased"], 7)
        == [7 * traffic(Config.load(models["biased"]), 4, 8)] * 4
    )


def memory(folder: Path, small: Path) -> int:
    """Bytes that loading takes at its peak."""
    kilobytes = lambda key: next(
        int(line.split()[1])
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(key)
    )
    Llama.load(small, "cpu", torch.float32)
    Path("/proc/self/clear_refs").write_text("5")
    start = kilobytes("VmRSS")
    Llama.load(folder, "cpu", torch.float32)
    return 1024 * (kilobytes("VmHWM") - start)


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc"
)
def test_loading_takes_a_share_and_one_tensor(everywhere, models, tmp_path):
    write_model(
        tmp_path,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=2048,
        tie_word_embeddings=False,
    )
    sizes = [
        place.nbytes for place in Llama(Config.load(tmp_path), "meta", seed=None).places().values()
    ]
    assert (
        max(everywhere(2, memory, tmp_path, models["tied"]))
        < sum(sizes) / 2 + 2 * max(sizes) + 4e6
        < 0.85 * sum(sizes)
    )


def shared() -> list[Any]:
    here, free = ops_for("cpu"), 1000 * (dist.get_rank() + 1)
    read = [None]
    try:
        read = [several(), read_once(lambda: f"line of {dist.get_rank()}")]
        read_once(lambda: int("no number"))
    except ValueError as error:
        read.append(str(error))
    return [here.share_memory(free, torch.device("cpu")), here.agree([dist.get_rank(), 7]), *read]


def test_memory_is_shared_and_what_is_read_is_the_firsts(everywhere):
    assert (
        everywhere(2, shared)
        == [[500, [0, 7], True, "line of 0", "invalid literal for int() with base 10: 'no number'"]]
        * 2
    )


# ---- Ends


def interrupted(folder: Path) -> list[Any]:
    """Ctrl-C in the first process after five pieces of text, then another text with the same engine."""

    def stop(number: int, frame: Any) -> None:
        raise AssertionError("at once")

    model, done = Model.load(folder, "cpu", torch.float64), []
    engine, before = Engine(model, None, 300, 60, 3), signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.SIG_IGN if dist.get_rank() else Later(stop))
    try:
        read_once(lambda: "a line")
        for after in (5, 100):
            requests = [
                model.request("abc", Settings(seed=seed, temperature=1.0, max_tokens=20))
                for seed in (1, 2)
            ]
            told = list[str]()

            def show(piece: str, origin: str) -> None:
                told.append(piece)
                if len(told) == after and not dist.get_rank():
                    os.kill(os.getpid(), signal.SIGINT)

            try:
                for result in engine.serve(
                    [Writer(model.tokenizer, request, "abc", show) for request in requests]
                ):
                    done.append((result.tokens, result.finish_reason))
            except KeyboardInterrupt:
                done.append("interrupted")
    finally:
        signal.signal(signal.SIGINT, before)
    return done


def test_an_interrupt_stops_all_after_the_same_step_and_they_go_on_together(everywhere, models):
    a, b = everywhere(2, interrupted, models["biased"])
    whole = [
        text[1:]
        for text, *_ in served(
            models["biased"],
            16,
            None,
            False,
            {},
            [dict(prompt="abc", seed=seed, temperature=1.0, max_tokens=20) for seed in (1, 2)],
        )
    ]
    assert (
        a == b
        and a[2] == "interrupted"
        and {reason for _, reason in a[:2]} == {"interrupted"}
        and 2 <= len(a[0][0]) < 20
    )
    assert sorted(text for text, _ in a[3:]) == sorted(text[-20:] for text in whole)


def killed(rank: int) -> tuple[int, float, list[str]]:
    """The status of the command line, seconds to its end, and its last lines, once a process has died in the middle of a batch."""
    lines = "\n".join(
        json.dumps(
            dict(prompt="Once", seed=i, max_tokens=1 if i == 3 else 900, stop="no such text")
        )
        for i in range(4)
    )
    command = [sys.executable, "generate.py", "--tensor-parallel", "2", "--prompts", "-"]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as first:
        first.stdin.write(lines)
        first.stdin.close()
        assert json.loads(first.stdout.readline())["index"] == 3
        children = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
        begun = time.perf_counter()
        os.kill(int(children[0]) if rank else first.pid, signal.SIGKILL)
        said = first.stderr.read()  # until the last process has closed it
        return (
            first.wait(),
            time.perf_counter() - begun,
            [line for line in said.splitlines() if line.startswith("error") or "Traceback" in line],
        )


def stopped(*command: str) -> tuple[str, int]:
    """What was said, and the status, after a Ctrl-C at a terminal while the processes begin."""
    with subprocess.Popen(
        [sys.executable, *command],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as first:
        while (
            first.poll() is None
            and not Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text()
        ):
            time.sleep(0.01)
        os.killpg(first.pid, signal.SIGINT)  # all processes of the terminal's group
        return first.communicate()[1], first.wait()


@pytest.mark.skipif(
    not Path("/proc/self/task").exists(),
    reason="the children of a process are read from Linux's /proc",
)
@pytest.mark.meanwhile(stopped, "generate.py", "--tensor-parallel", "2", "Once")
def test_an_interrupt_while_the_processes_begin_ends_all_in_silence(meanwhile):
    assert meanwhile() == ("", 130)


@pytest.mark.skipif(
    not Path("/proc/self/task").exists(),
    reason="the children of a process are read from Linux's /proc",
)
@pytest.mark.parametrize(
    "rank", [pytest.param(rank, marks=pytest.mark.meanwhile(killed, rank)) for rank in (0, 1)]
)
def test_a_process_that_is_killed_ends_all_with_one_line(rank, meanwhile):
    status, seconds, lines = meanwhile()
    assert status == (2 if rank else -signal.SIGKILL) and seconds < 10
    assert lines == [
        f"error: process {rank + 1} of 2 has ended, and so do all: it was killed, or its machine is gone"
    ]
