"""How much is measured; and the prompts."""

from dataclasses import dataclass

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
class Effort:
    """The sizes of the measurements on a CPU."""

    turns: int = 3
    num_texts: int = 16  # requests of the combined table
    longest: int = 96  # new tokens of the longest of these
    gammas: tuple[int, ...] = (2, 4, 6)  # of each draft
    num_tokens: int = 128  # new tokens of a text that measures a γ
    openings: tuple[str, ...] = OPENINGS
    num_mixed: int = 96  # texts that measure the waste of memory
    num_stories: int = 24  # that calibrate 4-bit weights; three times as many are measured
    methods: tuple[str, ...] = ("rtn", "gptq")  # how weights are quantized to 4 bits


QUICK = Effort(
    turns=1,
    num_texts=3,
    longest=6,
    gammas=(2,),
    num_tokens=12,
    openings=OPENINGS[:1],
    num_mixed=6,
    num_stories=2,
    methods=("rtn",),
)
