"""Training a head: the unrolled steps beside the chain of drafts, resuming, the command line."""

import json
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file

from checkpoint.eagle import is_eagle
from generate import generate
from kernels import Ops
from loading import Model
from request import Request, Settings
from testing.heads import plain_chain, random_head
from testing.models import random_llama
from train import eagle, quantize
from train.eagle import (
    DECAY,
    HeadTraining,
    Text,
    batches,
    commonest,
    evaluate_head,
    losses,
    new_head,
    teach,
    unroll,
)
from train.run import Hyperparameters

TEXTS = [Text([5, 9, 200, 7, 7, 3, 100, 41, 6], 4), Text([8, 8, 1, 2, 30, 4], 0)]


def own_rows(text: Text, s: int) -> range:
    """The rows of step s that predict the target's own tokens: row t predicts token t + 2 + s."""
    return range(max(0, text.start - 2 - s), len(text.tokens) - 1 - s)


def test_unrolled_steps_are_the_chain_of_drafts():
    """Row t of step s is draft s after token t + 1, if the drafts are the text's own tokens; in a
    batch with a shorter text."""
    target = random_llama(1, ops=Ops())
    head = random_head(target)
    plain = random_head(target)
    (batch,) = batches([*TEXTS, Text([1] * 20, 0)], 2)  # the third is left over
    tokens = batch.tokens
    assert tokens.tolist()[0][6:] == [-1] * 3
    features, log_p = teach(head, batch)
    for text, found in zip(reversed(TEXTS), log_p):  # the shorter one is first
        wanted = target(torch.tensor(text.tokens)).log_softmax(-1)[:, head.tokens]
        own = slice(max(0, text.start - 1), len(text.tokens))
        assert torch.allclose(found[own], wanted[own].float(), atol=1e-5)
    num_steps = 3
    for s, (logits, rows) in enumerate(unroll(head, batch, features, num_steps)):
        assert len(rows) == sum(len(own_rows(text, s)) for text in TEXTS)
        for row, found in zip(rows.tolist(), logits):
            text = tokens[row // 9].tolist()
            t = row % 9
            chain = plain_chain(plain, target, text[: t + 2], text[t + 2 : t + 2 + s] + [0])
            assert torch.allclose(found, chain[s, head.tokens], atol=1e-6)


def test_the_loss_is_of_the_targets_own_next_token_and_ignores_padding():
    target = random_llama(1, ops=Ops())
    head = random_head(target)
    (together,) = batches(TEXTS, 2)
    entropies, alphas = losses(head, together, 2)
    for s in range(2):
        wanted = []
        for text in TEXTS:
            p = target(torch.tensor(text.tokens)).softmax(-1)
            for t in own_rows(text, s):
                drafts = [*text.tokens[t + 2 : t + 2 + s], 0]
                q = plain_chain(head, target, text.tokens[: t + 2], drafts)[s].softmax(-1)
                of_head = p[t + 1 + s, head.tokens]
                entropy = -(of_head / of_head.sum() * q[head.tokens].log()).sum()
                wanted.append((entropy, torch.minimum(p[t + 1 + s], q).sum()))
        entropy, alpha = torch.tensor(wanted).mean(0)
        assert abs(entropies[s] - entropy) < 1e-6 and abs(alphas[s] - alpha) < 1e-6
    (short,) = batches([Text([1, 2, 3], 0)], 1)
    entropies, alphas = losses(head, short, 5)  # the last drafts are not of the text
    assert torch.stack(entropies + alphas).isfinite().all() and entropies[-1] == 0


def training(**recipe) -> HeadTraining:
    target = random_llama(1, ops=Ops(), dtype=torch.float32, scale=1.0)
    head = new_head(target, torch.arange(0, 261, 2), 28, seed=2)
    texts = batches([Text([*range(i, i + 12)], 0) for i in range(16)], 2)
    return HeadTraining(
        head, texts, Hyperparameters(**{"steps": 6, "warmup": 1} | recipe), num_steps=2
    )


def test_all_weights_learn(tmp_path):
    run = training(decay=1.0)
    first = run.loss(run.batch()).item()
    run.run(tmp_path)
    start = training(decay=1.0).student.named_tensors()
    for name, tensor in run.student.named_tensors().items():
        assert torch.equal(tensor, start[name]) == (name == "d2t")
    alone = training(overlap=0.0)
    assert abs(alone.loss(alone.batch()).item() - first) < 1e-6
    assert run.loss(run.batch()).item() < first


def test_every_epoch_has_all_batches_in_an_order_of_its_own():
    run = training()
    n = len(run.texts)
    orders = []
    for epoch in range(3):
        order = []
        for i in range(n):
            run.steps = epoch * n + i
            order.append(int(run.batch().tokens[0, 0]))
        orders.append(order)
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2])
    assert orders[0] != orders[1] != orders[2]


