"""Random layouts that the rules allow, of a few models and techniques."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.core.errors import MeshwrightError
from meshwright.introspection.facts import ModelFacts
from meshwright.planning.layout import Layout
from meshwright.planning.values import Batch

SAID_OF = {"schedule": "pp", "sequence": "tp", "method": "cp"}
"""Factors that are said of an axis, and nothing where it is not there."""


@dataclass(frozen=True)
class Drawn:
    """A layout to compare: a model's name, sizes of axes, techniques, and a data rank's step."""

    model: str
    layout: Layout
    techniques: dict[str, Any]
    microbatches: int
    seq: int
    rows: int = 2
    pairs: bool = False
    vocab_size: int = 0

    @property
    def batch(self) -> Batch:
        data = self.layout.dp_replicate * self.layout.dp_shard
        return Batch(self.rows * self.microbatches * data, self.seq, self.rows, self.vocab_size, self.pairs)

    @property
    def beside(self) -> dict[str, Any]:
        """Techniques but adapters, which a model's facts have already."""
        return {key: value for key, value in self.techniques.items() if key != "adapters"}

    def __str__(self) -> str:
        axes = ", ".join(f"{name} {size}" for name, size in vars(self.layout).items() if size > 1) or "one process"
        said = ", ".join(f"{key} {value}" for key, value in self.techniques.items())
        said = "; ".join(filter(None, ("pairs" * self.pairs, said)))
        return f"{self.model}; {axes}; {self.microbatches} x {self.rows} rows{'; ' + said if said else ''}"


def draw(
    number: int,
    seed: int,
    models: Mapping[str, Any],
    switches: Mapping[str, list[dict[str, Any]]],
    facts_of: Callable[[Drawn], ModelFacts],
    *,
    seq: int,
    worlds: tuple[int, ...],
    rows: tuple[int, ...] = (2,),
    pairs: tuple[bool, ...] = (False,),
    vocab_size: int = 0,
) -> list[Drawn]:
    """Draw different layouts.

    Args:
        facts_of: the facts of a layout's model, with its adapters.
        worlds: numbers of ranks, taken in turn.
    """
    from meshwright.planning.build import plan

    generator, drawn = random.Random(seed), []
    while len(drawn) < number:
        sizes = dict.fromkeys(("pp", "dp_replicate", "dp_shard", "cp", "tp"), 1)
        world = worlds[len(drawn) % len(worlds)]
        while world > 1:
            sizes[generator.choice(list(sizes))] *= 2
            world //= 2
        model = generator.choice(list(models))
        inner = sizes["dp_shard"] * sizes["cp"] * sizes["tp"]
        ep = generator.choice((1, 2)) if getattr(models[model], "moe", None) is not None and inner > 1 else 1
        techniques: dict[str, Any] = {}
        for factor, choices in switches.items():
            if factor not in SAID_OF or sizes[SAID_OF[factor]] > 1:
                techniques |= generator.choice(choices)
        microbatches = generator.choice((1, 2, 4) if sizes["pp"] == 1 else (4, 8))
        layout, of_a_piece, in_pairs = Layout(**sizes, ep=ep), generator.choice(rows), generator.choice(pairs)
        one = Drawn(model, layout, techniques, microbatches, seq, of_a_piece, in_pairs, vocab_size)
        try:
            plan(facts_of(one), one.layout, techniques=one.beside, batch=one.batch)
        except MeshwrightError:
            continue
        if str(one) not in map(str, drawn):
            drawn.append(one)
    return drawn
