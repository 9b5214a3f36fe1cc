"""A training run: its learning rate, its steps, and the checkpoints from which it goes on.

What step i reads depends on i alone, so a run that is killed goes on from its last checkpoint, and
ends as if it had not been, to the bit. It loses 20 seconds at most. A folder holds one run:

    run.json       the flags that it began with; a run with others is refused
    training.pt    steps done, weights, optimizers

The optimizers are PyTorch's: Muon for the layers' matrices, AdamW for embeddings, norms and biases.
A matrix's gradient is dominated by a few directions; Muon takes the momentum M = U S Vᵀ and moves
the matrix by U Vᵀ, the same distance in every direction: 15 products for each matrix and step, in
bfloat16 on a GPU.

Invariant: a checkpoint is written whole, or the old one stays. Not covered: several GPUs; two
programs that begin in one folder at the same time.

Muon: Jordan et al. 2024 (kellerjordan.github.io/posts/muon).
"""

import argparse
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from app.shell import check_folder, is_out_of_memory, say
from checkpoint.files import new_file, read_json, write_json
from errors import UserError
from model import Llama

FLAGS = "run.json"
FREE = ("out", "device", "steps", "epochs")  # a run may go on with others of these
CHECKPOINT = "training.pt"
SECONDS = 20  # from one checkpoint to the next

# ---- The folder ----------------------------------------------------------------------------------


def check_out(out: Path, flags: dict[str, str]) -> None:
    """UserError unless a run with these flags can begin in the folder, or go on there."""
    check_folder(out)
    file = out / FLAGS
    if not out.exists() or {*out.iterdir()} <= {file}:
        return
    began = read_json(file) if file.exists() else {}
    for name, value in flags.items():
        if name not in FREE and began.get(name) != value:
            raise UserError(
                f"--out {out} holds something else than this run ({FLAGS}: {name} is "
                f"{began.get(name, 'not there')}, here {value}): give the flags it began with, or "
                "name a new folder"
            )


def begin_run(out: Path, flags: dict[str, str]) -> None:
    """Make the folder, and write down the flags."""
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / FLAGS, flags)


# ---- The steps -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hyperparameters:
    """What a run can choose."""

    steps: int = 100
    batch: int = 8
    length: int = 512
    warmup: int = 40
    decay: float = 0.5  # share of the steps, at the end, in which the rate falls to 0
    sampled: float = 0.5  # share of the steps on texts that are sampled from the target
    overlap: float = 0.25  # share of the steps, at the end, with the loss 1 − α

    def factor(self, step: int) -> float:
        """The share of the full learning rate at this step: up to 1, constant, then down to 0."""
        rising = (step + 1) / self.warmup
        falling = (self.steps - step) / max(1.0, self.decay * self.steps)
        return min(1.0, rising, falling)


def parameters(model: Llama) -> list[Tensor]:
    """What training changes: all weights of a plain model, each once. (q_proj, k_proj and v_proj
    are views of one.)"""
    tensors = model.named_tensors().values()
    wholes = [part if part._base is None else part._base for part in tensors]
    return list({id(whole): whole for whole in wholes if whole.is_floating_point()}.values())


def make_optimizers(
    student: Llama, rates: tuple[float, float], decay: float
) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, with this weight decay; AdamW for all others. rates: Muon's,
    then AdamW's."""
    matrix_rate, other_rate = rates
    tables = (student.embed.weight, student.head.weight)
    matrices = []
    others = []
    for weight in parameters(student):
        is_table = any(weight is table for table in tables)
        group = matrices if weight.dim() == 2 and not is_table else others
        group.append(weight.requires_grad_())
    return [
        torch.optim.Muon(matrices, lr=matrix_rate, weight_decay=decay),
        torch.optim.AdamW(others, lr=other_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


class InFloat32(TorchFunctionMode):
    """Within, what is rounded to bfloat16 on a CPU is copied as float32. PyTorch's Muon rounds so
    before its products, which are slow on a CPU without instructions for bfloat16."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple = (), named: dict | None = None
    ) -> Any:
        if function is Tensor.bfloat16 and arguments[0].device.type == "cpu":
            return arguments[0].to(torch.float32, copy=True)
        return function(*arguments, **(named or {}))


class Run:
    """The training of a student. A subclass has `batch()`, what the next step reads, and the `loss`
    of a batch: both depend on the weights and on the number of the step alone."""

    autocast = False  # whether products on a CPU are in bfloat16

    def __init__(
        self, student: Llama, recipe: Hyperparameters, optimizers: list[torch.optim.Optimizer]
    ):
        self.student = student
        self.recipe = recipe
        self.optimizers = optimizers
        self.steps = 0  # done

    def step(self) -> float:
        """One training step -> its loss."""
        recipe = self.recipe
        rounding = nullcontext() if self.autocast else InFloat32()
        loss = self.loss(self.batch().to(self.student.device))
        loss.backward()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = recipe.factor(self.steps) * optimizer.defaults["lr"]
            with rounding:
                optimizer.step()
            optimizer.zero_grad()
        self.steps += 1
        return loss.item()

    def run(self, out: Path) -> None:
        """Train to the last step, from the folder's checkpoint, if there is one."""
        checkpoint = out / CHECKPOINT
        if checkpoint.exists():
            self.resume(checkpoint)
            say(f"going on after step {self.steps} ({checkpoint})")
        steps = self.recipe.steps
        saved = time.monotonic()
        losses = []
        while self.steps < steps:
            losses.append(self.step())
            if self.steps == steps or time.monotonic() - saved > SECONDS:
                say(f"step {self.steps:5} of {steps}  loss {mean(losses):.4f}")
                self.save(checkpoint)
                saved = time.monotonic()
                losses = []

    def save(self, file: Path) -> None:
        """Write a checkpoint. If that fails, the old file stays as it was."""
        state = dict(
            steps=self.steps,
            weights=self.student.named_tensors(),
            optimizers=[optimizer.state_dict() for optimizer in self.optimizers],
        )
        with new_file(file) as new:
            try:
                torch.save(state, new)
            except RuntimeError:  # what PyTorch makes of an OSError
                raise OSError(f"{file} cannot be written: is the disk full?") from None

    @torch.no_grad()
    def resume(self, file: Path) -> None:
        """Go on from a checkpoint. UserError if the file is damaged."""
        try:
            state = torch.load(file, self.student.device, weights_only=True)
        except Exception as error:  # of damaged files PyTorch raises whatever it meets
            if is_out_of_memory(error):
                raise
            raise UserError(
                f"{file} is not a whole checkpoint: delete it to train from the beginning"
            ) from None
        for name, weight in self.student.named_tensors().items():
            weight.copy_(state["weights"][name])
        for optimizer, stored in zip(self.optimizers, state["optimizers"]):
            optimizer.load_state_dict(stored)
        self.steps = state["steps"]


# ---- Flags ---------------------------------------------------------------------------------------


def count(text: str) -> int:
    """The type of a flag that counts something, or is a seed."""
    value = int(text)
    if not 1 <= value <= 2**20:
        raise argparse.ArgumentTypeError(f"it is {value}: it must be from 1 to {2**20:,}")
    return value


def share(text: str) -> float:
    """The type of a flag that is a share of something."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"it is {value}: a share is from 0 to 1")
    return value
