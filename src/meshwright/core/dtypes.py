"""Handle dtypes by name, so that configuration needs no torch; format numbers for people."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .errors import ConfigError, nearest

if TYPE_CHECKING:
    import torch


# --- handle dtypes by name, so that configuration needs no torch

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
FLOATING = frozenset(_BYTES)
_ALIASES = {
    "fp32": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "double": "float64",
    "fp64": "float64",
}


def canonical_dtype(name: str, *, where: str = "dtype") -> str:
    """Return a dtype's canonical name, "bf16" -> "bfloat16", or raise ConfigError about the value ``where``."""
    canonical = _ALIASES.get(name, name)
    if canonical not in _BYTES:
        legal = ", ".join("/".join([full, *(alias for alias, of in _ALIASES.items() if of == full)]) for full in _BYTES)
        raise ConfigError(
            f"{where} = {name!r} is not a dtype that meshwright knows.{nearest(name, [*_BYTES, *_ALIASES])} Legal:"
            f" {legal}."
        )
    return canonical


def dtype_bytes(name: str) -> int:
    """Return the bytes per element; ConfigError for an unknown name."""
    return _BYTES[canonical_dtype(name)]


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of that name (imports torch); ConfigError for an unknown name."""
    import torch

    return getattr(torch, canonical_dtype(name))


# --- format numbers for people


def bytes_text(n: float) -> str:
    """Format bytes in binary units: ``bytes_text(1536)`` -> "1.5 KiB"."""
    return _scaled(n, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"), " ")


def count_text(n: float) -> str:
    """Format a count by powers of 1000: ``count_text(1_240_000_000)`` -> "1.24B", 135_000_000 -> "135M"."""
    return _scaled(n, 1000, ("", "K", "M", "B", "T"), "")


def epochs_text(epochs: float) -> str:
    """Format passes over the data, with so many digits that no fraction reads as a whole number: "1 epoch", "0.8
    epochs", "0.9996 epochs".
    """
    before = 1 + math.floor(math.log10(epochs)) if epochs > 0 else 0
    texts = [f"{epochs:.{max(0, digits - before)}f}" for digits in (3, 4, 5, 6)]
    texts = [text.rstrip("0").rstrip(".") if "." in text else text for text in texts]
    number = next((text for text in texts if "." in text), f"{epochs:,.0f}")
    return f"{number} epoch{'s' * (number != '1')}"


def duration_text(seconds: float) -> str:
    """Format a duration: "3.2 ms", "12.5 s", "2 min 5 s", "3 h 7 min", "2 d 4 h"."""
    if seconds < 0:
        return "-" + duration_text(-seconds)
    if not math.isfinite(seconds):
        return f"{seconds} s"
    if seconds and seconds < 0.9995:
        return _scaled(seconds * 1e6, 1000, ("us", "ms"), " ")
    if seconds < 59.95:
        return f"{_three_digits(seconds)} s"
    whole = round(seconds)
    if whole >= 86_400:
        return _two_units(whole, (86_400, "d"), (3600, "h"))
    if whole >= 3600:
        return _two_units(whole, (3600, "h"), (60, "min"))
    return _two_units(whole, (60, "min"), (1, "s"))


def _two_units(whole: int, larger: tuple[int, str], smaller: tuple[int, str]) -> str:
    rest = whole % larger[0] // smaller[0]
    return f"{whole // larger[0]} {larger[1]}" + (f" {rest} {smaller[1]}" if rest else "")


def _scaled(n: float, base: int, units: tuple[str, ...], space: str) -> str:
    if not math.isfinite(n):
        return str(n)
    size, step = abs(n), 0
    # Compare the printed digits: 999,999 is 1M, not 1000K.
    while step < len(units) - 1 and float(_three_digits(size)) >= base:
        size, step = size / base, step + 1
    sign = "-" if n < 0 else ""
    return f"{sign}{_three_digits(size)}{space if units[step] else ''}{units[step]}"


def _three_digits(size: float) -> str:
    """Format three significant digits, without an exponent and without trailing zeros."""
    return f"{size:.0f}" if size >= 999.5 else f"{size:.3g}"
