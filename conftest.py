"""What the tests share: small random models in folders of their own, such as a user might have."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = (
        "1"  # before anybody imports Triton: its kernels are then run as Python
    )

from checkpoint.config import Config
from model import Llama
from proof import Toy

if find_spec("cpu"):  # the tests of the core run without it, too
    from cpu import native

ROOT = Path(__file__).parent
PAGES = [
    page
    for folder in ("", "app", "checkpoint", "cpu", "gpu", "train", "measure")
    for page in sorted((ROOT / folder).glob("*.py"))
    if not page.name.startswith(("test_", "conftest"))
    and page.read_text(encoding="utf-8").count("\n") > 3
]


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SMALL = dict(
    vocab_size=261,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    max_position_embeddings=96,
    tie_word_embeddings=True,
    eos_token_ids=(256,),
)


class Cipher(Toy):
    """A toy that stores every token as the digit of another one: from its cache every other toy reads another text."""

    shift = 1


def byte_alphabet() -> list[str]:
    """The 256 printable characters that stand for bytes in a byte-level vocabulary (GPT-2's)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    odd = [b for b in range(256) if b not in plain]
    return [chr(b) if b in plain else chr(256 + odd.index(b)) for b in range(256)]


def write_tokenizer(folder: Path, template: str | None = None) -> None:
    """Every byte is a token, and there are three control tokens."""
    added = [
        dict(
            id=256 + i,
            content=text,
            special=True,
            normalized=False,
            lstrip=False,
            rstrip=False,
            single_word=False,
        )
        for i, text in enumerate(SPECIALS)
    ]
    split = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
    vocab = {c: b for b, c in enumerate(byte_alphabet())}
    tokenizer = dict(
        version="1.0",
        added_tokens=added,
        normalizer=None,
        pre_tokenizer=split,
        post_processor=None,
        decoder=split,
        model=dict(
            type="BPE",
            dropout=None,
            unk_token=None,
            continuing_subword_prefix=None,
            end_of_word_suffix=None,
            fuse_unk=False,
            byte_fallback=False,
            ignore_merges=False,
            vocab=vocab,
            merges=[],
        ),
    )
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIALS[0]}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config | ({"chat_template": template} if template else {}))
    )


def write_model(
    folder: Path,
    template: str | None = None,
    seed: int = 0,
    generation: dict[str, Any] | None = None,
    scale: float = 12.0,
    dtype: str = "float32",
    **config: Any,
) -> Path:
    """A model folder with random weights, large enough (`scale`) that its logits differ; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    llama = Llama(Config(**{**SMALL, **config}), seed=seed)
    tensors = {
        name: (place * (1 if "norm" in name else scale)).contiguous().to(getattr(torch, dtype))
        for name, place in llama.named_tensors().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(llama.config.to_dict()))
    (folder / "generation_config.json").write_text(json.dumps(generation or {}))
    write_tokenizer(folder, template)
    return folder


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model: no chat template."""
    return write_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def instruct(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a chat template."""
    return write_model(
        tmp_path_factory.mktemp("instruct"), template=CHATML, eos_token_ids=(256, 258)
    )


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Products this small are not worth sharing: on a busy machine the threads wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(params=["C", "no C"] if find_spec("cpu") else ["no C"])
def compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether cpu/native.py has a library: once as it is here, and once without."""
    if find_spec("cpu") and request.param == "no C":
        monkeypatch.setattr(native, "library", lambda: None)
    return bool(find_spec("cpu")) and native.library() is not None


# ---- Processes of their own -----------------------------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "meanwhile(function, *arguments): begins with the session; the fixture `meanwhile` waits for what it returned",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Who waits for another process comes last."""
    items.sort(key=lambda item: item.get_closest_marker("meanwhile") is not None)


@pytest.fixture(scope="session", autouse=True)
def begun(request: pytest.FixtureRequest) -> Iterator[dict[tuple[Any, ...], Future[Any]]]:
    """What the selected tests ask of other processes runs beside the tests, one after the other, in the order of the tests."""
    asked = dict.fromkeys(
        mark.args for item in request.session.items for mark in item.iter_markers("meanwhile")
    )
    with ThreadPoolExecutor(1) as pool:
        yield {
            (function, *arguments): pool.submit(function, *arguments)
            for function, *arguments in asked
        }
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def meanwhile(
    request: pytest.FixtureRequest, begun: dict[tuple[Any, ...], Future[Any]]
) -> Callable[[], Any]:
    """What this test's mark asked for, or the error that it ended with."""
    return begun[request.node.get_closest_marker("meanwhile").args].result


def heard() -> None:
    """In the new process: Ctrl-C counts, though it is ignored here, as in a shell's background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def program(*arguments: Any) -> subprocess.CompletedProcess[str]:
    """python ARGUMENTS, on one thread."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


PEAK = """
import sys, torch
from model import Llama
from generate import Model
def kilobytes(key): return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))
torch.set_num_threads(1)
folder, before, measured = sys.argv[1:]
exec(before)
open("/proc/self/clear_refs", "w").write("5")                          # the peak begins anew
start = kilobytes("VmRSS")
exec(measured)
print(1024 * (kilobytes("VmHWM") - start))
"""


def peak(shape: str, before: str, measured: str) -> int:
    """Bytes that a line of code takes at its peak, on top of what was there `before`: the libraries' own memory. Both may use `folder`, a random
    model of this shape (JSON)."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), **json.loads(shape))
        done = program("-c", PEAK, folder, before, measured)
        assert done.returncode == 0, done.stderr
    return int(done.stdout)
