"""Learning: α and KL, steps that resume exactly, the command line, and the embedded pair."""

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from checkpoint.config import Config
from checkpoint.save import save_model
from errors import UserError
from kvcache import AttentionMetadata
from model import Llama
from testing.folders import write_model
from testing.models import SMALL
from testing.pages import ROOT
from testing.programs import check_refusals, largest_file
from tokenizer import Tokenizer
from train import bpe, distill, eagle, run
from train.distill import (
    Training,
    acceptance,
    divergence,
    evaluate,
    new_model,
    sample_corpus,
)
from train.run import FLAGS, Hyperparameters
from train.stories import Corpus

END = 256
CONFIG = Config(**SMALL, model_type="qwen3")  # a Llama, and norms of heads
STORIES = [
    f"Once there was a {size} {animal}. It was {mood}. The end."
    for size in ("big", "small", "tiny")
    for animal in ("cat", "dog", "bee", "cow")
    for mood in ("sad", "glad")
]


def some_text(length: int = 2000) -> Corpus:
    tokens = torch.tensor([byte for story in STORIES for byte in (*story.encode(), END)]).repeat(4)[
        :length
    ]
    return Corpus(tokens, END, int((tokens != END).sum()))


def training(seed: int = 1, target: Llama | None = None, **recipe: float) -> Training:
    sampled = None if target is None else sample_corpus(target, 4, 40, END, 0)
    recipe = dict(steps=8, batch=2, length=16, warmup=2) | recipe
    return Training(
        new_model(CONFIG, seed),
        some_text(),
        target,
        sampled=sampled,
        recipe=Hyperparameters(**recipe),
    )


def weights(llama: Llama) -> dict[str, Tensor]:
    return {name: place.detach().clone() for name, place in llama.named_tensors().items()}


# ---- α, KL, steps --------------------------------------------------------------------------------


def test_alpha_and_kl_by_hand() -> None:
    p, q = (
        torch.tensor([[0.5, 0.3, 0.2], [1.0, 0.0, 0.0]]),
        torch.tensor([[0.2, 0.3, 0.5], [0.25, 0.5, 0.25]]),
    )
    torch.testing.assert_close(acceptance(p.log(), q.log()), torch.tensor([0.7, 0.25]))
    kl = [0.5 * math.log(0.5 / 0.2) + 0.2 * math.log(0.2 / 0.5), math.log(4)]
    assert divergence(p.clamp(1e-30).log(), q.log()).item() == pytest.approx(sum(kl) / 2, rel=1e-5)


def test_the_last_steps_raise_alpha_itself(monkeypatch) -> None:
    """The first 4 of 8 steps lower KL, the others 1 − α: a step returns what it was trained on."""
    kinds: list[str] = []
    for name in ("divergence", "acceptance"):
        real = getattr(distill, name)
        monkeypatch.setattr(
            distill, name, lambda p, q, name=name, real=real: kinds.append(name) or real(p, q)
        )
    run = training(target=new_model(CONFIG, 3), overlap=0.5)
    losses = [run.step() for _ in range(8)]
    assert kinds == ["divergence"] * 4 + ["acceptance"] * 4 and all(
        0 < loss < 1 for loss in losses[4:]
    )
    torch.manual_seed(0)
    p, q = torch.randn(5, 9), torch.randn(5, 9, requires_grad=True)
    (1 - acceptance(p, q).mean()).backward()
    assert acceptance(p, q - 0.1 * q.grad).mean() > acceptance(p, q).mean()


def test_a_share_of_the_steps_is_on_texts_of_the_target() -> None:
    for share in (0.0, 0.3, 0.5, 1.0):
        run = training(target=new_model(CONFIG, 3), sampled=share)
        sampled = [run.corpus(step) is run.sampled for step in range(40)]
        for tenth in range(0, 40, 10):  # evenly
            assert sum(sampled[tenth : tenth + 10]) == 10 * share


def test_a_model_agrees_with_itself() -> None:
    llama = new_model(CONFIG, 3)
    logits = llama(torch.arange(50))
    assert divergence(logits, logits).item() == pytest.approx(0, abs=1e-6)
    assert evaluate(llama, some_text(), llama, length=64, count=3)["acceptance"] == pytest.approx(
        1, abs=1e-5
    )
    assert (
        evaluate(new_model(CONFIG, 4), some_text(), llama, length=64, count=3)["acceptance"] < 0.999
    )


