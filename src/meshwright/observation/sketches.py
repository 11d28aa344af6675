"""Describe tensors of a script by a few numbers.

Like the recorder, this file is loaded by its path into whatever environment the script has, so it imports torch alone.

A tensor is recorded as its marginals: for each dim, the tensor's projection on products of signs along all the other
dims. A shard that is cut along one dim has a slice of the whole's marginal there, so shards find their place by value;
the marginals of shards whose offsets are known add up to the whole's.
"""

from __future__ import annotations

import gc
import hashlib
import json
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

FORMAT = "meshwright trace 11"
AT_STEP = ("gradients", "before", "after", "state", "rates")
"""What a step's first file holds once its optimizers have stepped; its second, ``REST``, has what came since."""
REST = ".rest"
INPUT = " input"
"""What follows the name of a module in the name of its first input."""
TOKENS = 1 << 14
"""Numbers of an output that are recorded, at most; beyond that, neighbours are added up."""
BLOCK = 1024
"""Numbers that are added up in their own precision, at most."""
RUN = 1 << 16
"""Squares that are added up in their own precision, at most."""
SMALL = 1 << 15
"""Numbers of a tensor that is added up in float64, at most."""


@lru_cache(maxsize=512)
def signs(n: int, role: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw a vector of ±1 that depends on its length and role alone, (n,)."""
    generator = torch.Generator().manual_seed(7919 * n + role)
    return torch.randint(0, 2, (n,), generator=generator, device="cpu").to(dtype) * 2 - 1


def marginals(
    tensor: Tensor, offset: tuple[int, ...] | None = None, whole: tuple[int, ...] | None = None
) -> list[Tensor]:
    """Project a tensor on signs along all dims but one, for each dim: a list of (size,) float32.

    Numbers are added up in their own precision in blocks of ``BLOCK``, and the blocks' sums in float64.

    Args:
        tensor: in float32 or float64.
        offset, whole: the place of a shard in a tensor of shape ``whole``.
    """
    if tensor.dim() < 2:
        return [tensor.reshape(-1).to(torch.float32, copy=True)]
    if tensor.numel() <= SMALL:  # sums that nearly cancel are as exact as others there
        tensor = tensor.double()
    at = offset or (0,) * tensor.dim()
    sizes = list(enumerate(tensor.shape))
    along = [signs(whole[d] if whole else size, d, tensor.dtype)[at[d] : at[d] + size] for d, size in sizes]
    found, left = [], tensor  # what is left once the last dims are added up
    for dim in range(tensor.dim() - 1, -1, -1):
        rows = left.reshape(torch.Size(tensor.shape[:dim]).numel(), tensor.shape[dim])
        before = along[0] if dim else signs(1, 0, tensor.dtype).abs()
        for other in along[1:dim]:
            before = torch.outer(before, other).flatten()
        found.append(_added([a @ b for a, b in zip(before.split(BLOCK), rows.split(BLOCK), strict=True)]).float())
        if dim:
            left = _added([a @ b for a, b in zip(rows.split(BLOCK, 1), along[dim].split(BLOCK), strict=True)])
    return found[::-1]


def _added(parts: list[Tensor]) -> Tensor:
    """Add up blocks' sums in float64; the result has their dtype."""
    return parts[0] if len(parts) == 1 else torch.stack(parts).double().sum(0).to(parts[0].dtype)


def norm_of(values: Tensor) -> float:
    """Return the 2-norm of numbers, added up in their own precision in runs of ``RUN`` and in float64 beyond."""
    flat = values.reshape(-1)
    return sum(float(run @ run) for run in (flat.split(RUN) if flat.numel() > RUN else (flat,))) ** 0.5


def plain_of(tensor: Tensor) -> Tensor:
    """Return a tensor's numbers on the CPU in float32; those of float64 and of whole numbers in float64."""
    is_short = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.detach().to("cpu", torch.float32 if is_short else torch.float64)


@torch.no_grad()
def local_of(tensor: Any) -> Tensor:
    """Return what this rank holds of a tensor, a sparse one's zeros included; a complex one as pairs of numbers."""
    found = tensor.to_local() if hasattr(tensor, "placements") else tensor
    found = found.wait() if hasattr(found, "wait") else found
    found = torch.view_as_real(found.resolve_conj()) if found.is_complex() else found
    return found if found.layout == torch.strided else found.to_dense()


def checksum(tensor: Any) -> int:
    """Add up the bits of what this rank holds; versions do not tell, since writes to ``.data`` leave them alone."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    local = local_of(tensor.detach()).contiguous().view(-1)
    words = 8 // local.element_size()
    even = local.numel() % words == 0 == local.storage_offset() % words
    return int(local.view(torch.int64 if even else bits[local.element_size()]).sum())


def sketch(output: Any) -> dict[str, Any]:
    """Describe an output: (rows, tokens, …) -> its numbers by row and token, and by row and feature."""
    kind = []
    if hasattr(output, "placements"):
        kind = [str(p) for p in output.placements]
        output = local_of(output)
    values = plain_of(output)
    shape = list(values.shape)
    if values.dim() == 1:
        values = values.unsqueeze(1)
    if values.dim() == 2:
        values = values.unsqueeze(1)
    values = values.flatten(2)
    by_token = values @ signs(values.shape[2], 1, values.dtype)
    by_feature = signs(values.shape[1], 2, values.dtype) @ values
    return {
        "shape": shape,
        "placements": kind,
        "dtype": str(output.dtype)[6:],
        "t": _pooled(by_token),
        "f": _pooled(by_feature),
    }


def _pooled(numbers: Tensor) -> Tensor:
    rows, n = numbers.shape
    group = 1
    while rows * (n // group) > TOKENS and n % (2 * group) == 0:
        group *= 2
    return numbers.view(rows, n // group, group).sum(2).float()


def hashes(tensor: Any) -> list[str]:
    """Hash each row of a tensor."""
    rows = local_of(tensor).detach().cpu()
    rows = rows.to(torch.int64) if not rows.is_floating_point() else rows.float()
    rows = rows.reshape(rows.shape[0], -1).contiguous() if rows.dim() else rows.reshape(1, 1)
    return [hashlib.blake2b(row.numpy().tobytes(), digest_size=8).hexdigest() for row in rows]


def ids_of(tensor: Tensor) -> list[list[int]] | None:
    """List a number for each token of (rows, tokens) or (rows, tokens, features); None for others and large ones."""
    is_whole = not tensor.is_floating_point()
    if tensor.dim() != (2 if is_whole else 3) or tensor.numel() > TOKENS * (4 if is_whole else 64):
        return None
    found = local_of(tensor).detach()
    if not is_whole:
        bits = found.float().contiguous().view(torch.int32).to(torch.int64)
        found = (bits * (2 * torch.arange(bits.shape[-1], device=bits.device) + 1) ** 3).sum(-1)
    return found.tolist()


def first_tensor(value: Any) -> Tensor | None:
    """Find the floating-point tensor that a module's output is, or holds first."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    if hasattr(value, "logits") and isinstance(value.logits, Tensor):
        return value.logits
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        for item in value:
            if (found := first_tensor(item)) is not None:
                return found
    return None


def tensors_by_name(value: Any, name: str) -> dict[str, Tensor]:
    """Collect the tensors that a call was given, with names for their places."""
    if isinstance(value, Tensor):
        return {name: value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (tuple, list)) else ()
    return {
        k: t for key, item in items for k, t in tensors_by_name(item, f"{name}.{key}" if name else str(key)).items()
    }


def names_in(value: Any) -> set[str]:
    """Collect the names in nested dicts."""
    items = value.items() if isinstance(value, dict) else ()
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return {str(key) for key, _ in items}.union(*map(names_in, inner)) if not isinstance(value, str) else set()


def new_step() -> dict[str, Any]:
    """Make the record of a step in which nothing has happened yet."""
    lists = "calls", "forward", "targets", "draws", "saved", "keys", "taken", "names", "loaded", "sights", "sent"
    lists += "copies", "drawn", "chosen"
    maps = "gradients", "before", "after", "state", "rates", "again"
    return dict.fromkeys(("short", "unseen"), False) | {key: [] for key in lists} | {key: {} for key in maps}


def packed(content: dict[str, Any]) -> dict[str, Any]:
    """Lay out a trace for a file, which names and lists in JSON and a few long tensors make small and fast."""
    numbers: dict[str, list[Tensor]] = {"float32": [torch.zeros(0)], "float64": [torch.zeros(0, dtype=torch.float64)]}
    begins, placed = dict.fromkeys(numbers, 0), dict[int, Any]()

    def place(tensor: Tensor) -> dict[str, Any]:
        if id(tensor) not in placed:
            name = str(tensor.dtype)[6:]
            numbers[name].append(tensor if type(tensor) is Tensor else tensor.as_subclass(Tensor))
            placed[id(tensor)] = {"#": [name, begins[name], list(tensor.shape)]}
            begins[name] += tensor.numel()
        return placed[id(tensor)]

    text = json.dumps(content, default=place)
    return {"json": text} | {name: torch.cat([part.reshape(-1) for part in parts]) for name, parts in numbers.items()}


def unpacked(file: dict[str, Any]) -> dict[str, Any]:
    """Return what ``packed`` was given."""

    def tensor(value: dict[str, Any]) -> Any:
        if "#" not in value:
            return value
        name, start, shape = value["#"]
        return file[name][start : start + torch.Size(shape).numel()].view(shape)

    return json.loads(file["json"], object_hook=tensor)


def name_of(tensor: Any) -> str:
    """Find the name under which an object or a dict of the script holds a tensor."""
    for holder in gc.get_referrers(tensor):
        if type(holder) is dict and holder is not globals():
            for key, value in holder.items():
                if value is tensor and isinstance(key, str) and key not in ("p", "param", "parameter", "_"):
                    return key
    return ""
