"""Report what a verification found, for people and for machines."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from meshwright.comparison.findings import Comparison
from meshwright.planning.layout import Layout


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
