"""Report what a verification found, for people and for machines, and how far its batches reached."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from meshwright.comparison.equality import Comparison
from meshwright.introspection.source import as_module
from meshwright.planning.layout import Layout

from .problem import Problem, count, share

# --- describe how far the batches of a verification reach into a model's structure

TOKENS = 16
"""Tokens of a row, where nothing asks for more."""
LARGEST = 256
"""The most tokens of a row that a window may ask for."""
REACHES = (
    "sliding_window",
    "attention_chunk_size",
    "window_size",
    "attention_window",
    "local_window_size",
    "chunk_size",
)
"""Config keys that hold the number of tokens beyond which a layer computes differently."""


def tokens_wanted(model: nn.Module) -> int:
    """Return a number of tokens per row that reaches beyond the model's windows and chunks, except too large ones."""
    return max([TOKENS, *(size + TOKENS // 2 for size in _reaches(model).values() if size + TOKENS // 2 <= LARGEST)])


def of(problem: Problem) -> str:
    """Describe what was tried, and what was not reached."""
    batch = problem.batch(0)
    rows, tokens = batch["tokens"].shape
    beside = sorted(set(batch) - {"tokens", "labels"})
    covered = f"covered: {problem.steps} steps of {rows} rows of {tokens} tokens" + (
        f", with {', '.join(beside)}" if beside else ""
    )
    beyond = [f"{key} = {size}" for key, size in _reaches(as_module(problem.source())).items() if size >= tokens]
    return covered + (f"; not reached: {', '.join(beyond)} (give a batch_factory with longer rows)" if beyond else "")


def of_means(problem: Problem) -> str:
    """Describe the loss that is compared, where it is not the mean over all tokens; "" otherwise."""
    batch = problem.batch(0)
    counts = [count(share(batch, rank, max(problem.means, 1))) for rank in range(problem.means)]
    if len(set(counts)) < 2:
        return ""
    uneven = (
        f"ranks had {min(counts)} to {max(counts)} tokens, so that is not the mean over all tokens, which"
        f" meshwright's own step takes"
    )
    return f"compared with the mean of the {len(counts)} ranks' mean losses, as wrappers average gradients; {uneven}"


def _reaches(model: nn.Module) -> dict[str, int]:
    config: Any = getattr(model, "config", None)
    if callable(of_text := getattr(config, "get_text_config", None)):
        config = of_text()
    found = {key: getattr(config, key, None) for key in REACHES}
    return {
        key: size for key, size in found.items() if isinstance(size, int) and not isinstance(size, bool) and size > 0
    }


# --- report what a verification found, for people and for machines


@dataclass(frozen=True)
class Report:
    """The verdict on a layout."""

    layout: Layout
    comparisons: tuple[Comparison, ...]
    seconds: float
    coverage: str = ""
    """A description of what was tried, and of the parts of the model's structure that this does not reach."""

    @property
    def is_equal(self) -> bool:
        return all(comparison.is_equal for comparison in self.comparisons)

    def __bool__(self) -> bool:
        return self.is_equal

    def __str__(self) -> str:
        lines = [f"{self.layout}: {'equal within rounding' if self.is_equal else 'DIFFERS'} ({self.seconds:.1f} s)"]
        for comparison in self.comparisons:
            lines += comparison.lines()
        lines += [f"  {self.coverage}"] if self.coverage else []
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return the whole report as JSON."""
        rows = [comparison.plain() for comparison in self.comparisons]
        return json.dumps(
            {
                "layout": asdict(self.layout),
                "equal": self.is_equal,
                "seconds": self.seconds,
                "comparisons": rows,
                "coverage": self.coverage,
            },
            indent=1,
        )
