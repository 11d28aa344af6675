"""Write what runs came to as rows of text, for a terminal and a page, and as values for programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from meshwright.core.units import count_text, duration_text
from meshwright.training.views.page.drawing import quantities
from meshwright.training.views.page.history import ABSENT

from .runs import ComparedRun, common_place, differences, loss_at


def rows(runs: Sequence[ComparedRun], by: str) -> list[tuple[str, list[str]]]:
    """Return (figure, its text for each run), with units; rows that no run has are left out."""
    found: list[tuple[str, list[str]]] = [("state", [run.state.word for run in runs])]
    found.append(("steps", [f"{run.state.step:,} of {run.state.steps:,}" for run in runs]))
    found.append(("final loss", [_of(run, "loss", run.history.last("loss")) for run in runs]))
    found += _best("best loss", "loss", runs, [run.best for run in runs])
    place = common_place(runs, by)
    if place is not None:
        found.append((f"loss at {_place(place, by)}", [_of(run, "loss", loss_at(run, place, by)) for run in runs]))
    last = [_of(run, "validation_loss", run.history.last("validation_loss")) for run in runs]
    found.append(("validation loss", last))
    found += _best("best validation loss", "validation_loss", runs, [run.best_validation for run in runs])
    found.append(("trained on", [_of(run, "tokens", run.history.last("tokens")) for run in runs]))
    found.append(("time of training", [_seconds(run) for run in runs]))
    found.append(("median speed", [_of(run, "tokens_per_second", run.speed) for run in runs]))
    found.append(("most memory of rank 0", [_of(run, "memory_bytes", run.memory) for run in runs]))
    found.append(("MFU", [_of(run, "mfu", run.history.last("mfu")) for run in runs]))
    found.append(("skipped steps", [_skipped(run) for run in runs]))
    found.append(("layout", [run.layout for run in runs]))
    return [(name, texts) for name, texts in found if set(texts) != {ABSENT}]


def _of(run: ComparedRun, name: str, value: float | None) -> str:
    return quantities(run.history)[name].words(value)


def _best(
    title: str, name: str, runs: Sequence[ComparedRun], found: Sequence[tuple[int, float] | None]
) -> list[tuple[str, list[str]]]:
    """Return two rows: the lowest loss of each run, and its step."""
    values = [_of(run, name, best and best[1]) for run, best in zip(runs, found, strict=True)]
    return [(title, values), (f"step of {title}", [ABSENT if best is None else f"{best[0]:,}" for best in found])]


def _seconds(run: ComparedRun) -> str:
    return ABSENT if run.history.clock.last is None else duration_text(run.history.clock.last)


def narrowed(found: Sequence[tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
    """Return rows for a terminal: a unit that all values share stands in the head, once."""
    narrow = []
    for name, texts in found:
        units = {text.partition(" ")[2] for text in texts if text != ABSENT}
        unit = units.pop() if len(units) == 1 else ""
        if unit and not any(character.isdigit() for character in unit):
            name, texts = f"{name}, {unit}", [text.partition(" ")[0] for text in texts]
        narrow.append((name, texts))
    return narrow


def _skipped(run: ComparedRun) -> str:
    skipped = run.history.last("skipped")
    return f"{skipped:,.0f}" if skipped else ABSENT


def _place(place: float, by: str) -> str:
    if by == "tokens":
        return f"{count_text(place)} tokens"
    return duration_text(place) if by == "seconds" else f"step {place:,.0f}"


def to_dict(runs: Sequence[ComparedRun], by: str) -> dict[str, Any]:
    """Return the comparison as JSON values: figures in plain units (nats, tokens, seconds, bytes), null if unknown."""
    place = common_place(runs, by)
    return {
        "by": by,
        "common": place,
        "runs": [_values(run, None if place is None else loss_at(run, place, by)) for run in runs],
        "differences": {
            key: {run.label: value for run, value in zip(runs, values, strict=True)}
            for key, values in differences(runs)
        },
    }


def _values(run: ComparedRun, at_common: float | None) -> dict[str, Any]:
    last = run.history.last
    best, validation = run.best, run.best_validation
    figures = {
        "loss": last("loss"),
        "best_loss": best and best[1],
        "best_loss_step": best and best[0],
        "loss_at_common": at_common,
        "validation_loss": last("validation_loss"),
        "best_validation_loss": validation and validation[1],
        "best_validation_loss_step": validation and validation[0],
        "tokens": _whole(last("tokens")),
        "seconds": None if run.history.clock.last is None else round(run.history.clock.last, 3),
        "tokens_per_second": run.speed,
        "memory_bytes": _whole(run.memory),
        "mfu": last("mfu"),
        "skipped": _whole(last("skipped")),
    }
    facts = {"run": str(run.folder), "label": run.label, "state": run.state.word}
    facts |= {"step": run.state.step, "steps": run.state.steps, "layout": run.layout}
    return facts | {name: value if _is_number(value) else None for name, value in figures.items()}


def _whole(value: float | None) -> float | None:
    return int(value) if _is_number(value) and value is not None else value


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
