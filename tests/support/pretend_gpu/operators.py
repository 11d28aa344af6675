"""Compute the pretend device's operators by the CPU's kernels on the same memory.

torch asks ``fallback`` for every operator that a back end of its own would have a kernel for, so what is composed of
other operators, what autograd does and what is refused are as on any accelerator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, fallthrough_kernel

from meshwright.core.torch_private import tree_map

from . import timeline
from .host import note_copy, pinned
from .kinds import Kind, kind_of, tensors_in
from .memory import Allocation, allocation_of, is_pretend, on_device, on_host, poison
from .names import DEVICE_TYPE
from .streams import current_stream
from .torch_private import CPU_KEY, below_autocast

aten = torch.ops.aten
KEY = "PrivateUse1"

VIEWS = (
    "as_strided",
    "view",
    "_reshape_alias",
    "unfold",
    "view_as_real",
    "view_as_complex",
    "set_.source_Storage_storage_offset",
    "set_.source_Tensor",
    "set_",
)
"""Operators that only change sizes, strides and storage: the CPU's kernels do that to any tensor."""

READS_OF_HOST = {
    "_local_scalar_dense": "the host reads a number",
    "nonzero": "a shape that depends on data",
    "masked_select": "a shape that depends on data",
    "_unique2": "a shape that depends on data",
    "unique_dim": "a shape that depends on data",
    "unique_consecutive": "a shape that depends on data",
    "bincount": "a shape that depends on data",
    "equal": "the host reads a comparison",
}
"""Operators whose result the host waits for."""
INDEXES = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put")
"""Operators whose masks become indexes of a shape that depends on data, and whose indexes may lie on the host."""
AUTOCAST = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "scaled_dot_product_attention")
"""Operators that autocast computes in its dtype; others keep theirs."""


class DeviceMixture(RuntimeError):
    """Tensors of two devices in one operator."""