def test_the_commonest_tokens_are_in_the_order_of_their_ids():
    texts = [Text([7, 3, 3, 9], 0), Text([9, 9, 5, 3, 7], 2)]
    assert commonest(texts, 12, 3).tolist() == [3, 7, 9]
    assert commonest(texts, 12, 6).tolist() == [0, 1, 3, 5, 7, 9]


def test_a_new_head_begins_with_the_targets_norm_and_rows():
    target = random_llama(1, ops=Ops())
    target.norm.fill_(3)
    tokens = [3, 7, 9]
    head = new_head(target, torch.tensor(tokens), None, seed=2)
    assert torch.equal(head.norm, target.norm.float())
    assert torch.equal(head.head.weight, target.head.weight[tokens].float())


def test_a_draft_counts_if_those_before_it_are_accepted(monkeypatch):
    """By the means of two batches of as many rows: 1 + 0.5 + 0.5 · 0.4."""
    head = training().student
    alphas = iter([[0.4, 0.3], [0.6, 0.5]])
    monkeypatch.setattr(eagle, "losses", lambda *_: ([], list(map(torch.tensor, next(alphas)))))
    said = evaluate_head(head, batches(TEXTS[:1] * 2, 1), 2)
    assert said == "acceptance 0.500 0.400; tokens a round of 2 drafts: 1.70"


def test_every_row_counts_alike_in_the_acceptance():
    """A batch of short texts counts less than one of long texts, and not at all where it has no
    row."""
    head = training().student
    short = Text([5, 9], 0)  # one row in the first step, none in the second
    long = Text([*range(9)], 0)
    texts = batches([short, short, long, long], 2)
    (first, _), (first_of_long, second_of_long) = (losses(head, batch, 2)[1] for batch in texts)
    first = (first + 8 * first_of_long) / 9
    said = evaluate_head(head, texts, 2)
    assert said.startswith(f"acceptance {first:.3f} {second_of_long:.3f};")


def test_products_in_bfloat16_give_almost_the_same_losses():
    run = training()
    batch = run.batch()
    exact, _ = losses(run.student, batch, 2)
    cast, alphas = losses(run.student, batch, 2, autocast=True)
    assert all(0 < abs(a - b) < 0.02 * a for a, b in zip(exact, cast))
    run.autocast = True
    for run.steps in range(6):
        terms = [1 - alpha for alpha in alphas] if run.steps == 5 else cast
        assert abs(run.loss(batch) - terms[0] - DECAY * terms[1]) < 1e-6


def test_the_command_makes_a_head_that_drafts(base, tmp_path, capsys):
    out = tmp_path / "head"
    data = tmp_path / "prompts.jsonl"
    lines = [{"prompt": chr(97 + i % 26) * 3, "temperature": i % 2} for i in range(30)]
    data.write_text("\n".join(map(json.dumps, lines)))
    command = f"--target {base} --out {out} --texts 20 --length 24 --batch 2 --vocab 100 --epochs 2"
    assert eagle.main([*command.split(), "--data", str(data)]) == 0
    said = capsys.readouterr().err
    assert "20 texts" in said and "tokens a round of 3 drafts" in said
    assert is_eagle(out)
    tensors = load_file(out / "model.safetensors")
    offsets = tensors["d2t"]  # for other programs: which of the target's tokens are drafted
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], offsets + torch.arange(len(offsets)))
    model = Model.load(base, "cpu", torch.float64)
    options = dict(temperature=0, max_tokens=20)
    text = generate("abc", model, draft=out, gamma=2, **options)
    assert text.text == generate("abc", model, **options).text
    assert text.speculation.tokens_per_round >= 1
    (out / "config.json").unlink()
    assert eagle.main([*command.split(), "--data", str(data)]) == 0  # all is done already
    assert "going on after step 18" in capsys.readouterr().err and is_eagle(out)
    command = command.replace(str(out), str(tmp_path / "other"))
    assert eagle.main([*command.split(), "--texts", "3", "--data", str(data)]) == 2
    assert "too few" in capsys.readouterr().err
    data.write_text(json.dumps({"prompt": "a" * 30}))
    assert eagle.main([*command.split(), "--data", str(data)]) == 2
    assert "raise --length" in capsys.readouterr().err
    data.write_text('{"prompt": 5}')
    assert eagle.main([*command.split(), "--data", str(data)]) == 2
    assert "line 1" in capsys.readouterr().err


