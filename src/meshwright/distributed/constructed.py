"""Tensors that are no parameters, where a model's constructor alone knows their values.

A pretrained model of transformers makes its tables (rotary frequencies, masks, slopes, scales) in its constructor. Built on meta they have
no values, and no initialiser has them all. So such a model is built again, with its parameters on meta and everything else real, and
what it holds is copied. Plain tensors that are kept as attributes are given values in the same way, and so are small parameters that no
initialiser knows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from meshwright.core.errors import UnsupportedError
from meshwright.core.names import clean
from meshwright.introspection.huggingface import brings_initialiser, build_again


def write_constructed(model: nn.Module, device: torch.device, seed: int) -> tuple[set[str], dict[str, Tensor]]:
    """Give the buffers and plain tensors of every pretrained model inside ``model`` their values.

    Returns:
        The names of the buffers; and by name the values of small parameters that the constructor wrote.

    Raises:
        UnsupportedError: the constructor makes one from weights, or from more than a million unwritten elements.
    """
    written: set[str] = set()
    small: dict[str, Tensor] = {}
    for path, part in _outermost(model):
        kinds = [kind for kind in type(part).__mro__ if not issubclass(kind, FSDPModule)]
        twin = build_again(kinds[0], part.config, seed)  # type: ignore[arg-type]
        known = {clean(raw) for raw, _ in twin.named_modules()}
        for raw, module in part.named_modules():
            place = ".".join(word for word in (path, clean(raw)) if word)
            if clean(raw) not in known:
                raise UnsupportedError(
                    f"{place} was put into {kinds[0].__name__} behind its constructor, as adapters are, and has no values on meta: how it"
                    f" begins is not known. Build the model on the CPU with its weights, adapters included"
                )
            _fill(module, twin.get_submodule(clean(raw)), place, device)
            written |= {_join(place, name) for name, buffer in module._buffers.items() if buffer is not None}
        for name, parameter in twin.named_parameters():
            if not parameter.is_meta and not parameter.isnan().any():
                small[_join(path, name)] = parameter.detach()
    return written, small


def _fill(module: nn.Module, twin: nn.Module, place: str, device: torch.device) -> None:
    for name, buffer in module._buffers.items():
        if buffer is not None:
            buffer.copy_(_real(twin._buffers[name], _join(place, name)))
    for name, value in vars(module).items():
        if isinstance(value, Tensor) and value.is_meta:
            vars(module)[name] = _real(getattr(twin, name), _join(place, name)).to(device)


def _outermost(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The pretrained models inside ``model`` (or itself) that are in no other one, with their paths."""
    found: list[str] = []
    for raw, module in model.named_modules():
        path = clean(raw)
        if brings_initialiser(module) and not any(outer == "" or path.startswith(f"{outer}.") for outer in found):
            found.append(path)
            yield path, module


def _real(value: Tensor | None, name: str) -> Tensor:
    if value is None or value.is_meta:
        raise UnsupportedError(f"{name} has no value in a model whose weights are on meta: build the model on the CPU with its weights")
    return value.detach()


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