def test_bits_a_byte_count_the_bytes_of_the_text() -> None:
    """Uniform over 261 tokens: log2(261) bits a token, over the share of tokens that are bytes."""
    llama, text = Llama(CONFIG), some_text()
    llama.embed.weight.data.zero_()
    found = evaluate(llama, text, length=64)
    assert found["bits/token"] == pytest.approx(math.log2(261), rel=1e-5)
    assert found["bits/byte"] == pytest.approx(
        math.log2(261) * len(text.tokens) / text.bytes, rel=1e-5
    )


def test_no_model_is_measured_beyond_its_positions() -> None:
    short, long = (Llama(replace(CONFIG, max_position_embeddings=n)) for n in (32, 1000))
    for student, target in ((short, None), (short, long), (long, short)):
        found = evaluate(student, some_text(), target)
        assert found == evaluate(student, some_text(), target, length=32)


def test_a_batch_is_its_sequences_one_by_one() -> None:
    llama = new_model(CONFIG, 5)
    tokens = torch.randint(256, (3, 12), generator=torch.Generator().manual_seed(0))
    alone = torch.stack([llama(row) for row in tokens])  # [B, N, V]
    torch.testing.assert_close(
        llama(tokens.flatten(), AttentionMetadata.without_cache(3, 12)).view_as(alone),
        alone,
        atol=1e-5,
        rtol=1e-4,
    )


def test_a_model_tells_what_it_would() -> None:
    """A model that all but surely repeats one token tells that token."""
    llama = new_model(CONFIG, 6)
    llama.embed.weight.data[7] *= 0
    llama.norm.data.zero_()
    assert (
        Counter(sample_corpus(llama, 8, 40, END, 0).tokens.tolist())[END] < 20
    )  # uniform: the ends added, and few more
    first, again, other = (sample_corpus(llama, 3, 20, END, seed).tokens for seed in (1, 1, 2))
    assert torch.equal(first, again) and len(first) == 3 * 21
    texts = [tuple(text) for corpus in (first, other) for text in corpus.view(3, 21).tolist()]
    assert len({*texts}) == 6  # no text twice, in one corpus or in two


# ---- Learning ------------------------------------------------------------------------------------


def test_muon_moves_the_matrices_of_layers_alone() -> None:
    run = training()
    layer = run.student.layers[0]
    muon, adam = ([*map(id, opt.param_groups[0]["params"])] for opt in run.optimizers)
    matrices = [layer.qkv, layer.o, layer.gate_up, layer.down]
    assert muon[:4] == [id(matrix.weight) for matrix in matrices]
    assert len(muon) == 4 * len(run.student.layers) and id(run.student.embed.weight) in adam


@pytest.mark.parametrize("autocast, dtype", [(False, torch.float32), (True, torch.bfloat16)])
def test_on_a_cpu_muon_multiplies_in_bfloat16_if_that_is_asked_for(
    autocast: bool, dtype: torch.dtype
) -> None:
    class Watch(TorchFunctionMode):
        def __torch_function__(self, function, types, arguments=(), named=None):
            result = function(*arguments, **(named or {}))
            if isinstance(result, Tensor):
                made.add((function.__name__, result.dtype))
            return result

    made: set[tuple[str, torch.dtype]] = set()
    student = training()
    student.autocast = autocast
    with Watch():
        student.step()
    assert ("addmm", dtype) in made  # Muon's products
    assert (torch.bfloat16 in {dtype for _, dtype in made}) == autocast


def test_the_rate_rises_stays_and_falls_to_zero() -> None:
    factors = [Hyperparameters(steps=100, warmup=10, decay=0.4).factor(i) for i in range(100)]
    assert factors[0] == pytest.approx(0.1) and set(factors[9:61]) == {1.0}
    assert factors[60:] == sorted(factors[60:], reverse=True) and factors[-1] == pytest.approx(
        1 / 40
    )


def test_the_loss_falls() -> None:
    """On text; and then a student imitates what has learned from it."""
    target, text = None, some_text()
    for steps in (30, 20):
        run = training(1 if target else 2, target, steps=steps)
        losses = [run.step() for _ in range(steps)]
        assert sum(losses[-8:]) < 0.75 * sum(losses[:8])
        teacher, target = target, run.student
    before = evaluate(new_model(CONFIG, 1), text, teacher, length=64, count=4)["acceptance"]
    assert evaluate(run.student, text, teacher, length=64, count=4)["acceptance"] > before + 0.1


