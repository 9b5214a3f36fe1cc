"""From logits to one probability vector, and the one place where randomness enters.

`probabilities` turns logits into the distribution that is really sampled. Target, draft and plain decoding all use it, so that
a token is accepted, rejected or drawn only against distributions that something was really drawn from. In this order:

    temperature   softmax(logits / t); t = 0 is a one-hot at the largest logit
    top-k         keep the k most probable
    top-p         keep the fewest that hold at least a share p of what is left, the most probable first (Holtzman et al. 2020)
    min-p         keep those with at least min_p times the probability of the most probable (Nguyen et al. 2024)

Ties go to the lower index, so that top-k keeps exactly k. Only the largest candidates are sorted, never the whole vocabulary; on a GPU none
is, nobody waits for a number, and all of it, coin included, is seven launches at most (draw.py).

All randomness goes through a coin with two verbs: `accept(prob)` and `pick(probs)`. `Keyed` is the one used in production. It is
counter-based: number i of a stream is a hash of (seed, position, role, i), with no state, so a text does not depend on who
else is in the batch, on how it is cut into steps, or on the device. The hash is SplitMix64 (Steele, Lea & Flood 2014), twice: number
(seed, position, role) of one stream is where the stream begins whose number i is used.
`pick` is argmax p_i / E_i with E_i = −log u_i exponential: exactly a draw from p (the Gumbel-max trick, without logarithms of
p), and two distributions that are close mostly pick the same token from the same noise.

Invariant: u is in [0, 1), and `accept` is u < prob, strictly: probability 0 is never accepted, probability 1 always.

    B rows, one request each · k drafted tokens · V vocabulary
"""
from copy import copy
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

import native
from kernels import on_gpu

Setting = float | int | Tensor | None      # one value, or one a row; None: no such filter


def probabilities(logits: Tensor, temperature: Setting = 1.0, top_k: Setting = None, top_p: Setting = None,
                  min_p: Setting = None) -> Tensor:
    """logits: float[..., V] -> probabilities of the same shape, float32 (float64 where the logits are).

    Settings are numbers, or tensors of the rows' shape [...]; top_k 0, top_p 1 and min_p 0 filter nothing. Raises ValueError for a
    number that is out of range (a tensor is not looked at, which would stall a GPU: `check_settings` is for whoever fills it).
    """
    check_settings(temperature, top_k, top_p, min_p)
    dtype, rows = torch.float64 if logits.dtype == torch.float64 else torch.float32, logits.reshape(-1, logits.shape[-1])      # [B, V]
    if on_gpu(logits.device):
        import draw
        return draw.probabilities(rows, temperature, top_k, top_p, min_p, dtype).view(logits.shape)
    if not temperature.any() if isinstance(temperature, Tensor) else temperature == 0:      # and no filter drops the largest
        return _hot(rows).to(dtype).view(logits.shape)
    rows = rows.double()
    k, p, m = (None if s is None else column(s, rows) for s in (top_k, top_p, min_p))
    probs = _softmax(rows, temperature)
    if k is not None or p is not None:
        probs = _keep_top(probs, k, p)
    if m is not None:
        probs = torch.where(probs >= m * probs.amax(-1, keepdim=True), probs, 0)
    if k is not None or p is not None or m is not None:
        probs = probs / probs.sum(-1, keepdim=True)
    return probs.to(dtype).view(logits.shape)


def check_settings(temperature: Setting = None, top_k: Setting = None, top_p: Setting = None, min_p: Setting = None) -> None:
    """Raise a ValueError that names the setting, its value and its range."""
    rules = [("temperature", temperature, 0, 1e300, "a number of at least 0 (0 always takes the most probable token)"),
             ("top_k", top_k, 0, 2**31, "a whole number of at least 0 (0 keeps all)"),
             ("top_p", top_p, 1e-300, 1, "above 0 and at most 1 (1 keeps all)"),
             ("min_p", min_p, 0, 1, "between 0 (keeps all) and 1")]
    for name, value, low, high, rule in rules:
        if value is None or isinstance(value, Tensor):
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high or (name == "top_k" and value % 1):
            raise ValueError(f"{name} is {value!r}: it must be {rule}")


