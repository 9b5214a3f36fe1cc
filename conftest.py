"""What the tests share: random models in memory and in folders, poisoned stores, programs."""

import json
import math
import os
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

if not torch.cuda.is_available():  # before anybody imports Triton: it runs kernels as Python then
    os.environ["TRITON_INTERPRET"] = "1"

from checkpoint.config import Config
from checkpoint.load import fill_model
from drafters import ModelChain
from kernels import Ops
from kvcache import Cache, Store
from model import Llama
from proof import Toy
from speculative import Round

# Random cases of every test are so many times as many. .ci/run says 10 for some files.
TIMES = int(os.environ.get("TEST_TIMES", "1"))
hypothesis.settings.register_profile(
    "tests",
    max_examples=15 * TIMES,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("tests")


def examples(count: int) -> hypothesis.settings:
    """For a test whose number of random cases is not the profile's."""
    return hypothesis.settings(max_examples=count * TIMES)


ROOT = Path(__file__).parent
FOLDERS = ("", "app", "checkpoint", "cpu", "gpu", "train", "measure")


def is_page(path: Path) -> bool:
    """Whether it is code that a reader reads: no test, and not only a docstring."""
    if path.name.startswith(("test", "conftest")):
        return False
    return path.read_text(encoding="utf-8").count("\n") > 3


PAGES = [
    path for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.py")) if is_page(path)
]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Products this small are not worth sharing: on a busy machine threads wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture
def in_time() -> Iterator[None]:
    """A test that takes 15 seconds of a processor fails: it would run forever."""

    def ring(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, 15)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, before)


@pytest.fixture(params=["C", "no C"] if find_spec("cpu") else ["no C"])
def compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether cpu/native.py has a library: once as it is here, and once without."""
    if not find_spec("cpu"):
        return False
    from cpu import native

    if request.param == "no C":
        monkeypatch.setattr(native, "library", lambda: None)
    return native.library() is not None


def told(table: str) -> list[tuple[str, str]]:
    """The lines of a table: what is given → what is said about it."""
    lines = [line.strip() for line in table.strip().split("\n")]
    return [tuple(line.split(" → ")) for line in lines]


def check_refusals(
    main: Callable[[list[str]], int],
    table: str,
    capsys: pytest.CaptureFixture[str],
    lines: int = 1,
    **places: object,
) -> None:
    """The mistakes in a table of flags → what is said: each ends with the status 2, with nothing on
    standard output, and with this in the last of at most so many lines. {name} stands for a
    place."""
    for flags, says in told(table):
        capsys.readouterr()
        try:
            status = main(shlex.split(flags.format(**places)))
        except SystemExit as stop:
            status = stop.code
        out, err = capsys.readouterr()
        assert (status, out) == (2, "") and 1 <= err.count("\n") <= lines, (flags, err)
        last = err.splitlines()[-1]
        assert last.startswith("error: ") and says in last, (flags, err)


# ---- Numbers, and models in memory


class Cipher(Toy):
    """A toy that stores every token as another one: from its cache other toys read another text.
    As a drafter in the target's cache, it leaves the law right only if the target overwrites it."""

    def __call__(self, tokens, *others):
        return super().__call__((tokens + 1) % self.V, *others)


def amid(x: Tensor, fill: float = 1000.0) -> Tensor:
    """The same numbers, not contiguous, among others that must not be used."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 3), fill, dtype=x.dtype)
    wide[..., :-3] = x
    return wide[..., :-3]


def poison(store: Store) -> Store:
    """Fill a store with numbers that no result may depend on."""
    for part in store.parts:
        part.fill_(math.nan if part.is_floating_point() else 77)
    return store


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


@torch.no_grad()
def random_llama(
    seed: int,
    ops: Ops | None = None,
    dtype: torch.dtype = torch.float64,
    scale: float = 10.0,
    weight_dtype: torch.dtype | None = None,
    **config: Any,
) -> Llama:
    """Random weights, the same in every dtype, and so large (`scale`) that logits differ."""
    plain = {**SMALL, **config, "quantization": None}
    numbers = Llama(Config(**plain), seed=seed, ops=Ops()).named_tensors()
    for name, tensor in numbers.items():
        if "norm" not in name:
            tensor.mul_(scale)
    stored = Config(**{**SMALL, **config})
    llama = Llama(stored, dtype=dtype, seed=None, ops=ops, weight_dtype=weight_dtype)
    fill_model(llama, numbers.items())
    return llama.pack_weights()


def add_noise(llama: Llama) -> Llama:
    """Make its weights differ a little, as those of a draft do."""
    for tensor in llama.named_tensors().values():
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0))
        tensor.mul_(1 + 0.05 * noise)
    return llama


# For tests of memory.
LARGE = dict(
    hidden_size=512,
    intermediate_size=2048,
    num_hidden_layers=8,
    num_attention_heads=8,
    head_dim=64,
    vocab_size=8192,
    tie_word_embeddings=False,
)


# ---- Model folders, such as a user might have

CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def byte_alphabet() -> list[str]:
    """The 256 printable characters that stand for bytes in a byte-level vocabulary (GPT-2's)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    odd = [b for b in range(256) if b not in plain]
    return [chr(b) if b in plain else chr(256 + odd.index(b)) for b in range(256)]


BYTE_LEVEL = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)


