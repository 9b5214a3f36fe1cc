"""From logits to one probability vector, and the one place where randomness enters.

`probabilities` turns logits into the distribution that is sampled, for target, draft and plain decoding, in this order:

    temperature   softmax(logits / t); t = 0 is a one-hot at the largest logit
    top-k         keep the k most probable
    top-p         of the tokens left, keep the fewest that hold at least a share p of their mass (Holtzman et al. 2020)
    min-p         keep the tokens with at least min_p times the largest probability (Nguyen et al. 2024)

Ties go to the lower index, so top-k keeps exactly k tokens. Only the 256 largest are sorted, more if a filter needs it.

All randomness goes through a coin with two methods: `accept(prob)` and `pick(probs)`. The production coin, `Keyed`, has
no state: each random number is a SplitMix64 hash (Steele, Lea & Flood 2014) of (seed, position, role, i). The role says
what the number decides; i is the candidate in `pick`. So a text does not depend on the batch, the steps or the device.
`pick` is argmax p_i / E_i with E_i = −log u_i exponential: exactly a draw from p (the Gumbel-max trick). With the same
noise, two distributions that are close mostly pick the same token.
Invariant: u is in [0, 1), and `accept` is u < prob, strictly: probability 0 is never accepted, probability 1 always.
B rows, one request each · k drafted tokens (in `_keep_top`: the setting top_k) · V vocabulary
"""

import math
from collections.abc import Callable
from copy import copy
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from errors import UserError

NOT_FINITE = "the model's logits are not finite: its weights are damaged (fetch it again), or need a wider --dtype"
Setting = (
    float | int | Tensor | None
)  # one value for all rows, or one for each row; None: no filter
SETTINGS = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)  # with their neutral values


def probabilities(
    logits: Tensor,
    temperature: Setting = 1.0,
    top_k: Setting = None,
    top_p: Setting = None,
    min_p: Setting = None,
) -> Tensor:
    """logits: float[..., V] -> probabilities of the same shape, float32 (float64 if the logits are float64).

    A setting is a number, or a tensor [...] with a number for each row. ValueError for a number that is out of range.
    Tensors are not checked here, because reading them would stall a GPU: callers check them by `check_settings`."""
    check_settings(temperature, top_k, top_p, min_p)
    rows = logits.reshape(-1, logits.shape[-1])  # [B, V]
    if not temperature.any() if isinstance(temperature, Tensor) else temperature == 0:
        probs = _one_hot(rows)
    else:
        probs = _softmax(rows.double(), temperature)
        if top_k is not None or top_p is not None:
            k, p = (
                column(neutral if s is None else s, rows) for s, neutral in ((top_k, 0), (top_p, 1))
            )
            probs = _keep_top(probs, k, p)
        if min_p is not None:
            probs = torch.where(
                probs >= column(min_p, rows) * probs.amax(-1, keepdim=True), probs, 0
            )
            probs = probs / probs.sum(-1, keepdim=True)
    return probs.to(torch.float64 if logits.dtype == torch.float64 else torch.float32).view(
        logits.shape
    )


def finite(x: Tensor) -> Tensor:
    """Return x: [B, V], logits or probabilities, unchanged. ValueError if a row's maximum is NaN or infinite."""
    if not (math.isfinite(x.sum(dtype=torch.float32)) or x.amax(-1).isfinite().all()):
        raise UserError(NOT_FINITE)
    return x


def lawful(tokens: list[int]) -> list[int]:
    """Return the tokens unchanged. ValueError for −1, which `pick` on a GPU gives where logits are not finite."""
    if min(tokens, default=0) < 0:
        raise UserError(NOT_FINITE)
    return tokens


