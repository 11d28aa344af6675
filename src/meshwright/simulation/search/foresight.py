"""Hold the answer to which layout to use: figures and plans of proposals, as text and as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from meshwright.planning.explain import columns

from .answer import HEADS, Proposal, Refused, row

SMALLER = 4
"""Proposals of the front that the text shows beside the fastest."""


@dataclass(frozen=True)
class Foresight:
    """Holds the forecasts of a model on a cluster: the answer of ``meshwright.foresee``.

    Printed, it is the table of ``meshwright plan --gpus``.

    Attributes:
        chosen: the fastest layout that fits, or the stated one; None where that does not fit.
        candidates: the fastest layouts that fit, or the stated one alone.
        front: layouts that need less memory than all faster ones, fastest first.
        refused: faster layouts that a rule refuses, with the reason.
        simulated: number of layouts that were compared.
        searched: whether the layout was open; else a stated one was judged.
    """

    chosen: Proposal | None
    candidates: tuple[Proposal, ...]
    front: tuple[Proposal, ...]
    refused: tuple[Refused, ...]
    simulated: int
    searched: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the figures under the documented keys of ``meshwright plan --json``."""
        return {
            "chosen": None if self.chosen is None else self.chosen.figures,
            "candidates": [one.figures for one in self.candidates],
            "front": [one.figures for one in self.front],
            "refused": [{**one.figures, "reason": one.reason} for one in self.refused],
            "simulated": self.simulated,
        }

    def to_json(self) -> str:
        """Return ``to_dict`` as text."""
        return json.dumps(self.to_dict(), indent=1)

    def __str__(self) -> str:
        first = self.candidates[0]
        values, job = first.figures, first.candidate.job
        head = (
            f"{job.architecture.name} on {job.machines.gpus} {job.machines.device.name}, {job.machines.per_node} per"
            f" node, {job.rows} rows of {job.seq_len} tokens per step"
        )
        parts = [
            f"{head}\n{columns([row(one.candidate) for one in self.candidates], HEADS)}",
            "memory of the first: "
            + ", ".join(f"{name} {size:.1f}" for name, size in values["mem_parts_gb"].items())
            + " GB",
            f"{values['tokens_per_day'] / 1e9:.2f} billion tokens a day,"
            f" {values['gpu_hours_per_billion_tokens']:,.0f} GPU hours for a billion."
            " MFU: 6 FLOPs per product parameter and 12 per attended feature, over the data sheet's half precision.",
        ]
        if self.searched:
            smaller = [row(one.candidate) for one in self.front if one.candidate.key != first.candidate.key][:SMALLER]
            if smaller:
                parts.append(f"less memory, more time\n{columns(smaller, HEADS)}")
            parts.append(f"{self.simulated} candidates were compared. To train with the first:\n\n{first.toml()}")
        return "\n\n".join(parts)
