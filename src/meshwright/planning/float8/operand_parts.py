"""Which operands of a linear layer's products a rank of the tensor axis has a part of only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OperandParts:
    """Attributes:
    x: the input.
    weight: the weight.
    gradient: of the output.
    """

    x: bool = False
    weight: bool = False
    gradient: bool = False


WHOLE = OperandParts()
COLUMN = OperandParts(weight=True, gradient=True)
"""Some output features of a whole input."""
ROW = OperandParts(x=True, weight=True)
"""Some input features; what it gives is summed, and all ranks have that sum's gradient."""
FEEDING = OperandParts(gradient=True)
"""A whole weight and input, of whose output a rank uses some, or finds a summand of the gradient."""
SUMMAND = OperandParts(x=True)
"""A whole weight whose input is a summand, and so is what it gives."""