def column(setting: float | int | Tensor, rows: Tensor) -> Tensor:
    """A setting as float64[B, 1], one number after the other in memory: kernels read it there (draw.py)."""
    if not isinstance(setting, Tensor):
        return torch.full((len(rows), 1), float(setting), dtype=torch.float64, device=rows.device)  # filled there: nothing is copied
    values = setting.to(rows.device, torch.float64).reshape(-1)
    if len(values) not in (1, len(rows)):
        raise ValueError(f"a setting has {len(values)} values and there are {len(rows)} rows of logits: give one value, or one a row")
    return values.expand(len(rows)).contiguous()[:, None]


def _softmax(rows: Tensor, temperature: Setting) -> Tensor:
    """float64[B, V] -> probabilities. Where the temperature is 0, a one-hot at the first of the largest logits."""
    if temperature is None or (not isinstance(temperature, Tensor) and temperature == 1):
        return rows.softmax(-1)
    t = column(temperature, rows)
    zero, rows = t == 0, rows - rows.amax(-1, keepdim=True)                                  # the largest is 0: nothing overflows
    if not zero.any():
        return (rows / t).softmax(-1)
    return torch.where(zero, _hot(rows), (rows / torch.where(zero, 1, t)).softmax(-1))


def _hot(rows: Tensor) -> Tensor:
    """1 at the first of each row's largest."""
    return torch.zeros_like(rows).scatter_(-1, rows.argmax(-1, keepdim=True), 1)


def _keep_top(probs: Tensor, k: Tensor | None, p: Tensor | None) -> Tensor:
    """Zero all but the n most probable of each row, n being what top-k and then top-p leave."""
    V = probs.shape[-1]
    k = torch.full_like(probs[:, :1], V) if k is None else torch.where((k < 1) | (k > V), V, k)
    k, p = k.long(), torch.ones_like(probs[:, :1]) if p is None else p
    size = max([256, *torch.where(k < V, k, 1)[:, 0].tolist()])                             # nearly always enough
    while True:
        size = min(size, V)
        head = probs.topk(size).values                                                       # [B, size], descending
        mass = head.cumsum(-1)
        if size == V or bool(((k < V) | (p >= 1) | (mass[:, -1:] >= p)).all()):
            break
        size *= 8
    total = torch.where(k < V, mass.gather(-1, k.clamp(max=size) - 1), 1)                    # what top-k left
    reach = (F.pad(mass[:, :-1], (1, 0)) < p * total).sum(-1, keepdim=True)                  # tokens before which the share was below p
    n = torch.where(p < 1, torch.minimum(k, reach), k)
    least = head.gather(-1, n.clamp(max=size) - 1)
    above, ties = probs > least, probs == least
    keep = above | (ties & (ties.cumsum(-1) <= n - above.sum(-1, keepdim=True)))
    return torch.where(keep | (n == V), probs, 0)


# ------------------------------------------------------------------------------------------------------------------------------
# The coin

TEXT = 0                                    # the role of plain picks, corrections and bonus tokens
LITTLE = 2**15                              # so many numbers cost less than a look at which of them matter


def draft_role(j: int) -> int:
    """The role of the pick of drafted token j of a round."""
    return 2 * j + 1


def accept_role(j: int) -> int:
    """The role of the decision on drafted token j of a round."""
    return 2 * j + 2


def _signed(z: int) -> int:
    return z - 2**64 if z >= 2**63 else z


GOLDEN, MIX1, MIX2 = _signed(0x9E3779B97F4A7C15), _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)
SEED, POSITION = _signed(0xD1342543DE82EF95), _signed(0xAF251AF3B0F025B5)     # odd: no two (seed, position, role) of everyday size share a stream


def _mix(z: Tensor) -> Tensor:
    """SplitMix64's finalizer, a bijection of 64 bits. int64 products wrap the same way on every device."""
    z = (z >> 30).bitwise_and_(2**34 - 1).bitwise_xor_(z).mul_(MIX1)                          # the masks make the shifts logical
    z = (z >> 27).bitwise_and_(2**37 - 1).bitwise_xor_(z).mul_(MIX2)
    return (z >> 31).bitwise_and_(2**33 - 1).bitwise_xor_(z)


@cache                                                  # recordings (graphs.py) go on using them
def _steps(count: int, device: torch.device) -> Tensor:
    """How far along their stream its first numbers are: int64[count]."""
    return torch.arange(1, count + 1, device=device) * GOLDEN


