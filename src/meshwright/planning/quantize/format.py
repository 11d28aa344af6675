"""Define how a weight is stored in 4 bits."""

from __future__ import annotations

BLOCK = 64
"""Weights of a row, side by side, that share a scale."""
BLOCK_BYTES = BLOCK // 2 + 4
"""Bytes of a block: two weights a byte, and a float32 scale. So a weight takes 4.5 bits."""
STORED = "uint8"
"""dtype of the stored bytes."""
NF4 = "nf4"
"""Word for a weight in 4 bits, where others have a dtype."""


def stored_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape of the bytes that store a weight of shape (out, in): (out, in / BLOCK · BLOCK_BYTES)."""
    rows, columns = shape
    return rows, columns // BLOCK * BLOCK_BYTES


def plain_shape(stored: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape of the weight that is stored in bytes of shape ``stored``."""
    rows, columns = stored
    return rows, columns // BLOCK_BYTES * BLOCK
