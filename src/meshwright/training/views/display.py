"""Choose how a run shows its progress."""

from __future__ import annotations

import sys
from typing import TextIO

from .progress import PlainProgress, Progress, SilentProgress


def build_progress(*, is_main: bool, stream: TextIO | None = None) -> Progress:
    """Return the progress for the output: silent on ranks that are not ``is_main``, live on a terminal, plain lines
    elsewhere.

    A terminal that cannot place a cursor (``TERM=dumb``) or show the bars (not UTF-8) gets plain lines too.

    Args:
        is_main: whether this rank prints for the run.
        stream: where to write; standard output by default.
    """
    if not is_main:
        return SilentProgress()
    if not (stream or sys.stdout).isatty():
        return PlainProgress(stream)
    from rich.console import Console  # imported for terminals only: batch jobs save 0.03 s

    from .live import LiveProgress

    console = Console(file=stream)
    if console.is_dumb_terminal or not console.encoding.lower().startswith("utf"):
        return PlainProgress(stream)
    return LiveProgress(console)
