"""Find the line of a model's code that runs now."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path

import torch

_PACKAGE = Path(__file__).parents[2]
_BETWEEN = (str(Path(torch.__file__).parent), str(_PACKAGE), "<")
"""Where the frames between a model's line and an operator are."""
_MODELS = str(_PACKAGE / "models")


def model_line() -> tuple[str, int]:
    """Return the file and the number of the innermost line that is neither torch's nor this package's own."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_BETWEEN) or file.startswith(_MODELS):
            return file, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return "", 0


def shown(file: str, line: int) -> str:
    """Return the place of a line, with its code: "model.py:12, 'y[..., 3] = 0'"."""
    code = linecache.getline(file, line).strip()
    return f"{Path(file).name}:{line}" + (f", '{code}'" if code else "")