class Keyed:
    """The coin of a step: row b's numbers are a function of (seeds[b], positions[b], role) alone.

    seeds, positions: int64[B]. `pick` draws in the given role, one for all rows or int64[B]; `accept` decides on drafted token j in role
    accept_role(j). `coin[rows]` is the coin of some rows; `ahead(V)` makes the noise of all of them at once, where that is cheaper.
    """

    def __init__(self, seeds: Tensor, positions: Tensor, role: int | Tensor = TEXT):
        self.place = (seeds * SEED + positions * POSITION)[:, None]                          # int64[B, 1]
        self.role = role.expand(len(self.place))[:, None] if isinstance(role, Tensor) else role      # whoever reads it in place finds one a row
        self.noise: Tensor | None = None                                                     # float64[B, V]

    def __getitem__(self, rows: slice | list[int]) -> "Keyed":
        part = copy(self)
        part.place = self.place[rows]
        part.role = self.role[rows] if isinstance(self.role, Tensor) else self.role
        part.noise = None if self.noise is None else self.noise[rows]
        return part

    def ahead(self, V: int) -> None:
        if self.noise is None and len(self.place) * V <= LITTLE and not self._on_the_way():
            self.noise = self._exponential(_steps(V, self.place.device))

    def accept(self, prob: Tensor) -> Tensor:
        """prob: float[B, k] -> bool[B, k], True with that probability."""
        return self._uniform(torch.arange(accept_role(0), accept_role(prob.shape[1]), 2, device=prob.device)) < prob

    def pick(self, probs: Tensor) -> Tensor:
        """probs: float[B, V] -> int64[B], an index with these probabilities (one of probability 0 only if all are)."""
        if self.noise is not None:
            return (probs / self.noise).argmax(-1)
        if on_gpu(probs.device):
            import draw
            return draw.pick(probs, self.place ^ self.role)
        if probs.device.type == "cpu" and probs.shape[1] and self._on_the_way():
            return native.pick(probs, self.place, self.role)
        steps = _steps(probs.shape[1], probs.device)
        if probs.numel() <= LITTLE or probs.device.type != "cpu" or probs.amin() > 0:
            return (probs / self._exponential(steps)).argmax(-1)
        columns = (probs > 0).any(0).nonzero()[:, 0]                                         # noise only where it can matter
        if len(columns) == 0:
            return torch.zeros(len(probs), dtype=torch.int64)
        return columns[(probs[:, columns] / self._exponential(steps[columns])).argmax(-1)]

    def _on_the_way(self) -> bool:
        """Whether noise is made where it is used, by C or by a GPU's kernel."""
        return on_gpu(self.place.device) or self.place.device.type == "cpu" and native.library() is not None

    def _uniform(self, roles: Tensor | int, steps: Tensor | int = 0) -> Tensor:
        """52-bit uniforms in [0, 1): float64[B, len(roles)], where the streams of these roles begin, or [B, len(steps)], so far along one."""
        bits = _mix(self.place ^ roles)
        bits = bits if isinstance(steps, int) else _mix(bits + steps)
        return (bits >> 12).bitwise_and_(2**52 - 1).double().mul_(2.0**-52)

    def _exponential(self, steps: Tensor) -> Tensor:
        return self._uniform(self.role, steps).add_(2.0**-53).log_().neg_()                  # of a number in (0, 1): above 0, finite


# ------------------------------------------------------------------------------------------------------------------------------
# The demonstration: one row of logits through the filters, and 100,000 draws beside the probabilities.

def main() -> None:
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -1.0])
    settings = [dict(temperature=1.0), dict(temperature=0.5), dict(temperature=0), dict(top_k=3), dict(top_p=0.8), dict(min_p=0.3),
                dict(temperature=0.7, top_k=4, top_p=0.9)]
    draws = 100_000
    print(f"logits {logits.tolist()}; each line: the probabilities, then the frequencies in {draws:,} keyed draws")
    for setting in settings:
        probs = probabilities(logits, **setting)
        picked = Keyed(torch.full((draws,), 42), torch.arange(draws)).pick(probs.expand(draws, -1))
        counts = torch.bincount(picked, minlength=len(logits)) / draws
        name = ", ".join(f"{k} {v}" for k, v in setting.items())
        print(f"{name:38}", *(f"{p:.3f}" for p in probs.tolist()), " |", *(f"{c:.3f}" for c in counts.tolist()))


if __name__ == "__main__":
    main()
