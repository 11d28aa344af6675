"""Read a window of steps, written "10:13" for the steps 10, 11 and 12.

Torch-free.
"""

from __future__ import annotations

import re

from meshwright.core.errors import ConfigError


def read_window(key: str, text: str, steps: int) -> range:
    """Return the steps that ``text`` names, counted from 1. Empty for an empty text.

    Args:
        key: config key of the text, for the error.
        steps: number of steps of the whole run.

    Raises:
        ConfigError: the text is not "a:b", names no step, or names steps that the run does not take.
    """
    if not text:
        return range(0)
    found = re.fullmatch(r"([0-9]{1,18}):([0-9]{1,18})", text)
    if found is None:
        raise ConfigError(f"{key} = {text!r} names no steps: write first:end, like 10:13 for the steps 10, 11 and 12")
    first, end = int(found.group(1)), int(found.group(2))
    if first < 1:
        raise ConfigError(f"{key} = {text!r}: steps are counted from 1; write 1:{max(end, 2)}")
    if end <= first:
        swapped = f"{end}:{first}" if 0 < end < first else f"{first}:{first + 1}"
        raise ConfigError(
            f"{key} = {text!r} names no step: the second number is the first step that is left out; perhaps {swapped}"
        )
    if end - 1 > steps:
        raise ConfigError(
            f"{key} = {text!r} reaches to step {end - 1}, and the run has steps = {steps}: end with {steps + 1} or"
            f" lower"
        )
    return range(first, end)
