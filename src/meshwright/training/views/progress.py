"""Print a run's progress: live on a terminal, as plain lines elsewhere, on the first rank alone."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self, TextIO

from meshwright.core.dtypes import bytes_text, count_text, duration_text

INTERVAL = 2.0
"""Least seconds between two lines of a log, or two rows of the live table."""
UNBALANCED = 2.0
"""Multiple of its layer's mean from which the busiest expert is reported."""


@dataclass(frozen=True)
class StepReport:
    """The figures of one optimizer step, of the whole run and not of one rank unless noted."""

    step: int
    """Finished optimizer steps, this one included: the first report has 1."""
    total_steps: int
    loss: float
    """Mean training loss over the real tokens of the step."""
    grad_norm: float | None
    """Norm of the whole gradient before clipping; None where it is not measured."""
    learning_rate: float
    tokens_per_second: float
    memory_bytes: int
    """Bytes held by this rank; ``memory_label`` names the quantity."""
    memory_label: str
    mfu: float | None = None
    """Model FLOPs utilisation as a fraction; None where the device's peak is unknown."""
    validation_loss: float | None = None
    """Set on the steps that were followed by a validation."""
    skipped: int = 0
    """Steps so far that were skipped for gradients that were not finite."""
    pairs: tuple[float, float] | None = None
    """On pairs of answers: mean margin of the rewards, and share of pairs whose chosen answer has the larger one."""
    busiest_expert: float | None = None
    """Tokens of the expert that received most in its layer, as a multiple of the layer's mean; None if not counted."""
    eta_seconds: float | None = None
    """Estimated seconds to the end; None while unknown."""

    def figures(self) -> list[tuple[str, str]]:
        """Return (label, value) pairs in reading order, without those that are unknown."""
        pairs = [("loss", f"{self.loss:.4f}")]
        if self.validation_loss is not None:
            pairs.append(("val loss", f"{self.validation_loss:.4f}"))
        if self.pairs is not None:
            accuracy = f"{100 * self.pairs[1]:.0f} %" if any(self.pairs) else "even"  # as before the first step
            pairs += [("margin", f"{self.pairs[0]:.4f}"), ("accuracy", accuracy)]
        pairs.append(("lr", f"{self.learning_rate:.2e}"))
        if self.grad_norm is not None:
            pairs.append(("grad norm", f"{self.grad_norm:#.3g}".rstrip(".")))
        pairs.append(("tokens/s", count_text(self.tokens_per_second)))
        if self.mfu is not None:
            pairs.append(("MFU", f"{100 * self.mfu:.1f} %"))
        pairs.append((self.memory_label, bytes_text(self.memory_bytes)))
        if self.busiest_expert is not None and self.busiest_expert >= UNBALANCED:
            pairs.append(("busiest expert", f"{self.busiest_expert:.1f}× the mean"))
        if self.skipped:
            pairs.append(("skipped", str(self.skipped)))
        return pairs

    def line(self) -> str:
        """Return everything in one line: ``"step  120/2000 · loss 2.3456 · lr 3.00e-04 · ... · ETA 3 min 2 s"``."""
        total = str(self.total_steps)
        parts = [f"step {self.step:>{len(total)}}/{total}", *(f"{label} {value}" for label, value in self.figures())]
        return " · ".join([*parts, self.eta_text()] if self.eta_text() else parts)

    def eta_text(self) -> str:
        """Return ``"ETA 3 min 2 s"``; empty while unknown and on the last step."""
        if self.eta_seconds is None or self.step >= self.total_steps:
            return ""
        return f"ETA {duration_text(math.ceil(self.eta_seconds))}"


class Progress:
    """The output of a loop, silent: for ranks that show nothing, so that callers need no ``if rank == 0``.

    ``with`` closes it, also on an exception, which gives the terminal back as it was.
    """

    def start(self, header_lines: Sequence[str]) -> None:
        """Show the header: a title, then lines of the form ``"label: text"``."""

    def update(self, report: StepReport) -> None:
        """Take the figures of a step. Cheap: call it on every step; the implementation decides when to show them."""

    def say(self, text: str) -> None:
        """Print a message that stays, such as "checkpoint saved"."""

    def portion(self, what: str, done: int, total: int) -> None:
        """Show the progress of a long preparation. Cheap: call it often."""

    def close(self) -> None:
        """Show the last figures and stop; closing twice is harmless."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class PlainProgress(Progress):
    """Plain lines for files and batch systems: one per INTERVAL, besides the first step, the last and validations."""

    def __init__(self, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic):
        self._stream, self._clock = stream, clock
        self._shown_at: float | None = None
        self._portion_at = clock()
        self._unshown: StepReport | None = None

    def start(self, header_lines: Sequence[str]) -> None:
        title, rows = header_rows(header_lines)
        if title:
            self.say(title)
        width = max((len(label) for label, _ in rows), default=0)
        for label, text in rows:
            self.say(f"  {label:<{width}}  {text}" if width else f"  {text}")

    def update(self, report: StepReport) -> None:
        now = self._clock()
        due = self._shown_at is None or now - self._shown_at >= INTERVAL
        if due or report.validation_loss is not None or report.step >= report.total_steps:
            self.say(report.line())
            self._shown_at, self._unshown = now, None
        else:
            self._unshown = report

    def say(self, text: str) -> None:
        stream = self._stream or sys.stdout
        encoding = getattr(stream, "encoding", None) or "utf-8"
        # In a narrow encoding the log loses a dot or an arrow, but the run continues.
        print(text.encode(encoding, "replace").decode(encoding), file=stream, flush=True)

    def portion(self, what: str, done: int, total: int) -> None:
        now = self._clock()
        if now - self._portion_at >= INTERVAL:
            self.say(f"{what}: {done / max(total, 1):.0%}")
            self._portion_at = now

    def close(self) -> None:
        """Print the last report if it was not shown yet: after a stop or a failure it tells the step."""
        if self._unshown is not None:
            self.say(self._unshown.line())
            self._unshown = None


def header_rows(header_lines: Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    """Return the title, and (label, text) of the other lines; a line without ``": "`` has an empty label."""
    if not header_lines:
        return "", []
    rows = [line.split(": ", 1) if ": " in line else ["", line] for line in header_lines[1:]]
    return header_lines[0], [(label, text) for label, text in rows]
