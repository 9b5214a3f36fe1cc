"""From logits to one probability vector, and the one place where randomness enters.

`probabilities` turns logits into the distribution that tokens are drawn from, for the target, for
drafts and for plain decoding. Before it, `penalize` changes the logits by the tokens that come
before. A draft is such a token, too: each row of a verification has penalties of its own, for the
text with the drafts before it. The steps, in order:

    repetition    of a token in the prompt or the output: l / r if l > 0, else l · r (Keskar et al.
                  2019)
    presence      l − a, if the output has the token
    frequency     l − b · n, if the output has it n times
    logit bias    l + the token's own bias
    min tokens    the least number for end-of-text, until the output has min_tokens tokens

    temperature   softmax(logits / t); t = 0 is a one-hot at the largest logit
    top-k         keep the k most probable tokens
    top-p         keep the fewest of these that hold a share p of their mass (Holtzman et al. 2020)
    min-p         keep tokens with at least min_p of the largest probability (Nguyen et al. 2024)

Ties go to the lower index, so top-k keeps exactly k tokens. A filter leaves the rows that do not
use it unchanged, bit for bit. So a request's distributions do not depend on the filters of the
other requests in the batch.

All randomness goes through an rng with two methods: `accept(prob)` and `pick(probs)`. The
production rng, `Keyed`, is a counter-based random number generator (Salmon et al. 2011). It has no
state: each number is a SplitMix64 hash (Steele, Lea & Flood 2014) of (seed, position, role, i). The
role says what the number decides; i is the candidate in `pick`. So a request's random numbers do
not depend on its batch or the device. `pick` returns argmax p_i / E_i, where E_i = −log u_i is
exponential. That is an exact draw from p (the Gumbel-max trick). With the same noise, two similar
distributions usually pick the same token.

Invariant: `accept` returns u < prob with u in [0, 1), so it never accepts probability 0 and always
accepts probability 1. (`pick` uses a u that is half a step larger, so that log u is finite.)
Cost: a sort of the vocabulary for top-k and top-p. gpu/draw.py finds their thresholds without a
sort, and cpu/ sorts only the likely tokens.

    B rows, one request each · k drafted tokens · V vocabulary
    key: an int64 made of seed and position · stream: key ^ role, from which a pick's numbers are
    hashed
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from copy import copy
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from errors import UserError
from settings import PENALTIES

Setting = float | int | Tensor | None  # one value for all rows, or one per row; None: no filter
LOGPROB_ROWS = 32  # rows converted to float64 at a time, because a prompt has many


# ---- Probabilities -------------------------------------------------------------------------------


def probabilities(
    logits: Tensor,
    temperature: Setting = 1.0,
    top_k: Setting = None,
    top_p: Setting = None,
    min_p: Setting = None,
) -> Tensor:
    """logits: float[..., V] -> probabilities [..., V], float32 (float64 if the logits are float64).

    A setting is a number, or a tensor [...] with a number for each row. Its range is not checked
    here, but in settings.Settings.
    """
    # The order of a sum changes its last bits. In float64 they are lost in rounding to float32.
    rows = logits.reshape(-1, logits.shape[-1]).double()  # [B, V]
    probs = soften(rows, 1.0 if temperature is None else temperature)
    if top_k is not None or top_p is not None:
        probs = keep_top(
            probs,
            column(0 if top_k is None else top_k, rows),
            column(1.0 if top_p is None else top_p, rows),
        )
    if min_p is not None:
        least = column(min_p, rows) * probs.amax(-1, keepdim=True)
        kept = normalized(torch.where(probs >= least, probs, 0))
        probs = torch.where(least > 0, kept, probs)
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return probs.to(dtype).view(logits.shape)


def penalize(
    logits: Tensor,
    tokens: Sequence[int],
    num_prompt_tokens: int,
    ends: Collection[int],
    **penalties: Any,
) -> Tensor:
    """The logits of the token after these: float[..., V] -> the same shape, at least float32.

    tokens: the prompt, the output, and perhaps drafts. ends: the tokens that end the text; one
    beyond the vocabulary is never drawn. penalties: some of settings.PENALTIES, by name.
    """
    repetition, presence, frequency, biases, min_tokens = (PENALTIES | penalties).values()
    V = logits.shape[-1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    device = logits.device
    text = torch.tensor(tokens, dtype=torch.int64, device=device)
    output = text[num_prompt_tokens:]
    is_seen = torch.bincount(text, minlength=V) > 0  # bool[V]
    count = torch.bincount(output, minlength=V)
    count = count.to(logits.dtype)  # [V]
    is_made = count.clamp(max=1)  # 0 or 1
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(is_seen, repeated, logits)
    logits = logits - presence * is_made - frequency * count
    for token, bias in biases.items():
        logits[..., token] += bias
    finite = torch.finfo(logits.dtype)
    logits = logits.clamp(finite.min, finite.max)  # what was finite stays finite
    if len(output) < min_tokens:
        early = [end for end in ends if 0 <= end < V]
        logits[..., early] = finite.min  # not −∞: a grammar may allow nothing else
    return logits


def soften(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """softmax(logits / t): float64[B, V]. Where t is 0, a one-hot at the largest logit; of equal
    ones, at the first."""
    t = column(temperature, logits)
    is_greedy = t == 0
    largest = logits.amax(-1, keepdim=True)
    scaled = (logits - largest) / torch.where(is_greedy, 1, t)  # at most 0, so exp cannot overflow
    probs = scaled.softmax(-1)
    best = logits.argmax(-1, keepdim=True)
    one_hot = torch.zeros_like(probs).scatter_(-1, best, 1)
    return torch.where(is_greedy, one_hot, probs)


def keep_top(probs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Top-k, then top-p -> normalized again, except rows without a filter, which stay as they are.

    probs: float64[B, V]. top_k and top_p: float64[B, 1]; a top_k below 1, or a top_p of 1 or more,
    is no filter.
    """
    ordered, index = probs.sort(dim=-1, descending=True, stable=True)  # ties: the lower index first
    rank = torch.arange(probs.shape[-1], device=probs.device)
    is_top_k = (rank < top_k) | (top_k < 1)
    ordered = torch.where(is_top_k, ordered, 0)
    mass = ordered.cumsum(-1)
    total = mass[:, -1:]
    mass_before = F.pad(mass[:, :-1], (1, 0))  # the mass of all more probable tokens
    is_top_p = (mass_before < top_p * total) | (top_p >= 1)  # rounding might reach the total early
    ordered = torch.where(is_top_p, ordered, 0)
    kept = torch.zeros_like(probs).scatter_(-1, index, ordered)
    keeps_all = (top_k < 1) & (top_p >= 1)
    return torch.where(keeps_all, probs, normalized(kept))


