"""Write the demo's text: short sentences about animals, in which a reader sees at once whether a model has learnt."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from .records import BadRow, Record

MODULE = Path(__file__)
"""The file that stands for the text: its digest changes where the sentences do."""

DOCUMENTS = 12_000
SENTENCES = 3
"""In a document."""
ANIMALS = {
    "cow": ("grass", "moo"),
    "dog": ("meat", "woof"),
    "cat": ("fish", "meow"),
    "sheep": ("hay", "baa"),
    "duck": ("bread", "quack"),
    "pig": ("corn", "oink"),
    "horse": ("oats", "neigh"),
    "hen": ("seeds", "cluck"),
    "owl": ("mice", "hoot"),
    "bee": ("honey", "buzz"),
}
"""Animal -> (its food, its sound)."""
ADJECTIVES = ("old", "young", "big", "small", "happy", "sleepy")


class Farmyard:
    """A record format whose one file is this module; its records are the same on every machine."""

    def count(self, path: Path) -> int:
        return DOCUMENTS

    def records(self, path: Path) -> Iterator[tuple[int, Record | BadRow]]:
        draw = random.Random(0)
        for number in range(1, DOCUMENTS + 1):
            yield number, {"text": "\n".join(draw_sentence(draw) for _ in range(SENTENCES))}


def draw_sentence(draw: random.Random) -> str:
    """Return a sentence that is true of its animal: food and sound follow from the animal alone."""
    adjective, animal = draw.choice(ADJECTIVES), draw.choice(list(ANIMALS))
    food, sound = ANIMALS[animal]
    return draw.choice(
        (
            f"The {adjective} {animal} eats {food} and says {sound}.",
            f"My {adjective} {animal} says {sound}.",
            f"Every {animal} eats {food}.",
        )
    )