def fallback(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute an operator on the host's view of its tensors, and note what it reads and writes."""
    kind = kind_of(operator)
    given = [*tensors_in(args), *tensors_in(list(kwargs.values()))]
    _refuse_mixture(kind, given)
    written = _written(kind, args, kwargs)
    hosts: list[tuple[Tensor, Tensor]] = []
    to_fill = {id(tensor) for tensor in written if tensor.numel() == 0} if kind.is_out else ()

    def to_host(value: Any) -> Any:
        if is_pretend(value):  # the kernel gives an empty ``out`` its size
            hosts.append(
                (value, torch.empty(value.shape, dtype=value.dtype) if id(value) in to_fill else on_host(value))
            )
            return hosts[-1][1]
        return torch.device("cpu") if isinstance(value, torch.device) and value.type == DEVICE_TYPE else value

    host_args, host_kwargs = tree_map(to_host, (args, kwargs))
    result = (operator.overloadpacket if _has_numbers(kind, args) else operator)(*host_args, **host_kwargs)
    made: list[Tensor] = []
    output = tree_map(lambda value: _to_device(value, hosts, made) if isinstance(value, Tensor) else value, result)
    if timeline.current() is not None:
        writes = {id(tensor) for tensor in written}
        reads = [t for t in given if is_pretend(t) and (id(t) not in writes or _reads_what_it_writes(kind))]
        timeline.launch(kind.name, current_stream().stream_id, reads, [t for t in (*written, *made) if is_pretend(t)])
        if why := _host_waits(kind, args, kwargs):
            timeline.host_waits(timeline.clock_of(current_stream().stream_id), why)
    return output


def _has_numbers(kind: Kind, args: Sequence[Any]) -> bool:
    """Return whether numbers stand where the schema has tensors: torch hands them on so, and overloads take them."""
    return any(isinstance(args[n], (bool, int, float, complex)) for n in kind.tensors if n < len(args))


def _written(kind: Kind, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for position, name in kind.writes:
        found.extend(tensors_in(args[position] if position < len(args) else kwargs.get(name)))
    return found


def _reads_what_it_writes(kind: Kind) -> bool:
    return kind.name not in ("fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "_foreach_zero_")


def _host_waits(kind: Kind, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
    if kind.name in INDEXES and len(args) > 1:
        indexes = list(tensors_in([index for index in args[1] if index is not None]))
        if any(is_pretend(i) and i.dtype in (torch.bool, torch.uint8) for i in indexes):
            return "a shape that depends on data"
        if any(not is_pretend(i) and i.dim() for i in indexes):
            return "indexes are copied from the host"
    if kind.name == "repeat_interleave" and kwargs.get("output_size") is None:
        return "a shape that depends on data"
    return READS_OF_HOST.get(kind.name)


def _refuse_mixture(kind: Kind, given: Sequence[Tensor]) -> None:
    if kind.name in INDEXES and len(given) > 1 and is_pretend(given[0]):
        return
    strangers = [t for t in given if not is_pretend(t) and t.dim()]
    if not strangers:
        return
    if (watch := timeline.current()) is not None:
        watch.seen.mixtures.append(timeline.line_of(kind.name))
    raise DeviceMixture(
        f"{kind.name}: expected all tensors to be on one device, but found {DEVICE_TYPE}:0 and"
        f" {strangers[0].device} (shape {tuple(strangers[0].shape)}) at {timeline.line_of(kind.name)}"
    )


def _to_device(result: Tensor, hosts: Sequence[tuple[Tensor, Tensor]], made: list[Tensor]) -> Tensor:
    """Return the device's tensor of a result: the argument that it is, a view of the one it lies in, or a new one."""
    for device, host in hosts:
        if result is host:
            if result.shape != device.shape or result.stride() != device.stride():
                _follow(device, result)
            return device
    address = result.data_ptr()
    for device, _ in hosts if result.numel() else ():
        block = allocation_of(device)
        if block.address <= address < block.address + block.nbytes:
            return _view(device, result, address, block)
    made.append(on_device(result if result.is_contiguous() or _is_dense(result) else result.contiguous()))
    return made[-1]


def _is_dense(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes() and tensor.storage_offset() == 0


def _view(base: Tensor, result: Tensor, address: int, block: Allocation) -> Tensor:
    if result.dtype != base.dtype:
        base = aten.view.dtype(base.detach(), result.dtype)
    offset = (address - block.address) // result.element_size()
    return aten.as_strided.default.redispatch(CPU_KEY, base, result.shape, result.stride(), offset)


def _follow(device: Tensor, host: Tensor) -> None:
    """Give a tensor the sizes and strides that an operator gave its host view, or the memory that it made."""
    source = device if host.data_ptr() == device.data_ptr() else on_device(host)
    aten.set_.source_Storage_storage_offset.redispatch(
        CPU_KEY, device, source.untyped_storage(), source.storage_offset(), host.shape, host.stride()
    )


# --- operators with a kernel of their own


def _empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> Tensor:
    made = torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format, device="cpu")
    return on_device(poison(made))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return on_device(poison(torch.empty_strided(size, stride, dtype=dtype, device="cpu")))


def _resize(tensor: Tensor, size: Any, *, memory_format: Any = None) -> Tensor:
    room = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    fits = torch.Size(size).numel() <= room
    source = tensor if fits else _empty(size, dtype=tensor.dtype)
    strides = torch.empty(size, device="meta").stride()
    offset = source.storage_offset()
    aten.set_.source_Storage_storage_offset.redispatch(CPU_KEY, tensor, source.untyped_storage(), offset, size, strides)
    return tensor


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy, also between the devices, and note whether the host waits."""
    here = on_host(target) if is_pretend(target) else target
    there = on_host(source) if is_pretend(source) else source
    here.copy_(there)
    watch = timeline.current()
    if watch is None:
        return target
    stream = current_stream().stream_id
    pair = [source], [target]
    if is_pretend(source) and is_pretend(target):
        timeline.launch("copy_", stream, *pair)
        return target
    note_copy(watch, stream, target, source, non_blocking=non_blocking)
    return target


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    return _copy(target, source, non_blocking)


def _to_copy(tensor: Tensor, *, device: Any = None, dtype: Any = None, **options: Any) -> Tensor:
    """Copy to another device or dtype; as on CUDA, host memory that is filled without waiting is pinned."""
    memory_format = options.get("memory_format") or torch.preserve_format
    made = torch.empty_like(tensor, dtype=dtype, device=device, memory_format=memory_format)
    if (non_blocking := options.get("non_blocking", False)) and not is_pretend(made):
        pinned(made)
    return made.copy_(tensor, non_blocking=non_blocking)


def _record_stream(tensor: Tensor, stream: torch.Stream) -> None:
    allocation_of(tensor).others.add(stream.stream_id)


def _inherited(operator: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        return operator.redispatch(CPU_KEY, *args, **kwargs)

    return kernel


def _autocast(operator: Any) -> Callable[..., Any]:
    def lower(value: Any) -> Any:
        is_wide = is_pretend(value) and value.dtype in (torch.float32, torch.float16, torch.bfloat16)
        return value.to(torch.get_autocast_dtype(DEVICE_TYPE)) if is_wide else value

    @wraps(operator)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with below_autocast():
            return operator(*tree_map(lower, args), **tree_map(lower, kwargs))

    return kernel


def install() -> list[Library]:
    """Register all kernels; they hold as long as the libraries that are returned."""
    every, own = Library("_", "IMPL"), Library("aten", "IMPL")
    every.fallback(fallback, KEY)
    every.fallback(fallthrough_kernel, "AutocastPrivateUse1")
    for name in VIEWS:
        packet, _, overload = name.partition(".")
        own.impl(name, _inherited(getattr(getattr(aten, packet), overload or "default")), KEY)
    own.impl("empty.memory_format", _empty, KEY)
    own.impl("empty_strided", _empty_strided, KEY)
    own.impl("resize_", _resize, KEY)
    own.impl("copy_", _copy, KEY)
    own.impl("_copy_from", _copy_from, KEY)
    own.impl("_to_copy", _to_copy, KEY)
    own.impl("record_stream", _record_stream, KEY)
    for name in AUTOCAST:
        own.impl(name, _autocast(getattr(aten, name).default), "AutocastPrivateUse1")
    return [every, own]
