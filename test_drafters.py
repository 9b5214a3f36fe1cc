"""Drafters: n-gram look-up beside a slow search, and rows whose settings differ."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from config import Config
from conftest import SMALL
from drafters import ModelDrafter, NgramDrafter, Round, pack
from model import Llama
from request import Request, Settings
from sampling import TEXT, Keyed, draft_role, probabilities


def slow_look_up(text: list[int], count: int, longest: int) -> list[int]:
    """The longest suffix that occurred before, where it occurred last, and what followed; what is proposed counts as text."""
    for n in range(min(longest, len(text) - 1), 0, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n:end] == text[-n:]:
                grown = list(text)
                for j in range(count):
                    grown.append(grown[end + j])
                return grown[len(text):]
    return []


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 4), st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), max_size=6))
def test_ngrams_are_what_a_slow_search_finds_while_the_text_grows(text, longest, growth):
    drafter, request = NgramDrafter(longest), Request(text, Settings())
    drafter.open(request)
    for count, token in [(3, 0), *growth]:
        assert drafter.look_up(request, count) == slow_look_up(request.tokens, count, longest)
        request.tokens.append(token)
        drafter.keep(request, len(request.tokens) - 1)


def test_ngrams_of_another_text_in_the_same_place_are_forgotten():
    drafter, request = NgramDrafter(), Request([1, 2, 3, 1, 2], Settings())
    drafter.open(request)
    assert drafter.look_up(request, 2) == [3, 1]
    drafter.keep(request, 0)
    request.restart([7, 1, 2], Settings())
    assert drafter.look_up(request, 2) == [] and drafter.room(request, 4) == 0


def test_an_ngram_proposal_is_a_one_hot_distribution():
    drafter, a, b = NgramDrafter(), Request([1, 2, 3, 1, 2], Settings(seed=1)), Request([4, 5], Settings(seed=2))
    for request in (a, b):
        drafter.open(request)
    assert drafter.room(a, 5) == 5 and drafter.room(b, 5) == 0
    drafted, q = drafter.propose(Round([a, b], [2, 0], 6, torch.device("cpu")))
    assert drafted.tolist() == [[3, 1], [-1, -1]] and q.sum(-1).tolist() == [[1, 1], [0, 0]] and q[0, 0, 3] == q[0, 1, 1] == 1


def test_each_row_has_its_own_settings_seed_and_place():
    chosen = [Settings(0.5, seed=4), Settings(1.0, top_k=2, seed=5), Settings(0, min_p=0.1, seed=6), Settings(2.0, top_p=0.5, seed=7)]
    requests = [Request([1] * (i + 1), setting) for i, setting in enumerate(chosen)]
    round, logits = Round(requests, [1, 2, 3, 0], 5, torch.device("cpu")), torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    rows = [2, 0, 1, 3, 0]
    together = round.probabilities(logits, rows)
    for got, row, one in zip(together, rows, logits):
        s = chosen[row]
        assert torch.allclose(got, probabilities(one[:5], s.temperature, s.top_k, s.top_p, s.min_p), atol=1e-7)
    probs = together[:2]
    alone = [int(Keyed(torch.tensor([seed]), torch.tensor([at]), draft_role(1)).pick(p[None])) for seed, at, p in zip((6, 4), (3, 1), probs)]
    assert round.draft_coin(1, [2, 0]).pick(probs).tolist() == alone
    assert round.text_coin().pick(probs[[0, 0, 0, 0]]).tolist() == [int(Keyed(torch.tensor([seed]), torch.tensor([at]), TEXT).pick(probs[:1]))
                                                                    for seed, at in zip((4, 5, 6, 7), (1, 2, 3, 4))]
    round = Round(requests, [1, 1, 1, 0], 5, torch.device("cpu"), coupled=True)
    alone = [int(Keyed(torch.tensor([seed]), torch.tensor([at + 1]), TEXT).pick(p[None])) for seed, at, p in zip((6, 4), (3, 1), probs)]
    assert round.draft_coin(1, [2, 0]).pick(probs).tolist() == alone
    wide = together[:1].expand(8, -1)
    alone = [int(Keyed(torch.tensor([seed]), torch.tensor([at]), TEXT).pick(wide[:1])) for seed, first in zip((4, 5, 6, 7), (1, 2, 3, 4)) for at in (first, first + 1)]
    assert round.text_coin().pick(wide).tolist() == alone


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_q_is_what_was_drawn_from_to_the_bit_whatever_the_model_computes_in(dtype, monkeypatch):
    llama, seen = Llama(Config(**SMALL), dtype=dtype), []
    monkeypatch.setattr("drafters.probabilities", lambda *args: seen.append(probabilities(*args)) or seen[-1])
    for gammas in ([2, 2], [1, 2]):
        drafter, requests = ModelDrafter(llama, llama.cache(20, 2)), [Request([1, 2], Settings(1.0, seed=i)) for i in range(2)]
        for request in requests:
            drafter.open(request)
        seen.clear()
        drafted, q = drafter.propose(Round(requests, gammas, 261, llama.device, dtype))
        assert q.dtype == seen[0].dtype and torch.equal(q[:, 0], seen[0]) and torch.equal(q[1, 1], seen[1][-1]) and (drafted[1] >= 0).all()


def test_pack():
    tokens, last = pack([[1, 2, 3], [4], [5, 6]], torch.device("cpu"))
    assert tokens.tolist() == [1, 2, 3, 4, 5, 6] and last.tolist() == [2, 3, 5]
