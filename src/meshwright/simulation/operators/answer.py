"""Say what a step's forecast from its operators is, in figures and in words."""

from __future__ import annotations

from typing import Any

from .forecast import RankSeconds, StepForecast


def figures(forecast: StepForecast) -> dict[str, Any]:
    """Return the figures for programs: seconds of the step, and of each rank by what they are spent on."""
    return {
        "step_s": forecast.seconds,
        "slowest_rank": forecast.slowest,
        "ranks": {str(rank): _parts(spent) for rank, spent in forecast.ranks.items()},
    }


def _parts(spent: RankSeconds) -> dict[str, float]:
    found = {str(part): seconds for part, seconds in spent.parts.items()}
    found["sharing cores"] = spent.sharing
    for (kind, ranks), seconds in spent.waiting.items():
        name = f"waiting in {kind} of {len(ranks)}"
        found[name] = found.get(name, 0.0) + seconds
    return found


def text(forecast: StepForecast) -> str:
    """Return a paragraph: the step, and the rank that waits least."""
    spent = forecast.ranks[forecast.slowest]
    parts = sorted(_parts(spent).items(), key=lambda part: -abs(part[1]))
    shares = ", ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in parts if abs(seconds) >= 5e-5)
    return (
        f"From the operators and messages of its ranks: {forecast.seconds * 1e3:.1f} ms a step. Rank"
        f" {forecast.slowest}, which waits least, in ms: {shares}."
    )
