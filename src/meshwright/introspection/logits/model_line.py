"""Find the line of a model's code that runs now."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path

import torch

_PACKAGE = str(Path(__file__).parents[2])
_MODELS = str(Path(__file__).parents[2] / "models")
_TORCH = (str(Path(torch.__file__).parent), "<")


def model_line(between: str = "") -> tuple[str, int]:
    """Return the file and the number of the innermost line that is neither torch's nor this package's own.

    Args:
        between: a file of this package. Then calls that are not the model's own, but those of another file of this
            package or of torch's, have no line: ("", 0).
    """
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        is_own = file.startswith(_PACKAGE) and not file.startswith(_MODELS)
        if not is_own and not file.startswith(_TORCH):
            return file, frame.f_lineno
        if between and file != between and frame.f_code.co_name != "__torch_function__":
            return "", 0
        frame = frame.f_back  # type: ignore[assignment]
    return "", 0


def shown(file: str, line: int) -> str:
    """Return the place of a line, with its code: "model.py:12, 'y[..., 3] = 0'"."""
    code = linecache.getline(file, line).strip()
    return f"{Path(file).name}:{line}" + (f", '{code}'" if code else "")