def check_settings(
    temperature: Setting = None, top_k: Setting = None, top_p: Setting = None, min_p: Setting = None
) -> None:
    """Raise a ValueError that names the setting, its value and its range."""
    rules = [
        ("temperature", temperature, 0, 1e300, "from 0 (always the most probable token) to 1e300"),
        ("top_k", top_k, 0, 2**31, "a whole number from 0 (keeps all) to 2^31"),
        ("top_p", top_p, 1e-300, 1, "above 0 and at most 1 (1 keeps all)"),
        ("min_p", min_p, 0, 1, "between 0 (keeps all) and 1"),
    ]
    for name, value, low, high, rule in rules:
        if value is None or isinstance(value, Tensor):
            continue
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (number and low <= value <= high) or name == "top_k" and value % 1:
            raise UserError(f"{name} is {value!r}: it must be {rule}")


def column(setting: float | int | Tensor, rows: Tensor) -> Tensor:
    """A setting as a contiguous float64[B, 1], as the GPU's kernels read it."""
    if not isinstance(setting, Tensor):  # filled on the device: no copy from the host
        return torch.full((len(rows), 1), float(setting), dtype=torch.float64, device=rows.device)
    values = setting.to(rows.device, torch.float64).reshape(-1)
    if len(values) not in (1, len(rows)):
        raise UserError(
            f"a setting has {len(values)} values and there are {len(rows)} rows of logits: "
            "give one value, or one a row"
        )
    return values.expand(len(rows)).contiguous()[:, None]


def _one_hot(rows: Tensor) -> Tensor:  # 1 at each row's largest logit, the first if several tie
    return torch.zeros_like(rows).scatter_(-1, rows.argmax(-1, keepdim=True), 1)


def _softmax(rows: Tensor, temperature: Setting) -> Tensor:
    """float64[B, V] -> softmax(rows / t). Where t is 0, a one-hot at the first of the largest logits."""
    if temperature is None or not isinstance(temperature, Tensor) and temperature == 1:
        return rows.softmax(-1)
    t = column(temperature, rows)
    zero, rows = t == 0, rows - rows.amax(-1, keepdim=True)  # the largest is 0: no overflow
    probs = (rows / torch.where(zero, 1, t)).softmax(-1)
    return torch.where(zero, _one_hot(rows), probs) if zero.any() else probs


def _keep_top(probs: Tensor, k: Tensor, p: Tensor) -> Tensor:
    """Keep each row's n most probable tokens, n by top-k and then top-p. probs: float64[B, V]; k, p: float64[B, 1]."""
    V = probs.shape[-1]
    k = torch.where((k < 1) | (k > V), V, k).long()
    size = max([256, *k[k < V].tolist()])  # nearly always enough
    while True:
        head = probs.topk(min(size, V)).values  # [B, size], descending
        mass = head.cumsum(-1)
        if size >= V or bool(((k < V) | (p >= 1) | (mass[:, -1:] >= p)).all()):
            break
        size *= 8
    last = head.shape[-1] - 1
    total = torch.where(k < V, mass.gather(-1, (k - 1).clamp(max=last)), 1)  # mass left by top-k
    reach = (F.pad(mass[:, :-1], (1, 0)) < p * total).sum(-1, keepdim=True)  # tokens left by top-p
    n = torch.where(p < 1, torch.minimum(k, reach), k)
    least = head.gather(-1, (n - 1).clamp(max=last))
    above, ties = probs > least, probs == least
    keep = above | (ties & (ties.cumsum(-1) <= n - above.sum(-1, keepdim=True)))
    probs = torch.where(keep | (n == V), probs, 0)
    return probs / probs.sum(-1, keepdim=True)


TEXT = 0  # the role of plain picks, corrections and bonus tokens
GOLDEN, MIX1, MIX2 = (
    z - 2**64 for z in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)  # as int64
SEED, POSITION = (
    z - 2**64 for z in (0xD1342543DE82EF95, 0xAF251AF3B0F025B5)
)  # odd: realistic keys do not collide


def draft_role(j: int) -> int:  # the role of the pick of drafted token j of a round
    return 2 * j + 1


def accept_role(j: int) -> int:  # the role of the decision on drafted token j of a round
    return 2 * j + 2