def normalized(probs: Tensor) -> Tensor:
    return probs / probs.sum(-1, keepdim=True)


def column(setting: float | int | Tensor, rows: Tensor) -> Tensor:
    """A setting as a contiguous float64[B, 1]. rows: [B, V]."""
    B = len(rows)
    if not isinstance(setting, Tensor):  # filled on the device, so nothing is copied from the host
        return torch.full((B, 1), float(setting), dtype=torch.float64, device=rows.device)
    values = setting.to(rows.device, torch.float64).reshape(-1)
    if len(values) not in (1, B):
        raise ValueError(f"a setting has {len(values)} values, and there are {B} rows of logits")
    return values.expand(B).contiguous()[:, None]


class NotFinite(UserError):
    """Logits are not finite. `whose` names their model, if the runner knows which one it is."""

    def __init__(self, whose: str = "the model", remedy: str = "fetch it again"):
        super().__init__(
            f"{whose}'s logits are not finite: its weights are damaged ({remedy}), "
            "or need a wider --dtype"
        )


def check_finite(x: Tensor, masked: bool = True) -> Tensor:
    """Return x: [B, V], logits or probabilities. NotFinite if one of its numbers is NaN or
    infinite. masked: some numbers of a row may be −∞; then the largest of each row is looked at,
    which is NaN or ∞ if any of them is."""
    if math.isfinite(x.sum(dtype=torch.float32)):  # quick test: then every term is finite
        return x
    numbers = x.amax(-1) if masked else x
    if not numbers.isfinite().all():  # otherwise only the sum overflowed
        raise NotFinite
    return x


def check_tokens(tokens: list[int]) -> list[int]:
    """Return the tokens. NotFinite for −1, which a backend returns if logits are not finite."""
    if min(tokens, default=0) < 0:
        raise NotFinite
    return tokens


class TokenLogprob(NamedTuple):
    """ln p of a token, and of the most probable tokens at its position. p is the model's own
    distribution, at temperature 1 and without filters."""

    token: int
    logprob: float
    top: list[tuple[int, float]]  # (token, ln p), the most probable first


def token_logprobs(logits: Tensor, tokens: list[int], num_top: int) -> list[TokenLogprob]:
    """logits: float[n, V], which predict the n tokens; num_top: how many of the most probable
    tokens to report."""
    index = torch.tensor(tokens, dtype=torch.int64, device=logits.device)
    index = index[:, None]  # [n, 1]
    entries = []
    for rows, own in zip(logits.split(LOGPROB_ROWS), index.split(LOGPROB_ROWS)):
        logprobs = rows.double().log_softmax(-1)
        best = logprobs.topk(min(num_top, logits.shape[1]))  # [rows, num_top]
        columns = own, logprobs.gather(1, own), best.indices, best.values
        for (token,), (logprob,), *top in zip(*(column.tolist() for column in columns)):
            entries.append(TokenLogprob(token, logprob, list(zip(*top))))
    return entries


# ---- Random numbers ------------------------------------------------------------------------------

TEXT = 0  # the role of the tokens of the output; the other roles are for speculative decoding


def draft_role(j: int) -> int:
    """The role for picking draft j, a token that a draft model proposes (speculative.py)."""
    return 2 * j + 1


def accept_role(j: int) -> int:
    """The role for deciding whether the target accepts draft j."""
    return 2 * j + 2


