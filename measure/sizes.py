"""How much is measured, and with which prompts."""

from dataclasses import dataclass

import torch

OPENINGS = (
    "Once upon a time",
    "One day, Tom",
    "The little dog",
    "Lily saw a",
    "There was a big red ball",
    "Mom said",
)
# The prompts of the combined table: a common beginning, and a sentence for each.
BEGINNING = (
    "Once upon a time, there was a little girl named Lily. She had a dog named Max and a big red "
    "ball. Every day they went to the park with her mom. There was a tall tree, a pond with ducks, "
    "and a lot of grass. Lily loved to run and to laugh. Max loved to bark at the ducks, and the "
    "ducks were not afraid of him at all. Her friend Tom came to the park too, with his blue kite. "
)
SENTENCES = (
    "One day, the ball was gone.",
    "One day, it began to rain.",
    "Then Tom saw a cat in the tree.",
    "Max found a box in the grass.",
    "But today Lily was sad.",
    "A duck came to them and said,",
    "Tom's kite flew away.",
    "Lily's mom had a big cake.",
    '"Look!" said Tom.',
    "It was very cold that day.",
    "A new boy sat under the tree.",
    "Lily wanted to swim in the pond.",
    "They heard a loud noise.",
    "Max did not want to play.",
    "The sun was hot.",
    "Tom asked Lily for the ball.",
)


@dataclass(frozen=True)
class Sizes:
    """Those of a measurement on a CPU, if they are not told."""

    turns: int = 3
    num_requests: int = 16  # served together
    longest: int = 96  # new tokens of the longest of these
    gammas: tuple[int, ...] = (2, 4, 6)  # of each draft
    num_tokens: int = 128  # new tokens of a text that measures a γ
    openings: tuple[str, ...] = OPENINGS
    num_stories: int = 24  # that calibrate 4-bit weights; three times as many are measured
    methods: tuple[str, ...] = ("rtn", "gptq")  # how weights are quantized to 4 bits

    # Models of true shapes, with random weights (gpu_cases.py).
    target: str = "8B"
    draft: str = "1B"
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    context: int = 1024  # tokens before those that are made
    count: int = 129  # made: one by the prompt's last step, then 4 at a time
    prompt: int = 8192  # tokens of attention
    num_texts: int = 64  # whose attention is computed together
    megabytes: int = 4096  # to measure the bandwidth
    repeats: int = 50  # of a kernel
    bandwidth: float = 1.0  # bytes that the device reads a second, once it is measured
    pairs: tuple[tuple[str, str], ...] = (  # how a target and its draft store weights
        ("16 bits", "16 bits"),
        ("INT4", "INT4"),
        ("INT4", "16 bits"),
    )

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"


SIZES = Sizes()
GPU_SIZES = Sizes(num_requests=256, longest=512)
CPU_SIZES = Sizes(  # of true shapes
    device="cpu",
    context=32,
    count=33,
    megabytes=512,
    pairs=(("INT8", "INT8"), ("INT4", "INT4"), ("INT4", "16 bits")),
)
QUICK = Sizes(
    turns=1,
    num_requests=4,
    longest=12,
    gammas=(2,),
    num_tokens=12,
    openings=OPENINGS[:1],
    num_stories=2,
    methods=("rtn",),
    target="tiny",
    draft="tiny",
    device="cpu",
    dtype=torch.float32,
    context=24,
    count=9,
    prompt=48,
    num_texts=2,
    megabytes=4,
    repeats=1,
)
