"""Drafters: who proposes the tokens that the target then verifies.

A drafter proposes up to γ tokens for each text of a round, and hands over, beside each token, the distribution that it was really
drawn from. Verification is exact for *any* proposal whose distribution is known, so a drafter may be anything:

    ModelDrafter    a smaller Llama with the target's vocabulary: drawn from its own distribution, with the text's own settings
    SelfDrafter     the target's own INT4 copy (`--draft self`): it drafts in the target's cache, and so keeps nothing of its own
    NgramDrafter    what followed the last few tokens when they last occurred in the text: no weights, a one-hot distribution

    drafter.open(request) · close(request)      a text comes, a text goes
    drafter.lag(request)                        how many tokens of the text it has not read
    drafter.follow(request, length)             read the text up to `length`, as the target does with a prompt
    drafter.fits(work)                          is there room for what a step does: drafts, and chunks to follow?
    drafter.room(request, most)                 how many tokens it can draft for this text, at most `most`
    drafter.propose(round) -> drafted, q        int64[B, k] and float[B, k, V]; where a text drafted fewer than k, −1 and all zero
    drafter.keep(request, length)               forget what was read beyond `length` tokens: drafts that were rejected
    drafter.shares                              whether it drafts in the target's cache

Invariant of the model's cache, between rounds: it holds a prefix of the text, the last token never among it. After γ drafts all
of which were accepted, it lacks two tokens, the last draft (drawn, never read) and the bonus; the next round reads both.

A copy of the target has the target's keys and values, nearly: so it needs no cache, no second reading of the prompt, and no memory but
its layers' (embedding, norms and head are the target's own). It looks back at what the target stored, writes the last token and its drafts
after that, and takes them back; the target then writes its own over them. For this the text must be in the cache but for its last
token, so a text's first token is drawn without drafts, and one that was preempted is read again before it drafts.

Not covered: trees of drafts; drafters that read the target's hidden states (EAGLE).

Leviathan et al. 2023 (arXiv:2211.17192); prompt look-up: Saxena 2023; Yang et al. 2023, LLMA (2304.04487).

    B texts of a round · k the largest γ among them · V vocabulary
"""
import math
import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kernels import send
from kvcache import Alone
from request import Request
from sampling import TEXT, Keyed, Setting, draft_role, probabilities

SETTINGS = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)        # of `probabilities`, and what changes nothing