def as_int64(z: int) -> int:
    """The int64 with the same bits as z, an unsigned number above 2^63."""
    return z - 2**64


GOLDEN = as_int64(0x9E3779B97F4A7C15)  # SplitMix64's counter step, and its two multipliers
MIX1 = as_int64(0xBF58476D1CE4E5B9)
MIX2 = as_int64(0x94D049BB133111EB)
# Large odd factors give different keys to different pairs of small seeds and positions.
SEED_FACTOR = as_int64(0xD1342543DE82EF95)
POSITION_FACTOR = as_int64(0xAF251AF3B0F025B5)


def mix(z: Tensor) -> Tensor:
    """SplitMix64's finalizer, a bijection on 64 bits. int64 products wrap around in the same way
    on every device."""
    z = z ^ logical_shift(z, 30)
    z = z * MIX1
    z = z ^ logical_shift(z, 27)
    z = z * MIX2
    return z ^ logical_shift(z, 31)


def logical_shift(z: Tensor, count: int) -> Tensor:
    """Shift int64 to the right, and fill with zeros from the left."""
    mask = 2 ** (64 - count) - 1
    return (z >> count) & mask


@cache  # never freed, because recorded CUDA graphs (gpu/graphs.py) read these tensors
def counters(count: int, device: torch.device) -> Tensor:
    """The successive values of SplitMix64's counter: int64[count]."""
    return torch.arange(1, count + 1, device=device) * GOLDEN


def uniform(bits: Tensor) -> Tensor:
    """52 bits of each hash -> float64 in [0, 1)."""
    mantissa = logical_shift(bits, 12)
    return mantissa.double() * 2.0**-52


def exponential(streams: Tensor, count: int) -> Tensor:
    """−log u, positive and finite: float64[B, count]. streams: int64[B, 1]."""
    first = mix(streams)  # far from the numbers of neighbouring streams
    bits = mix(first + counters(count, streams.device))
    u = uniform(bits) + 2.0**-53  # half a step higher, so never 0
    return -u.log()


def pick(probs: Tensor, streams: Tensor) -> Tensor:
    """Draw an index from each row of probs: argmax p / E. An index with probability 0 is drawn only
    if the whole row is 0.

    probs: float[B, V]; streams: int64[B, 1], key ^ role of each row -> int64[B].
    """
    E = exponential(streams, probs.shape[1])
    return (probs / E).argmax(-1)


class Keyed:
    """The rng of a call. Row b's numbers depend only on (seeds[b], positions[b], role).

    seeds, positions: int64[B]. `pick` draws with `role`, one for all rows or int64[B], by the
    function `draw` (Ops.pick). `accept` decides on draft j with the role accept_role(j) instead.
    `rng[rows]` is the rng of these rows.
    """

    def __init__(
        self,
        seeds: Tensor,
        positions: Tensor,
        role: int | Tensor = TEXT,
        draw: Callable[[Tensor, Tensor], Tensor] = pick,
    ):
        keys = seeds * SEED_FACTOR + positions * POSITION_FACTOR
        self.keys = keys[:, None]  # int64[B, 1], for `accept`, which has a role for each draft
        self.streams = (keys ^ role)[:, None]  # int64[B, 1], for `pick`
        self.draw = draw

    def __getitem__(self, rows: slice | list[int]) -> Keyed:
        part = copy(self)
        part.keys = self.keys[rows]
        part.streams = self.streams[rows]
        return part

    def uniforms(self, k: int) -> Tensor:
        """float64[B, k] in [0, 1), a number for each drafted token."""
        first = accept_role(0)
        roles = torch.arange(first, accept_role(k), 2, device=self.keys.device)
        hashes = mix(self.keys ^ roles)
        return uniform(hashes)

    def accept(self, prob: Tensor) -> Tensor:
        """prob: float[B, k] -> bool[B, k], each True with its probability."""
        u = self.uniforms(prob.shape[1])
        return u < prob

    def pick(self, probs: Tensor) -> Tensor:
        """probs: float[B, V] -> int64[B], an index drawn from each row."""
        return self.draw(probs, self.streams)


def main() -> None:
    """Demonstration: the frequencies of keyed draws beside their probabilities."""
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -1.0])
    draws = 100_000
    print(f"logits {logits.tolist()}")
    print(f"each line: the probabilities, then the frequencies in {draws:,} keyed draws")
    rng = Keyed(torch.full((draws,), 42), torch.arange(draws))
    for settings in (
        {},
        {"temperature": 0.5},
        {"temperature": 0},
        {"top_k": 3},
        {"top_p": 0.8},
        {"min_p": 0.3},
    ):
        probs = probabilities(logits, **settings)
        picked = rng.pick(probs.expand(draws, -1))
        frequencies = torch.bincount(picked, minlength=len(logits)) / draws
        numbers = [f"{x:6.3f}" for x in [*probs.tolist(), *frequencies.tolist()]]
        print(f"{str(settings):20}", *numbers)


if __name__ == "__main__":
    main()
