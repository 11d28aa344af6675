"""Handle dtypes by name, so that configuration needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import ConfigError, nearest

if TYPE_CHECKING:
    import torch

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
    """Return a dtype's canonical name: "bf16" -> "bfloat16".

    Args:
        name: float32/fp32, float16/fp16/half, bfloat16/bf16 or float64/double/fp64.
        where: name of the value in the error, such as a config key.

    Raises:
        ConfigError: any other name.
    """
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