def _mix(z: Tensor) -> Tensor:
    """SplitMix64's finalizer, a bijection of 64 bits. int64 products wrap the same way on every device."""
    z = (
        (z >> 30).bitwise_and_(2**34 - 1).bitwise_xor_(z).mul_(MIX1)
    )  # the masks make the shifts logical
    z = (z >> 27).bitwise_and_(2**37 - 1).bitwise_xor_(z).mul_(MIX2)
    return (z >> 31).bitwise_and_(2**33 - 1).bitwise_xor_(z)


@cache  # recorded CUDA graphs (gpu/graphs.py) keep these tensors
def _steps(
    count: int, device: torch.device
) -> Tensor:  # int64[count]: SplitMix64's counter, number by number
    return torch.arange(1, count + 1, device=device) * GOLDEN


def _uniform(bits: Tensor) -> Tensor:  # 52 bits of each hash -> float64 in [0, 1)
    return (bits >> 12).bitwise_and_(2**52 - 1).double().mul_(2.0**-52)


def _exponential(
    streams: Tensor, steps: Tensor
) -> Tensor:  # −log u, above 0 and finite: float64[B, len(steps)]
    return _uniform(_mix(_mix(streams) + steps)).add_(2.0**-53).log_().neg_()


def pick(probs: Tensor, streams: Tensor) -> Tensor:
    """Draw an index from each row of probs: argmax p / E. An index of probability 0 is drawn only if all are 0.

    probs: float[B, V]; streams: int64[B, 1], the key of each row's noise -> int64[B]."""
    steps = _steps(probs.shape[1], probs.device)
    if (
        probs.numel() > 2**15
        and probs.amin() == 0
        and len(columns := (probs > 0).any(0).nonzero()[:, 0])
    ):
        return columns[
            (probs[:, columns] / _exponential(streams, steps[columns])).argmax(-1)
        ]  # no noise for p = 0
    return (probs / _exponential(streams, steps)).argmax(-1)


class Keyed:
    """The coin of a step: row b's numbers are a function of (seeds[b], positions[b], role) alone.

    seeds, positions: int64[B]; role: that of `pick`, one for all rows or int64[B]; picks: how `pick` draws (Ops.pick).
    `accept` decides on drafted token j in role accept_role(j). `coin[rows]` is the coin of these rows."""

    def __init__(
        self, seeds: Tensor, positions: Tensor, role: int | Tensor = TEXT, picks: Callable = pick
    ):
        self.place, self.picks = (
            (seeds * SEED + positions * POSITION)[:, None],
            picks,
        )  # int64[B, 1]
        self.streams = self.place ^ (
            role[:, None] if isinstance(role, Tensor) else role
        )  # int64[B, 1]

    def __getitem__(self, rows: slice | list[int]) -> "Keyed":
        part = copy(self)
        part.place, part.streams = self.place[rows], self.streams[rows]
        return part

    def uniforms(self, k: int) -> Tensor:  # float64[B, k] in [0, 1), one for each drafted token
        return _uniform(
            _mix(
                self.place
                ^ torch.arange(accept_role(0), accept_role(k), 2, device=self.place.device)
            )
        )

    def accept(self, prob: Tensor) -> Tensor:
        """prob: float[B, k] -> bool[B, k], True with that probability."""
        return self.uniforms(prob.shape[1]) < prob

    def pick(self, probs: Tensor) -> Tensor:
        """probs: float[B, V] -> int64[B], an index with these probabilities."""
        return self.picks(probs, self.streams)


def main() -> None:
    logits, draws = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -1.0]), 100_000
    print(
        f"logits {logits.tolist()}; each line: the probabilities, then the frequencies in {draws:,} keyed draws"
    )
    for setting in (
        {},
        {"temperature": 0.5},
        {"temperature": 0},
        {"top_k": 3},
        {"top_p": 0.8},
        {"min_p": 0.3},
    ):
        probs = probabilities(logits, **setting)
        picked = Keyed(torch.full((draws,), 42), torch.arange(draws)).pick(probs.expand(draws, -1))
        columns = *probs.tolist(), *(torch.bincount(picked, minlength=len(logits)) / draws).tolist()
        print(f"{str(setting):20}", *(f"{column:6.3f}" for column in columns))


if __name__ == "__main__":
    main()
