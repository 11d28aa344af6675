"""Read the states that a case's ``--save`` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Piece = tuple[str, int]
"""The name of a tensor, and which piece of it a rank has; 0 for a whole tensor."""


def read_states(folder: Path) -> list[dict[Piece, Tensor]]:
    """Read every file in a folder, one dict a file: tensors, and ``(piece, dim, index, count)`` of cut ones."""
    found = []
    for file in sorted(file for file in folder.rglob("*.pt") if file.is_file()):
        value: Any = torch.load(file, map_location="cpu", weights_only=False)
        pieces = {
            name: (item, 0) if isinstance(item, Tensor) else (item[0], item[2])
            for name, item in value.items()
            if isinstance(item, Tensor) or (isinstance(item, tuple) and len(item) == 4)
        }
        found.append({(name, index): tensor.detach() for name, (tensor, index) in pieces.items()})
    return found