def test_a_file_that_is_no_whole_checkpoint_is_refused(tmp_path: Path) -> None:
    training().save(tmp_path / "state")
    whole = (tmp_path / "state").read_bytes()
    for data in (b"", b"text", whole[:-100], whole[100:]):
        (tmp_path / "state").write_bytes(data)
        with pytest.raises(UserError, match="not a whole checkpoint"):
            training().resume(tmp_path / "state")


@pytest.mark.parametrize("size", [1000, 20_000])  # the first tensors fail, or later ones
def test_on_a_full_disk_the_old_checkpoint_stays(tmp_path: Path, size: int) -> None:
    run = training()
    run.save(tmp_path / "state")
    assert (tmp_path / "state").stat().st_size > 20_000
    run.step()
    with largest_file(size), pytest.raises(OSError, match="state cannot be written"):
        run.save(tmp_path / "state")
    run.resume(tmp_path / "state")
    assert run.steps == 0
    with largest_file(1000), pytest.raises(OSError, match="cannot be written"):
        save_model(run.student, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["state"]


# ---- The command line ----------------------------------------------------------------------------

SIZES, SHAPE = ["--length", "16", "--batch", "2"], ["--width", "24", "--heads", "4", "--mlp", "32"]


@pytest.fixture
def stories(tmp_path: Path) -> str:
    file = tmp_path / "stories.txt"
    file.write_text(f"\n{bpe.END}\n".join(STORIES), encoding="utf-8")
    return str(file)


def test_from_text_to_a_target_to_a_draft_to_fewer_heads(
    tmp_path: Path, stories: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target, draft, merged = (str(tmp_path / name) for name in ("target", "draft", "merged"))

    def run(flags: str, out: str) -> None:
        shape = [] if "--from " in flags else SHAPE
        assert distill.main([*flags.split(), "--data", stories, "--out", out, *SIZES, *shape]) == 0

    run("--from-scratch --vocab 300 --layers 2 --steps 6", target)
    assert Llama.load(target, dtype=torch.float32).config.vocab_size == 300
    run(f"--target {target} --steps 4 --tales 4", draft)
    assert Path(draft, "tokenizer.json").read_bytes() == Path(target, "tokenizer.json").read_bytes()
    capsys.readouterr()
    run(f"--from {target} --kv-heads 1 --steps 3", merged)
    told = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in (told[0], told[-1])] == ["before", "after"]
    assert Config.load(Path(merged)).num_key_value_heads == 1
    run(f"--target {target} --steps 6 --tales 4", draft)  # goes on
    captured = capsys.readouterr()
    assert captured.err.startswith("going on after step 4") and "step     6 of 6" in captured.err
    assert "acceptance" in captured.err and captured.out == ""  # which nobody may read


@pytest.mark.parametrize("tells", [False, True])
def test_what_is_measured_on_is_not_what_is_learned_from(
    tmp_path: Path, stories: str, base: Path, monkeypatch: pytest.MonkeyPatch, tells: bool
) -> None:
    """Held-out stories, or texts of the target with other seeds; and flags reach the training."""
    runs: list[Training] = []
    measured: list[Corpus] = []
    monkeypatch.setattr(Training, "run", lambda run, checkpoint: runs.append(run))
    monkeypatch.setattr(distill, "evaluate", lambda _, text, __: measured.append(text) or {})
    shares = ["--decay", "0.2", "--overlap", "0.1"]
    data = [] if tells else ["--data", stories, "--own", "0.3"]
    command = ["--target", str(base), "--out", str(tmp_path / "out"), "--tales", "4", *data]
    assert distill.main([*command, *SIZES, *SHAPE, *shares]) == 0
    (run,) = runs
    own = 0.5 if tells else 0.3
    assert run.recipe == Hyperparameters(batch=2, length=16, sampled=own, decay=0.2, overlap=0.1)
    assert run.student.config.vocab_size == 261  # the target's: its tokenizer has fewer tokens

    def texts(corpus: Corpus | None) -> set[bytes]:
        if corpus is None:
            return set()
        parts = corpus.tokens.tensor_split(corpus.starts[1:])
        return {str(part.tolist()) for part in parts if len(part) > 4}

    held_out = texts(measured[0])
    assert held_out and texts(run.sampled)
    assert not held_out & (texts(run.text) | texts(run.sampled))
    assert len(texts(run.text)) == (0 if tells else 22)


def test_a_draft_learns_what_its_targets_prompts_begin_with(
    tmp_path: Path, stories: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama 3's begin with a begin-of-text, and so does each story, and each text that it tells."""
    target = write_model(tmp_path / "target")
    file = target / "tokenizer.json"
    single = [{"SpecialToken": {"id": "B"}}, {"Sequence": {"id": "A"}}]
    first = dict(type="TemplateProcessing", single=single, special_tokens={"B": {"ids": [257]}})
    file.write_text(json.dumps(json.loads(file.read_text()) | {"post_processor": first}))
    runs: list[Training] = []
    measured: list[Corpus] = []
    monkeypatch.setattr(Training, "run", lambda run, checkpoint: runs.append(run))
    monkeypatch.setattr(distill, "evaluate", lambda _, text, __: measured.append(text) or {})
    for name, data in (("told", []), ("read", ["--data", stories])):
        command = ["--target", str(target), "--out", str(tmp_path / name), "--tales", "4", *data]
        assert distill.main([*command, *SIZES, *SHAPE]) == 0
    told = {str(text.tolist()) for run in runs for text in run.sampled.tokens.view(4, 19)}
    assert len(told) == 4 and all(text.startswith("[257, ") for text in told)
    assert measured[0].tokens.view(12, 19)[:, 0].tolist() == [257] * 12
    for text in (runs[1].text, measured[-1]):
        assert text.tokens[text.starts[:-1]].tolist() == [257] * (len(text.starts) - 1)


def test_bad_flags_are_one_line(
    tmp_path: Path, stories: str, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = str(write_model(tmp_path / "other", vocab_size=270))
    endless = str(write_model(tmp_path / "endless", eos_token_ids=()))
    for file in Path(endless).glob("tokenizer*"):
        file.write_text(file.read_text().replace(bpe.END, "<|other|>"))
    short = str(write_model(tmp_path / "short", max_position_embeddings=32))
    table = """
        --from-scratch → no text to learn from
        --own 0.3 → --own has no effect without --data
        --own 0 → --own has no effect without --data
        --data x --own 0 --tales 3 → --tales has no effect with --own 0
        --from {base} --data {stories} --seed 2 → --seed has no effect with --from
        --from {base} --target {base} --data {stories} --own 0 --seed 2 → --seed has no effect with
        --target {endless} → names no token that ends a text
        --target {short} --length 32 → must be below 32 positions
        --from-scratch --data nowhere.txt → No such file
        --from-scratch --data {page} → stories; at least 10
        --from-scratch --data {stories} --device tpu → device 'tpu'
        --target nobody-has-this → neither a folder
        --from-scratch --data {stories} --vocab 200 → at least 256
        --from-scratch --data {stories} --vocab 270 --length 1024 → must be below 1024 positions
        --from-scratch --data {stories} --vocab 270 --width 1 → head_dim 0 even and above 0
        --from {base} --data {stories} --kv-heads 3 → divisor of 2
        --from {base} --data {stories} --target {other} --length 16 → share its target's vocabulary
        --steps 0 → --steps
        --own 1.5 → --own
        --own nan → --own
        --layers x → --layers
        --seed 999999999999999999 → --seed
        --from-scratch --target tiny → --from-scratch takes neither
        --from tiny --layers 7 → --layers has no effect with --from
        --target tiny --vocab 300 → --vocab has no effect except with --from-scratch
        --from-scratch --tales 3 → --tales has no effect without a --target
    """

    def main(flags: list[str]) -> int:
        """A folder of its own for each."""
        return distill.main([*flags, "--out", mkdtemp(dir=tmp_path)])

    places = dict(base=base, stories=stories, endless=endless, short=short, other=other)
    check_refusals(main, table, capsys, lines=2, page=__file__, **places)
    for out in ("", stories):
        assert distill.main(["--out", out]) == 2
        assert "folder" in capsys.readouterr().err


TOLD = ["--tales", "4", *SIZES, *SHAPE]
HEAD = ["--texts", "20", "--length", "12", "--batch", "2", "--vocab", "100"]


@pytest.mark.parametrize("program, flags", [(distill, TOLD + ["--steps", "9"]), (eagle, HEAD)])
def test_a_run_that_is_stopped_goes_on_to_the_same_bits(
    program, flags, base, tmp_path, monkeypatch, capsys
):
    """It is stopped amid its second step after a checkpoint, and loses the first."""
    command = ["--target", str(base), *flags, "--out"]
    assert program.main([*command, str(tmp_path / "whole")]) == 0
    step = run.Run.step
    seconds = iter(range(0, 900, 7))
    monkeypatch.setattr(run.time, "monotonic", lambda: next(seconds))

    def stopped(training: run.Run) -> float:
        if training.steps == 4:
            raise KeyboardInterrupt
        return step(training)

    monkeypatch.setattr(run.Run, "step", stopped)
    assert program.main([*command, str(tmp_path / "stopped")]) == 130
    monkeypatch.setattr(run.Run, "step", step)
    capsys.readouterr()
    assert program.main([*command, str(tmp_path / "stopped")]) == 0
    assert "going on after step 3 " in capsys.readouterr().err
    whole, resumed = ((tmp_path / name / "model.safetensors") for name in ("whole", "stopped"))
    assert whole.read_bytes() == resumed.read_bytes()


def test_a_folder_holds_one_run(tmp_path: Path, base: Path, capsys) -> None:
    """Other flags, another program, the student itself, a model that was not trained there: nothing
    changes. A run may be longer."""
    out = tmp_path / "out"
    begun = ["--target", str(base), *TOLD, "--out", str(out), "--steps"]

    def refused(program, flags: list[str], says: str, folder: Path = out) -> None:
        before = {file.name: file.read_bytes() for file in folder.iterdir()}
        assert program.main([*flags, "--out", str(folder)]) == 2
        assert before == {file.name: file.read_bytes() for file in folder.iterdir()}
        assert says in capsys.readouterr().err.splitlines()[-1]

    assert distill.main([*begun, "2"]) == 0
    refused(distill, [*begun, "3", "--seed", "7"], "seed is 1, here 7")
    refused(distill, ["--target", str(out)], f"target is {base}, here {out}")
    refused(eagle, ["--target", str(base), *HEAD], "something else than this run")
    for program in (distill, eagle):
        refused(program, ["--target", str(base)], "target is not there", base)
    assert distill.main([*begun, "3"]) == 0
    assert json.loads((out / FLAGS).read_text())["steps"] == "3"


# ---- The pair in this repository -----------------------------------------------------------------


def embedded(name: str) -> Path:
    if not (ROOT / "models" / name / "model.safetensors").exists():
        pytest.skip(f"models/{name} is not there")
    return ROOT / "models" / name


def size(llama: Llama) -> int:
    return sum(
        place.numel()
        for place in Llama(llama.config, device="meta", seed=None).named_tensors().values()
    )


@pytest.mark.parametrize("name", ["tiny", "tiny-draft"])
def test_the_pieces_of_an_embedded_model_fit(name: str) -> None:
    folder = embedded(name)
    llama, tok = Llama.load(folder, dtype=torch.float32), Tokenizer.load(folder)
    generation = json.loads((folder / "generation_config.json").read_text())
    assert llama.config.vocab_size == tok.vocab_size == 4096 and not tok.missing_bytes
    assert llama.config.max_position_embeddings >= 1024
    assert llama.config.eos_token_ids == (tok.specials[bpe.END],) == (generation["eos_token_id"],)
    assert llama.config.num_key_value_heads < llama.config.num_attention_heads
    assert 5e6 <= size(llama) <= 8e6 or name == "tiny-draft"


def test_the_draft_is_of_its_targets_family() -> None:
    folders = embedded("tiny"), embedded("tiny-draft")
    target, draft = (Llama.load(folder, dtype=torch.float32) for folder in folders)
    assert size(draft) <= size(target) / 10
    assert sum(file.stat().st_size for folder in folders for file in folder.iterdir()) < 20e6
    assert (
        folders[0].joinpath("tokenizer.json").read_bytes()
        == folders[1].joinpath("tokenizer.json").read_bytes()
    )
    tokens = torch.tensor(Tokenizer.load(folders[0]).encode(STORY))
    assert acceptance(target(tokens), draft(tokens)).mean() > 0.45


STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
    "One day, she saw a big dog. The dog was very friendly."
)


def test_the_embedded_model_knows_stories() -> None:
    folder = embedded("tiny")
    tokens = torch.tensor(Tokenizer.load(folder).encode(STORY))
    logits = Llama.load(folder, dtype=torch.float32)(tokens)[:-1]
    nats = torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="sum").item()
    assert nats / math.log(2) / len(STORY) < 0.7
