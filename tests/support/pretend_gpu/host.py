"""Watch host memory that copies to and from the device use: is it pinned, and when may the host touch it?"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import count
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshwright.core.torch_private import TorchDispatchMode

from .findings import HOST, HostRead
from .kinds import is_pinned, kind_of, tensors_in
from .memory import is_pretend
from .timeline import DeviceWatch, access_of, clock_of, join, launch, line_of

SHAPES = ("empty_like", "new_empty", "new_empty_strided", "zeros_like", "ones_like", "full_like", "rand_like")
"""Operators that read the shape of a tensor and not its memory."""
_numbers = count(1)


def note_copy(watch: DeviceWatch, stream: int, target: Tensor, source: Tensor, *, non_blocking: bool) -> None:
    """Note a copy between host and device."""
    with watch.lock:
        watch.seen.copies += 1
        host, to_device = (source, True) if is_pretend(target) else (target, False)
        launch("copy_", stream, [] if to_device else [source], [target] if to_device else [])
        if non_blocking and host.numel():
            if not is_pinned(host):
                watch.seen.pageable.append(line_of("copy_"))
            else:
                _access(watch, host, stream, writes=not to_device)
        elif host.numel():
            why = "a blocking copy to the device" if to_device else "a copy to the host"
            watch.seen.host_reads.append(HostRead(why, line_of("copy_")))
            join(watch.clocks[HOST], clock_of(stream))


def _access(watch: DeviceWatch, tensor: Tensor, stream: int, *, writes: bool) -> None:
    storage = tensor.untyped_storage()
    number = storage.__dict__.setdefault("travels", -next(_numbers))
    time = watch.clocks[stream].get(stream, 0)
    access = access_of(tensor, storage.data_ptr(), stream, time, line_of("copy_"))
    watch.access(number, access, writes=writes, what="host memory")


def _travels(value: Tensor) -> bool:
    return value.device.type == "cpu" and bool(value.numel()) and "travels" in value.untyped_storage().__dict__


class HostAccesses(TorchFunctionMode):
    """Watches calls that are given host memory which asynchronous copies use.

    Operators are watched inside of such calls alone: in a backward of C++, torch does not survive an exception of
    Python's that goes through a dispatch mode and then through a device's guard that is written in Python.
    """

    def __init__(self, watch: DeviceWatch):
        super().__init__()
        self._operators = _HostOperators(watch)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = (*tensors_in(args), *tensors_in(list(kwargs.values())))
        with self._operators if any(type(t) is Tensor and _travels(t) for t in given) else nullcontext():
            return func(*args, **kwargs)


class _HostOperators(TorchDispatchMode):
    """Notes the operators on such memory."""

    def __init__(self, watch: DeviceWatch):
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [*tensors_in(args), *tensors_in(list(kwargs.values()))]
        travels = [t for t in given if _travels(t)]
        kind = kind_of(func)
        if travels and not func.is_view and kind.name not in SHAPES and not any(map(is_pretend, given)):
            written = {id(t) for position, _ in kind.writes for t in tensors_in(args[position : position + 1])}
            with self._watch.lock:
                time = self._watch.issue(HOST)
                for tensor in travels:
                    storage = tensor.untyped_storage()
                    access = access_of(tensor, storage.data_ptr(), HOST, time, line_of(kind.name))
                    number = storage.__dict__["travels"]
                    self._watch.access(number, access, writes=id(tensor) in written, what="host memory")
        return func(*args, **kwargs)


def pinned(tensor: Tensor) -> Tensor:
    """Mark host memory as page-locked, and return the tensor."""
    tensor.untyped_storage().__dict__["is_pinned"] = True
    return tensor
