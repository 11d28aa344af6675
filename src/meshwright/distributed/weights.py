"""Weights come into being: each rank makes its own share, and every layout starts bitwise equal.

The law: a parameter's values are a function of (seed, global name, position). It is cut into blocks of whole rows, at most
``BLOCK_ELEMENTS`` each (one row at least), and each block is drawn from a generator seeded by (seed, name, block number), in
fp32, on the parameter's device. A rank draws the blocks that overlap its shard, so its peak is its own share plus one block.
Models without ``weight_law`` keep their own initialisers: one module at a time on the CPU, torch's generator seeded by
(seed, name of the module), then cut.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from meshwright.core.errors import UnsupportedError
from meshwright.core.names import clean

BLOCK_ELEMENTS = 2**20


def seed_of(*parts: object) -> int:
    """A 63-bit seed from any values (blake2b; equal on every machine)."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def materialise(model: nn.Module, device: torch.device, seed: int, ties: dict[str, str]) -> set[str]:
    """Give a model on meta its weights, shards only where it is sharded already; returns the names written.

    Args:
        ties: other name -> first name, of the parameters that are one.

    Raises:
        UnsupportedError: a module has parameters or buffers and no way to initialise them.
    """
    model.to_empty(device=device)
    _tie(model, ties)
    with torch.no_grad():
        return _by_law(model, seed) if hasattr(model, "weight_law") else _by_modules(model, seed)


def _tie(model: nn.Module, ties: dict[str, str]) -> None:
    """``to_empty`` gives every name a tensor of its own; make the tied ones one again."""
    for alias, first in ties.items():
        path, _, name = alias.rpartition(".")
        setattr(model.get_submodule(path), name, model.get_parameter(first))


def local_part(parameter: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's part of a parameter, and the global index of its first element."""
    if not isinstance(parameter, DTensor):
        return parameter, (0,) * parameter.dim()
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    local = parameter.to_local()
    if local.numel() == 0:
        return local, (0,) * parameter.dim()
    assert tuple(local.shape) == tuple(shape)
    return local, tuple(offset)


def _by_law(model: nn.Module, seed: int) -> set[str]:
    written = set()
    for raw, parameter in model.named_parameters():
        name = clean(raw)
        kind, value = model.weight_law(name)  # type: ignore[operator]
        local, offset = local_part(parameter)
        if kind == "constant":
            local.fill_(value)
        else:
            fill_normal(local, offset, tuple(parameter.shape), value, seed, name)
        written.add(name)
    return written


def fill_normal(local: Tensor, offset: tuple[int, ...], shape: tuple[int, ...], std: float, seed: int, name: str) -> None:
    """Write the normal values of the law into ``local``, the part at ``offset`` of a parameter of global ``shape``."""
    if local.numel() == 0:
        return
    row = max(1, int(torch.Size(shape[1:]).numel()))
    rows_per_block = max(1, BLOCK_ELEMENTS // row)
    generator = torch.Generator(local.device)
    first, last = offset[0], offset[0] + local.shape[0]
    rest = tuple(slice(o, o + n) for o, n in zip(offset[1:], local.shape[1:], strict=True))
    for number in range(first // rows_per_block, -(-last // rows_per_block)):
        start = number * rows_per_block
        rows = min(rows_per_block, shape[0] - start)
        generator.manual_seed(seed_of(seed, name, number))
        block = torch.empty((rows, *shape[1:]), dtype=torch.float32, device=local.device).normal_(0.0, std, generator=generator)
        low, high = max(first, start), min(last, start + rows)
        local[low - first : high - first].copy_(block[(slice(low - start, high - start), *rest)])


def _by_modules(model: nn.Module, seed: int) -> set[str]:
    written: set[str] = set()
    for raw, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        buffers = dict(module.named_buffers(recurse=False))
        if not own and not buffers:
            continue
        path = clean(raw)
        whole = _initialised(module, path, own, buffers, seed)
        for name, parameter in own.items():
            local, offset = local_part(parameter)
            full = f"{path}.{name}" if path else name
            cut = tuple(slice(o, o + n) for o, n in zip(offset, local.shape, strict=True))
            if full not in written:
                local.copy_(whole[name][cut])
            written.add(full)
        for name, buffer in buffers.items():
            buffer.copy_(whole[name])
    return written


def _initialised(module: nn.Module, path: str, own: dict, buffers: dict, seed: int) -> dict[str, Tensor]:
    """Whole CPU values of one module's own parameters and buffers, made by its own ``reset_parameters``."""
    reset = getattr(module, "reset_parameters", None)
    if reset is None:
        raise UnsupportedError(uninitialisable(path, type(module).__name__, [*own, *buffers]))
    stand_ins = {name: nn.Parameter(torch.full(p.shape, torch.nan, dtype=p.dtype), p.requires_grad) for name, p in own.items()}
    places = {name: torch.full(b.shape, torch.nan if b.is_floating_point() else -1, dtype=b.dtype) for name, b in buffers.items()}
    kept = dict(module._parameters), dict(module._buffers)
    try:
        module._parameters.update(stand_ins)
        module._buffers.update(places)
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(seed_of(seed, path))
            reset()
        made = dict(module.named_parameters(recurse=False, remove_duplicate=False)) | dict(module.named_buffers(recurse=False))
        whole = {name: made[name].detach() for name in (*own, *buffers)}
    finally:
        module._parameters.update(kept[0])
        module._buffers.update(kept[1])
    left = [name for name, value in whole.items() if value.is_floating_point() and torch.isnan(value).any()]
    if left:
        raise UnsupportedError(uninitialisable(path, type(module).__name__, left))
    return whole


def uninitialisable(path: str, kind: str, names: list[str]) -> str:
    return (
        f"module '{path or 'the model itself'}' ({kind}) was built on meta and nothing initialises its {', '.join(names)}: give it a"
        f" reset_parameters() that does, or build the model on the CPU with its weights"
    )