def pack(pieces: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens end to end: int64[T]; and where each piece's last one is: int64[len(pieces)]."""
    ends = send([end - 1 for end in accumulate(map(len, pieces))], device)
    return send([token for piece in pieces for token in piece], device), ends


class Round:
    """The texts of a round, a row each: γ drafts wanted for each, their settings, and their coins.

    `coin(seeds, positions, role)` makes the coin of all that is picked; it is `Keyed`, save where every outcome is walked (proof.py).
    Exact: all at the round's first position, in the roles text, draft 0, draft 1, …; coupled: each in the role text, at its own position.
    """

    def __init__(self, requests: Sequence[Request], gammas: Sequence[int], vocab: int, device: torch.device, dtype: torch.dtype = torch.float32,
                 coin: Callable[[Tensor, Tensor, int], Any] = Keyed, coupled: bool = False):
        self.requests, self.gammas, self.vocab, self.device, self.coin = requests, gammas, vocab, device, coin
        self.dtype = torch.float64 if dtype == torch.float64 else torch.float32             # of probabilities, whatever the model computes in
        self.coupled, self.width = coupled, 1 + max(gammas, default=0)                      # a text makes up to so many tokens
        self.own = 0 if coupled else 1                                                      # among a text's coins, that of draft 0
        self.places = [(request.settings.seed, len(request.tokens) + j, TEXT) if coupled else (request.settings.seed, len(request.tokens), role)
                       for request in requests for j, role in enumerate([TEXT, *map(draft_role, range(self.width - 1))])]

    @cached_property
    def coins(self) -> Any:
        """Of all texts, one after the other: B · width of them. They are made when a GPU has its pass to do."""
        return self.coin(*send(self.places, self.device).view(-1, 3).unbind(1))

    def nothing(self) -> tuple[Tensor, Tensor]:
        """Room for what is drafted: int64[B, k], all −1, and float[B, k, V], all zero."""
        B, k = len(self.requests), max(self.gammas, default=0)
        return torch.full((B, k), -1, device=self.device), torch.zeros(B, k, self.vocab, dtype=self.dtype, device=self.device)

    def settings(self, name: str) -> list[float | None]:
        """One of the settings, of each text."""
        return [getattr(request.settings, name) for request in self.requests]

    def columns(self, rows: Sequence[int]) -> list[Setting]:
        """The settings of these texts, a row each: one value if all agree on it, which costs less."""
        columns: list[Setting] = []
        for name, neutral in SETTINGS.items():
            every = self.settings(name)
            values = [every[row] for row in rows]
            same = len(set(values)) <= 1
            columns.append((values or [None])[0] if same else send([neutral if value is None else value for value in values], self.device, torch.float64))
        return columns

    def probabilities(self, logits: Tensor, columns: Sequence[Setting]) -> Tensor:
        """Of each row, under its settings. Columns beyond the vocabulary are padding, which stands for no text."""
        return probabilities(finite(logits[:, :self.vocab]), *columns)

    def draft_coin(self, j: int, rows: Sequence[int]) -> Any:
        """Draft j of these rows is picked with noise of its own; coupled, with the noise that the target will pick with at that place."""
        self.coins.ahead(self.vocab)
        place = self.own + j
        return self.coins[place::self.width] if len(rows) == len(self.requests) else self.coins[[row * self.width + place for row in rows]]

    def text_coin(self) -> Any:
        """The target's: a row for each text; coupled, `width` of them, one for each place."""
        return self.coins if self.coupled else self.coins[::self.width]


def finite(x: Tensor) -> Tensor:
    """x: [B, V], a model's logits or what they became. ValueError where a row has no largest (−∞ is fine). A GPU is not waited for."""
    if x.device.type == "cpu" and not (math.isfinite(x.sum(dtype=torch.float32)) or x.amax(-1).isfinite().all()):
        raise ValueError("the model's logits are not finite: its weights are damaged, or too large for this dtype "
                         "(fetch it again, or use a wider --dtype)")
    return x


class Drafter:
    """What a round needs of a drafter; as it stands here, of one that keeps nothing."""

    shares = False

    def open(self, request: Request) -> None:
        pass

    def close(self, request: Request) -> None:
        pass

    def lag(self, request: Request) -> int:
        return 0

    def follow(self, request: Request, length: int) -> None:
        pass

    def fits(self, work: Sequence[Any]) -> bool:
        return True

    def keep(self, request: Request, length: int) -> None:
        pass

    def room(self, request: Request, most: int) -> int:
        raise NotImplementedError

    def propose(self, round: Round) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


def write_drafts(llama: Any, extend: Callable[..., Any], seqs: Sequence[int], unread: Sequence[Sequence[int]], round: Round) -> tuple[Tensor, Tensor]:
    """What a model drafts for the texts of a round, one token of each after the other. unread: what its cache lacks of each text."""
    drafted, q = round.nothing()                                                            # int64[B, k], float[B, k, V]
    new = list(unread)
    for j in range(drafted.shape[1]):
        live = [b for b, gamma in enumerate(round.gammas) if gamma > j]
        step = extend([(seqs[b], new[b]) for b in live])
        tokens, last = pack([new[b] for b in live], round.device)
        logits = llama(tokens, step, rows=None if len(tokens) == len(live) else last)
        probs = round.probabilities(logits, round.columns(live))                            # [len(live), V]
        picked = round.draft_coin(j, live).pick(probs)
        where = slice(None) if len(live) == len(drafted) else live
        drafted[where, j], q[where, j] = picked, probs
        for b, token in zip(live, picked.tolist()):
            new[b] = [token]
    return drafted, q


def writer(cache: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """`write_drafts`, or its work at once: on a GPU a recording, on a CPU a call."""
    if cache.in_place:
        from graphs import Drafts
        return Drafts()
    from nativedrafts import write_at_once
    from nativestep import attends
    return write_at_once if attends(cache.keys, cache.values, ()) else write_drafts


class ModelDrafter(Drafter):
    """A model with a cache of its own."""

    def __init__(self, llama: Any, cache: Any):
        self.llama, self.cache, self.write = llama, cache, writer(cache)
        self.seqs: dict[Request, int] = {}              # a text that outgrew the draft's context is not among them

    def open(self, request: Request) -> None:
        if request not in self.seqs:
            self.seqs[request], _ = self.cache.open(request.tokens)

    def close(self, request: Request) -> None:
        if request in self.seqs:
            self.cache.free(self.seqs.pop(request))

    def lag(self, request: Request) -> int:
        return len(request.tokens) - self.cache.length(self.seqs[request]) if request in self.seqs else 0

    @torch.inference_mode()
    def follow(self, request: Request, length: int) -> None:
        if request in self.seqs and length > self.cache.max_len:
            self.close(request)
        if request not in self.seqs:
            return
        have = self.cache.length(seq := self.seqs[request])
        if unread := request.tokens[have:length]:
            try:
                self.llama(*pack([unread], self.llama.device)[:1], self.cache.extend([(seq, unread)]), rows=slice(-1, None))
            except BaseException:                       # Ctrl-C too
                self.cache.truncate(seq, have)
                raise

    def fits(self, work: Sequence[Any]) -> bool:
        """A round with drafts reads all that was not read, and all drafts but the last; a chunk, as much as the target does."""
        return self.cache.fits([(self.seqs[w.request], w.read if w.gamma is None else self.lag(w.request) + w.gamma - 1)
                                for w in work if w.request in self.seqs and w.gamma != 0])

    def room(self, request: Request, most: int) -> int:
        """γ drafts put the text and γ − 1 of them into the cache. Where the text outgrows it, speculation is over."""
        if (fits := self.cache.max_len - len(request.tokens) + 1) < 1:
            self.close(request)
        return min(most, fits) if request in self.seqs else 0

    def propose(self, round: Round) -> tuple[Tensor, Tensor]:
        seqs = [self.seqs.get(request, -1) for request in round.requests]
        unread = [request.tokens[self.cache.length(seq):] if gamma else [] for request, seq, gamma in zip(round.requests, seqs, round.gammas)]
        return self.write(self.llama, self.cache.extend, seqs, unread, round)

    def keep(self, request: Request, length: int) -> None:
        if request in self.seqs:
            seq = self.seqs[request]
            self.cache.truncate(seq, min(self.cache.length(seq), length))
            self.cache.settle(seq, request.tokens)


class SelfDrafter(Drafter):
    """The target's INT4 copy (`Llama.rounded`), in the target's cache. Between rounds nothing of it is there.

    There is always room: what it writes, the last token and all drafts but one, is less than what the target will.
    """

    shares = True

    def __init__(self, llama: Any, cache: Any):
        self.llama, self.cache, self.write = llama, cache, writer(cache)

    def room(self, request: Request, most: int) -> int:
        """None for the first token. (Not: where the prompt is pending. A twin's is not, and γ must depend on the text alone.)"""
        return most if len(request.tokens) > request.prompt else 0

    def propose(self, round: Round) -> tuple[Tensor, Tensor]:
        """Nothing of this is published: these keys and values are not the target's, and their tokens may be rejected."""
        seqs = [request.seq for request in round.requests]
        before = [self.cache.length(seq) for seq in seqs]
        try:
            return self.write(self.llama, partial(self.cache.extend, publish=False), seqs, [request.tokens[-1:] for request in round.requests], round)
        finally:                                        # Ctrl-C too
            for seq, length in zip(seqs, before):
                self.cache.truncate(seq, length)

    @torch.inference_mode()
    def estimate(self) -> float:
        """Seconds of a drafted token, at least: of a token through one layer, as many times as there are layers."""
        llama, step, start = self.llama, Alone(torch.zeros(1, dtype=torch.int64, device=self.llama.device)), 0.0
        x, turns = llama.embed.rows(step.positions), llama.turns(step.positions)
        for _ in range(2):                              # the first warms up
            start = time.perf_counter()
            llama.layers[0](x, *turns, partial(step.attend, 0))
        return (time.perf_counter() - start) * len(llama.layers)


class NgramDrafter(Drafter):
    """Looks the last n tokens up in the text before them, the longest n first, and proposes what followed there."""

    def __init__(self, longest: int = 3):
        self.longest = longest
        self.index: dict[Request, tuple[int, dict[tuple[int, ...], int]]] = {}   # n-grams ending before a position -> where they last ended

    def open(self, request: Request) -> None:
        self.index[request] = (0, {})

    def close(self, request: Request) -> None:
        self.index.pop(request, None)

    def room(self, request: Request, most: int) -> int:
        return len(self.look_up(request, most))

    def propose(self, round: Round) -> tuple[Tensor, Tensor]:
        drafted, q = round.nothing()
        for b, (request, gamma) in enumerate(zip(round.requests, round.gammas)):
            for j, token in enumerate(self.look_up(request, gamma)):
                drafted[b, j], q[b, j, token] = token, 1
        return drafted, q

    def look_up(self, request: Request, count: int) -> list[int]:
        """Up to `count` tokens. What is copied may run into what is being proposed: a text that repeats itself goes on doing so."""
        text, (done, ends) = request.tokens, self.index[request]
        for end in range(done + 1, len(text)):                                              # every n-gram but those at the very end
            for n in range(1, min(self.longest, end) + 1):
                ends[tuple(text[end - n:end])] = end
        self.index[request] = (max(done, len(text) - 1), ends)
        start = next((ends[gram] for n in range(min(self.longest, len(text)), 0, -1) if (gram := tuple(text[-n:])) in ends), None)
        if start is None:
            return []
        period = len(text) - start
        return [text[start + j % period] for j in range(count)]
