"""Pin parts of a layout: conditions on a candidate's sizes and switches that a search keeps."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from meshwright.core.errors import ConfigError, nearest

SIZES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "microbatch", "stages_per_rank", "loss_chunks")
WORDS: Mapping[str, tuple[str, ...]] = {
    "recompute": ("none", "selective", "full"),
    "reshard": ("true", "false"),
    "sync_grad_accum": ("true", "false"),
    "schedule": ("1f1b", "interleaved_1f1b", "zbv_zero_bubble"),
}
COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "=": operator.eq,
}
_WRITTEN = re.compile(r"\s*(\w+)\s*(<=|>=|=)\s*(\w+)\s*")


@dataclass(frozen=True)
class Pin:
    """A condition on one size or switch of a candidate, such as ``tp <= 8`` or ``recompute = none``."""

    key: str
    comparison: str
    value: str

    @classmethod
    def parse(cls, text: str) -> Pin:
        """Read ``tp<=8``, ``recompute=none``.

        Raises:
            ConfigError: an unknown key, or a value that the key cannot have.
        """
        found = _WRITTEN.fullmatch(text)
        if found is None:
            raise ConfigError(f"pin {text!r}: a pin is a key, one of <= >= =, and a value, such as tp<=8 or pp=1")
        key, comparison, value = found.groups()
        keys = (*SIZES, *WORDS)
        if key not in keys:
            raise ConfigError(f"pin {text!r}: unknown key '{key}'.{nearest(key, keys)} Legal are {', '.join(keys)}.")
        if key in WORDS and (comparison != "=" or value not in WORDS[key]):
            raise ConfigError(f"pin {text!r}: legal are {', '.join(f'{key}={word}' for word in WORDS[key])}")
        if key in SIZES and not (value.isdigit() and int(value)):
            raise ConfigError(f"pin {text!r}: {key} is a whole number from 1 on")
        return cls(key, comparison, value)

    def holds(self, values: Mapping[str, int | str]) -> bool:
        """Return whether a candidate's values keep the condition; keys that are not there are not judged."""
        if self.key not in values:
            return True
        value = values[self.key]
        if self.key in WORDS:
            return str(value) == self.value
        return COMPARISONS[self.comparison](int(value), int(self.value))

    def __str__(self) -> str:
        return f"{self.key}{self.comparison}{self.value}"


def hold(pins: tuple[Pin, ...], **values: int | str) -> bool:
    """Return whether all pins hold."""
    return all(pin.holds(values) for pin in pins)