def test_flags_reach_the_training_and_autocast_trains_on_plain_weights(base, tmp_path, monkeypatch):
    trained = []
    measured = []
    monkeypatch.setattr(HeadTraining, "run", lambda training, checkpoint: trained.append(training))
    monkeypatch.setattr(eagle, "evaluate_head", lambda _, texts, __: measured.extend(texts))
    sizes = "--texts 20 --length 12 --batch 2 --vocab 100 --bits 8 --overlap 0.5 --epochs 3"
    for name, more in (("plain", []), ("autocast", ["--autocast"])):
        command = ["--target", str(base), "--out", str(tmp_path / name), *sizes.split()]
        assert eagle.main([*command, *more]) == 0
    assert trained[0].recipe == Hyperparameters(steps=3 * 9, decay=1.0, overlap=0.5)
    learned = [batch.tokens.tolist() for batch in trained[0].texts]
    texts = {str(text) for batch in learned for text in batch}
    assert len(texts) == 18  # each with a seed of its own
    assert not any(batch.starts.any() for batch in trained[0].texts)  # all of it is the target's
    assert not texts & {str(text) for batch in measured for text in batch.tokens.tolist()}
    assert [training.autocast for training in trained] == [False, True]
    kinds = [training.student.target.config.quantization for training in trained]
    assert kinds[0] is not None and kinds[1] is None


def test_texts_that_are_told_are_on_the_disk_at_once(base, tmp_path, monkeypatch):
    """A run that is killed loses none."""
    file = tmp_path / "texts.jsonl"
    kept = []

    class Bar(nullcontext):
        def update(self) -> None:
            kept.append(len(eagle.told_before(file)))

    monkeypatch.setattr(eagle, "progress_bar", lambda **how: Bar())
    requests = [Request([1], Settings(1.0, seed=i, max_tokens=3 * i)) for i in range(1, 4)]
    eagle.tell_texts(Model.load(base), requests, file, 12)
    assert kept == [1, 2, 3]


def test_a_text_is_told_again_if_it_is_cut_or_its_prompt_has_changed(base, tmp_path):
    file = tmp_path / "texts.jsonl"

    def tell(prompts: str) -> list[list[int]]:
        requests = []
        for i, prompt in enumerate(prompts):
            requests.append(Request([ord(prompt)], Settings(1.0, seed=i, max_tokens=9)))
        return eagle.tell_texts(Model.load(base), requests, file, 12)

    told = tell("abc")
    file.write_text(file.read_text()[:-3])  # of a run that was killed
    assert tell("abc") == told
    size = file.stat().st_size
    assert tell("abc") == told and file.stat().st_size == size
    other = tell("axc")
    assert other[::2] == told[::2] and other[1][0] == ord("x")
    assert tell("axc") == other


@pytest.mark.parametrize(
    "line",
    [
        b'{"prompt": "a\xff"}',
        b'{"prompt": "a", "stop": "b"}',
        b'{"prompt": "a", "gamma": 3}',
        b'{"prompt": "a", "logprobs": 0}',
        b'{"prompt": "a", "prompt_logprobs": 2}',
    ],
)
def test_data_that_cannot_be_told_is_refused(base, tmp_path, capsys, line):
    (tmp_path / "data").write_bytes(line)
    command = ["--target", base, "--data", tmp_path / "data", "--out", tmp_path / "head"]
    assert eagle.main([*map(str, command)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "head").exists()


@pytest.mark.parametrize("length", [1, 97])
def test_a_length_that_the_target_cannot_have_is_refused_at_once(base, tmp_path, capsys, length):
    out = tmp_path / "head"
    assert eagle.main(["--target", str(base), "--out", str(out), "--length", str(length)]) == 2
    assert f"--length is {length}: it must be from 2 to 96" in capsys.readouterr().err
    assert not out.exists()


def test_autocast_refuses_quantized_weights_before_texts_are_told(base, tmp_path, capsys):
    quantized = tmp_path / "int8"
    assert quantize.main([str(base), "--bits", "8", "--out", str(quantized)]) == 0
    command = ["--target", str(quantized), "--out", str(tmp_path / "head"), "--autocast"]
    assert eagle.main(command) == 2
    assert "leave it out" in capsys.readouterr().err
    assert not (tmp_path / "head" / "texts.jsonl").exists()
