"""Describe what the tensors that optimizers step, and their gradients and states, hold of a model's parameters.

Like the recorder, this file is loaded by its path into whatever environment the script has, so it imports torch alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.observation.sketches import local_of, marginals, norm_of, plain_of

WRAPPERS = {
    "DistributedDataParallel": ("module",),
    "DataParallel": ("module",),
    "FullyShardedDataParallel": ("_fsdp_wrapped_module", "module"),
    "OptimizedModule": ("_orig_mod",),
    "ActivationWrapper": ("_checkpoint_wrapped_module",),
    "_FabricModule": ("_forward_module", "_original_module"),
    "DeepSpeedEngine": ("module",),
    "PeftModel": ("base_model",),
    "LoraModel": ("model",),
}
"""Class name of a wrapper -> the attributes under which it holds what it wraps."""
SHORT = torch.bfloat16, torch.float16


def is_short(output: Tensor) -> bool:
    """Return whether a tensor was computed from one of 16 bits, by the first 20,000 nodes of its graph."""
    nodes, seen = [output.grad_fn], set[Any]()
    while nodes and len(seen) < 20_000:
        if (node := nodes.pop()) not in seen and node is not None:
            seen.add(node)
            if any(m.dtype in SHORT for m in getattr(node, "_input_metadata", ())):
                return True
            nodes += [other for other, _ in node.next_functions]
    return output.dtype in SHORT


def record(tensor: Any) -> dict[str, Any]:
    """Describe a parameter, its gradient or its state."""
    plain, offset, whole, kind = tensor.detach(), None, None, []
    if hasattr(plain, "placements") and not plain.is_complex():
        whole, kind = tuple(plain.shape), [str(p) for p in plain.placements]
        try:
            from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

            _, offset = compute_local_shape_and_global_offset(plain.shape, plain.device_mesh, plain.placements)
        except Exception:  # noqa: BLE001 - a private name of torch; its shard is placed by value then
            offset = None
    if type(plain) is not Tensor or plain.layout != torch.strided or plain.is_complex():
        plain = local_of(plain).detach()
    is_float = plain.is_floating_point()
    if plain.is_quantized or not (is_float or plain.dtype in (torch.int64, torch.int32, torch.bool)):
        plain = plain.view(torch.uint8) if plain.dim() else plain.double()
    values = plain_of(plain)
    norm = norm_of(values)
    fits = is_float and norm and all(bool(v.bfloat16().eq(v).all()) for v in (plain.reshape(-1)[:256], plain))
    return {
        "shape": list(plain.shape),
        "fits": bool(fits),
        "whole": list(whole) if whole else None,
        "offset": list(offset) if offset is not None else None,
        "placements": kind,
        "dtype": str(plain.dtype)[6:],
        "norm": norm,
        "m": marginals(values, offset, whole if offset is not None else None),
    }


@dataclass(frozen=True)
class Piece:
    """What a stepped tensor holds of one parameter.

    Attributes:
        name: the parameter's, free of wrappers.
        whole: its shape where the tensor is a flat shard (FSDP1), else None.
        start, count: the shard's elements of the flattened parameter.
        begins: where they begin in the tensor.
    """

    name: str
    whole: tuple[int, ...] | None = None
    start: int = 0
    count: int = 0
    begins: int = 0

    def record(self, tensor: Any) -> dict[str, Any]:
        """Describe this parameter's part of a tensor; a flat shard as the whole with zeros around it."""
        if self.whole is None:
            return record(tensor)
        local = tensor.detach().reshape(-1)[self.begins : self.begins + self.count]
        padded = local.new_zeros(torch.Size(self.whole).numel())
        padded[self.start : self.start + self.count] = local
        return record(padded.view(self.whole)) | {"part": [self.start, self.count]}


def pieces_of(fsdp: Any, path: str) -> dict[int, tuple[Any, list[Piece]]]:
    """List what the flat parameter of an FSDP1 module, or its views, hold of the parameters: by id of the tensor."""
    flat = getattr(getattr(fsdp, "_handle", None), "flat_param", None)
    if flat is None:
        return {}
    found: dict[int, tuple[Any, list[Piece]]] = {id(flat): (flat, [])}
    begins = 0
    for number, (name, shape, shard) in enumerate(zip(flat._fqns, flat._shapes, flat._shard_param_infos, strict=True)):
        n = shard.numel_in_shard if shard.in_shard else 0
        begins = shard.offset_in_shard if shard.in_shard else begins
        piece = Piece(path + name, tuple(shape), shard.intra_param_start_idx or 0, n, begins)
        found[id(flat)][1].append(piece)
        if flat._params is not None:
            view = flat._params[number]
            found[id(view)] = view, [Piece(piece.name, piece.whole, piece.start, n)]
    return found


def wrapped_under(module: Any) -> tuple[str, ...]:
    """Name the attributes under which a wrapper holds what it wraps."""
    return next((WRAPPERS[c.__name__] for c in type(module).__mro__ if c.__name__ in WRAPPERS), ())


def walk(module: Any, path: str, found: dict[int, tuple[Any, list[Piece]]], modules: dict[int, str]) -> None:
    """Collect the parameters in a module, and the names of modules, free of wrappers."""
    modules.setdefault(id(module), path.rstrip("."))
    found |= {key: value for key, value in pieces_of(module, path).items() if key not in found}
    for key, parameter in module._parameters.items():
        if parameter is not None and id(parameter) not in found:
            found[id(parameter)] = parameter, [Piece(path + key)]
    for key, child in module._modules.items():
        if child is not None:
            walk(child, path if key in wrapped_under(module) else f"{path}{key}.", found, modules)