def tokenizer_json(
    vocab: dict[str, int],
    merges: list[Any],
    pre: dict[str, Any] = BYTE_LEVEL,
    ignore_merges: bool = False,
    special: dict[str, int] = {},
    plain: dict[str, int] = {},
    post: dict[str, Any] | None = None,
) -> dict[str, Any]:
    flags = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    added = []
    for text, id in (special | plain).items():
        added.append(dict(id=id, content=text, special=text in special, **flags))
    names = "dropout unk_token continuing_subword_prefix end_of_word_suffix"
    model = dict.fromkeys(names.split()) | dict(type="BPE", fuse_unk=False, byte_fallback=False)
    model |= dict(ignore_merges=ignore_merges, vocab=vocab, merges=merges)
    return dict(
        version="1.0",
        added_tokens=added,
        normalizer=None,
        pre_tokenizer=pre,
        post_processor=post,
        decoder=BYTE_LEVEL,
        model=model,
    )


def write_tokenizer(folder: Path, template: str | None = None) -> None:
    """Every byte is a token, and there are three control tokens."""
    vocab = {c: b for b, c in enumerate(byte_alphabet())}
    special = {text: 256 + i for i, text in enumerate(SPECIALS)}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIALS[0]}
    if template:
        config["chat_template"] = template
    tokenizer = tokenizer_json(vocab, [], special=special)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_model(
    folder: Path,
    template: str | None = None,
    seed: int = 0,
    generation: dict[str, Any] | None = None,
    scale: float = 12.0,
    dtype: str = "float32",
    **config: Any,
) -> Path:
    """A model folder with random weights, so large (`scale`) that logits differ; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    llama = Llama(Config(**{**SMALL, **config}), seed=seed)
    tensors = {}
    for name, tensor in llama.named_tensors().items():
        scaled = tensor if "norm" in name else tensor * scale
        tensors[name] = scaled.contiguous().to(getattr(torch, dtype))
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
    folder = tmp_path_factory.mktemp("instruct")
    return write_model(folder, template=CHATML, eos_token_ids=(256, 258))


# ---- Other processes


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """In the block no file can have more bytes: as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def heard() -> None:
    """In the new process: Ctrl-C counts, though it is ignored here, as in a shell's background; and
    the terminal's end, which nohup ignores."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


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
def kilobytes(key):
    lines = open("/proc/self/status").readlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))
torch.set_num_threads(1)
folder, before, measured = sys.argv[1:]
exec(before)
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
start = kilobytes("VmRSS")
exec(measured)
print(1024 * (kilobytes("VmHWM") - start))
"""


def peak(shape: str, before: str, measured: str) -> int:
    """Bytes that a line of code takes at its peak, on top of what was there after `before`.

    Both may use `folder`, a random model of this shape (JSON).
    """
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), **json.loads(shape))
        done = program("-c", PEAK, folder, before, measured)
        assert done.returncode == 0, done.stderr
    return int(done.stdout)


def attend(
    ops: Ops, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: Any, layer: int
) -> torch.Tensor:
    """Attention of q, k and v that are rotated already."""
    return ops.attend(torch.cat((q, k, v), 1), k.shape[1], None, metadata, layer)


class Place(NamedTuple):
    """What a round asks of its target."""

    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32
    ops: Ops = Ops()


def model_chain(
    llama: Llama, cache: Cache, seqs: list[int], unread: list[list[int]], round: Round
) -> ModelChain:
    """A chain of drafts for the requests of a round that want some."""
    wanted = {b: (seqs[b], list(unread[b])) for b in round.drafting()}
    return ModelChain(llama, cache, round, unread=wanted)
