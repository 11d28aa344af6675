"""Write and read the values of parameters, also of those that rest in 4 bits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.core.record import recall
from meshwright.distributed.quantize.nf4 import Rounded, pack, unpack
from meshwright.distributed.torch_private import DTensorSpec, TensorMeta, local_part
from meshwright.planning.quantize.format import plain_shape


class Destinations:
    """The tensors of models as writers of values see them: weights that rest in 4 bits are plain ones.

    Only one of those exists in its plain form at a time, and only this rank's shard of it; more where several
    initialisers write them.
    """

    def __init__(self, *models: nn.Module):
        found = ((module, recall(module, Rounded)) for model in models for module in model.modules())
        self._begun: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._plain = {id(layer._parameters["weight"]): plain.dtype for layer, plain in found if plain is not None}

    def is_packed(self, tensor: Tensor) -> bool:
        return id(tensor) in self._plain

    def shape_of(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the shape of the whole tensor's values."""
        if not self.is_packed(tensor):
            return tuple(tensor.shape)
        return plain_shape(tensor.shape)

    def dtype_of(self, tensor: Tensor) -> torch.dtype:
        """Return the dtype of the tensor's values."""
        return self._plain.get(id(tensor), tensor.dtype)

    @contextmanager
    def opened(self, tensor: Tensor) -> Iterator[Tensor]:
        """Yield the tensor to write values into, placed as ``tensor`` is; packed on exit, unless the body raises."""
        yield self.begun(tensor)
        self.close([id(tensor)])

    def begun(self, tensor: Tensor) -> Tensor:
        """Return the same tensor at each call until ``close``, for several writers of which each writes some values."""
        if not self.is_packed(tensor):
            return tensor
        if id(tensor) not in self._begun:
            here = local_part(tensor)
            values = torch.empty(plain_shape(here.shape), dtype=self._plain[id(tensor)], device=here.device)
            self._begun[id(tensor)] = here, values, self._placed_as(tensor, values)
        return self._begun[id(tensor)][2]

    def close(self, keys: Iterable[int]) -> None:
        """Pack what was written into the tensors with these ids."""
        for key in keys:
            if key in self._begun:
                here, values, _ = self._begun.pop(key)
                with torch.no_grad():
                    here.copy_(pack(values))

    def values_of(self, tensor: Tensor) -> Tensor:
        """Return a tensor's values, placed as the tensor is; the tensor itself if it does not rest in 4 bits."""
        if not self.is_packed(tensor):
            return tensor
        return self._placed_as(tensor, unpack(local_part(tensor).detach(), self.dtype_of(tensor)))

    def values(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the values of several tensors, by name."""
        return {name: self.values_of(tensor) for name, tensor in tensors.items()}

    def _placed_as(self, tensor: Tensor, values: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return values
        shape = torch.Size(self.shape_of(tensor))
        meta = TensorMeta(shape, (shape[1], 1), values.dtype)
        spec = DTensorSpec(tensor.device_mesh, tensor.placements, tensor_meta=meta)
        return type(tensor)(values, spec, requires_grad=False)
