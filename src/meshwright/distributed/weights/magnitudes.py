"""Begin the magnitudes of DoRA (https://arxiv.org/abs/2402.09353): the lengths of a weight's rows.

peft computes them where it makes an adapter, from the weights that are there. Here adapters are made before the weights
are, so the lengths are computed behind: of whole rows, by peft's own function, one layer after the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.core.names import clean
from meshwright.introspection.adapted.names import host_of_magnitude

from .shards import pieces
from .wholes import whole_everywhere


def write_magnitudes(model: nn.Module, written: set[str]) -> set[str]:
    """Write the magnitudes of adapters that have no values yet, from the weights that they are beside.

    Adapters begin with a product of zero, so the lengths are those of the weights alone. Collective over each weight's
    mesh; one whole weight is in memory at a time.

    Args:
        written: names of the parameters that have their values.

    Returns:
        The names written.
    """
    held: dict[str, Tensor] = {clean(raw): parameter for raw, parameter in model.named_parameters()}
    found: set[str] = set()
    for raw, magnitude in model.named_parameters():
        host = host_of_magnitude(name := clean(raw))
        if host is None or name in written:
            continue
        weight = held[host]
        whole = whole_everywhere(weight) if isinstance(weight, DTensor) else weight.detach()
        layer: Any = model.get_submodule(raw.rpartition(".")[0])
        added = torch.zeros_like(whole.T if layer.fan_in_fan_out else whole, memory_format=torch.contiguous_format)
        length = layer.get_weight_norm(whole, added, 1)
        for piece in pieces(magnitude):
            piece.local.copy_(length[piece.slices])
        found.add(name)
    return found
