"""Name the operands of a linear layer of which a tensor-parallel rank has only a part."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OperandParts:
    """The operands of a linear layer's products of which a rank has only a part.

    Attributes:
        x: the rank has a part of the input.
        weight: the rank has a part of the weight.
        gradient: the rank has a part of the output's gradient.
    """

    x: bool = False
    weight: bool = False
    gradient: bool = False


WHOLE = OperandParts()
COLUMN = OperandParts(weight=True, gradient=True)
"""Some output features of a whole input."""
ROW = OperandParts(x=True, weight=True)
"""Some input features; the outputs are summed, and all ranks have that sum's gradient."""
FEEDING = OperandParts(gradient=True)
"""A whole weight and input; a rank uses some of the output, or computes a partial gradient of it."""
SUMMAND = OperandParts(x=True)
"""A whole weight; its input is a partial sum, and so is its output."""
