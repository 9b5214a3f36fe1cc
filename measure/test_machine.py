"""The machine: its instruction set belongs to its results; the stopwatch takes medians."""

import platform
from types import SimpleNamespace

import pytest
import torch

from cpu import native
from measure import clock, machine


@pytest.fixture
def cpu(tmp_path, monkeypatch):
    """Pretends a CPU of this name with these flags."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(machine, "has_c", lambda: True)
    monkeypatch.delenv("LLAMA_MARCH", raising=False)

    def pretend(name: str, flags: str) -> None:
        lines = f"processor\t: 0\nmodel name\t: {name}\nflags\t\t: {flags}\n"
        machine.CPUINFO.write_text(lines + lines.replace(name, "another"))

    return pretend


def test_cpus_of_one_name_with_other_instructions_have_files_of_their_own(cpu):
    files = []
    for flags in (
        "sse avx2",
        "avx2 avx_vnni",
        "sse avx2 avx512f",
        "avx2 avx_vnni avx512f avx512_vnni avx512_bf16",
        "sse",
    ):
        cpu("AMD EPYC", flags)
        files.append(machine.results_file().as_posix())
    assert files == [
        "results/amd-epyc-avx2.json",
        "results/amd-epyc-avx-vnni.json",
        "results/amd-epyc-avx512.json",
        "results/amd-epyc-avx512-vnni.json",
        f"results/amd-epyc-{platform.machine().replace('_', '-')}.json",
    ]


@pytest.mark.parametrize(
    "implementer, part, features, file",
    [
        ("0x41", "0xd0c", "fp asimd asimddp", "aarch64-0x41-0xd0c-neon-dotprod"),
        ("0x41", "0xd08", "fp asimd", "aarch64-0x41-0xd08-neon"),
    ],
)
def test_an_arm_has_its_name_and_instructions(cpu, implementer, part, features, file, monkeypatch):
    """Linux tells numbers."""
    lines = f"Features\t: {features}\nCPU implementer\t: {implementer}\nCPU part\t: {part}\n"
    machine.CPUINFO.write_text(lines)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert machine.results_file().stem == file
    monkeypatch.setenv("LLAMA_MARCH", "armv8.2-a+dotprod")
    assert machine.instruction_set() == "neon-dotprod"


def test_a_mac_is_no_gpu(cpu, monkeypatch):
    printed = SimpleNamespace(stdout="Apple M2\n")
    monkeypatch.setattr(machine.subprocess, "run", lambda *args, **named: printed)
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert machine.identity() == {"machine": "Apple M2", "instructions": "arm64"}


def test_a_machine_that_is_held_down_writes_the_file_of_the_older_cpu(cpu, monkeypatch):
    cpu("Intel(R) Xeon(R) @ 2.0GHz", "avx2 avx512f avx512_bf16 avx512_vnni")
    assert machine.has_bfloat16()
    marches = {"sapphirerapids": "amx", "alderlake": "avx-vnni"}
    marches |= {"x86-64-v3": "avx2", "skylake-avx512": "avx512"}
    for march, words in marches.items():
        monkeypatch.setenv("LLAMA_MARCH", march)
        assert machine.has_bfloat16() == (words == "amx")
        assert machine.results_file().name == f"intel-r-xeon-r-2-0ghz-{words}.json"


def test_figures_without_c_have_a_file_of_their_own(monkeypatch):
    """A machine that has no compiler, or whose C is turned off, is much slower."""
    with monkeypatch.context() as changed:
        changed.setattr(native, "load_library", lambda: native.Loaded(None, "no compiler"))
        assert machine.results_file().stem.endswith("-no-c")
    assert machine.has_c() == (native.library() is not None)
    monkeypatch.setenv("LLAMA_PLAIN", "1")
    assert machine.results_file().stem.endswith("-no-c")


def test_a_gpu_is_named_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200 (141 GB)")
    assert "nvidia" not in machine.results_file().name  # the CPU beside it
    found = machine.machine(5e12, on_gpu=True)
    assert machine.results_file(found).name == "nvidia-h200-141-gb.json"
    assert (found["machine"], found["instructions"]) == ("NVIDIA H200 (141 GB)", "")
    assert found["read_bandwidth"] == 5e12


def test_seconds_are_a_median_without_the_first_call(monkeypatch):
    durations = [100.0, *[1.0, 7.0, 2.0] * 3]  # the first call is slow
    now = [0.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])

    def run() -> None:
        now[0] += durations.pop(0)

    assert clock.median_seconds(run) == 2.0
    assert not durations


def test_the_bandwidth_is_one_that_memory_can_have():
    assert 1e8 < clock.read_bandwidth(8) < 1e13


def test_a_gpus_clocks_have_risen_before_it_is_read(monkeypatch):
    did = []
    now = [0.0]

    class Numbers:
        is_cuda = True
        nbytes = 8

        def clone(self):
            did.append("copy")
            return self

        def sum(self):
            now[0] += 0.1
            return self

        def item(self):
            did.append("read")

    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(clock.torch, "ones", lambda *size, **how: Numbers())
    assert clock.read_bandwidth(1, "cuda") == pytest.approx(80)
    assert did[:10] == ["copy", "read"] * 5  # half a second
    assert did.count("copy") in (5, 6)
    Numbers.is_cuda = False
    did.clear()
    clock.read_bandwidth(1)
    assert "copy" not in did
