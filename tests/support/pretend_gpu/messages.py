"""Send the pretend device's messages by the CPU's backend, as NCCL would order them.

A collective that is asked to be asynchronous runs on a stream of its group, behind what its caller's stream had so far;
``wait`` puts the caller's stream behind the group's. A synchronous one runs on the caller's stream.
"""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import Library

from meshwright.core.torch_private import schema_of, tree_map

from . import timeline
from .findings import CollectiveCall
from .kinds import tensors_in
from .memory import is_pretend, on_host
from .names import DEVICE_TYPE
from .operators import KEY
from .streams import DeviceStream, current_stream
from .torch_private import boxed, group_of, silent_group, unboxed

OPERATORS: dict[str, tuple[int, ...]] = {
    "allreduce_": (0,),
    "allreduce_coalesced_": (0,),
    "allgather_": (0,),
    "_allgather_base_": (0,),
    "allgather_coalesced_": (0,),
    "allgather_into_tensor_coalesced_": (0,),
    "reduce_scatter_": (0,),
    "_reduce_scatter_base_": (0,),
    "reduce_scatter_tensor_coalesced_": (0,),
    "reduce_": (0,),
    "broadcast_": (0,),
    "gather_": (0,),
    "scatter_": (0,),
    "alltoall_base_": (0,),
    "alltoall_": (0,),
    "send": (),
    "recv_": (0,),
    "recv_any_source_": (0,),
    "barrier": (),
}
"""Collective -> positions of the arguments that it writes."""

_streams: dict[str, DeviceStream] = {}
_alive: deque[dist.Work] = deque(maxlen=10_000)
"""The last messages: torch's C++ holds their C++ half alone, and without the other one ``wait`` never returns."""


class _Batches:
    """Numbers the calls of ``batch_isend_irecv``, each by its number of messages."""

    def __init__(self) -> None:
        self._number, self._left = 0, 0

    def of_this_message(self) -> int:
        messages = timeline.argument_of_call("batch_isend_irecv", "p2p_op_list")
        if messages is None:
            return 0
        if self._left == 0:
            self._number, self._left = self._number + 1, len(messages)
        self._left -= 1
        return self._number


_batches = _Batches()


def stream_of(group: dist.ProcessGroup) -> DeviceStream:
    """Return the stream of a group's asynchronous messages."""
    return _streams.setdefault(group.group_name, DeviceStream())


class DeviceWork(dist.Work):
    """A message on its way: waiting for it lets the current stream wait, and really ends it.

    What has been waited for holds nothing: gloo's threads run as long as anything of their group is alive.
    """

    def __init__(self, work: dist.Work, stream: int, outputs: list[Tensor], hosts: list[Tensor]):
        super().__init__()
        self._work: dist.Work | None = work
        self._stream, self._outputs, self._hosts = stream, outputs, hosts
        self._clock = dict(timeline.clock_of(stream))
        _alive.append(self)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self._work is not None:
            self._work.wait()
            self._work = None
        timeline.wait(current_stream().stream_id, self._clock)
        self._hosts.clear()
        self._outputs = []
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()

    def is_success(self) -> bool:
        return True

    def result(self) -> list[Tensor]:
        return self._outputs

    def get_future(self) -> torch.futures.Future:
        outputs = self._outputs
        self.wait()
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(outputs)
        return future


def _kernel(name: str, written: tuple[int, ...]) -> Any:
    operator = getattr(torch.ops.c10d, name).default
    arguments = [argument.name for argument in schema_of(operator).arguments]
    place = arguments.index("process_group")
    to = next((arguments.index(side) for side in ("dst", "src") if side in arguments), None)
    asynchronous = arguments.index("async_op") if "async_op" in arguments else None

    def kernel(*args: Any) -> Any:
        hosts: list[Tensor] = []
        known: dict[int, Tensor] = {}

        def to_host(value: Any) -> Any:
            if not is_pretend(value):
                return value
            hosts.append(on_host(value))
            known[id(hosts[-1])] = value
            return hosts[-1]

        outputs = [t for position in written for t in tensors_in(args[position])]
        reads = [t for value in args for t in tensors_in(value) if all(t is not other for other in outputs)]
        is_async = asynchronous is None or asynchronous >= len(args) or bool(args[asynchronous])
        group = group_of(args[place])
        caller = current_stream().stream_id
        stream = stream_of(group).number if is_async else caller
        if name == "barrier":
            reads = []
        if is_async:
            timeline.wait(stream, timeline.clock_of(caller))
        if (watch := timeline.current()) is not None:
            in_place = outputs if name in ("allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_") else []
            timeline.launch(name, stream, [*reads, *in_place], outputs)
            nbytes = sum(t.numel() * t.element_size() for t in (reads or outputs))
            ranks = tuple(dist.get_process_group_ranks(group))
            peer = ranks[args[to]] if to is not None else None
            line, batch = timeline.line_of(name), _batches.of_this_message()
            watch.seen.messages.append(CollectiveCall(name, ranks, nbytes, caller, line, peer, batch))
        result = operator(*tree_map(to_host, args))
        found = result if isinstance(result, tuple) else (result,)
        work = boxed(DeviceWork(unboxed(found[-1]), stream, outputs, hosts))
        others = [tree_map(lambda value: known.get(id(value), value), part) for part in found[:-1]]
        return (*others, work) if isinstance(result, tuple) else work

    return kernel


def _backend(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return silent_group(rank, size)


def install() -> Library:
    """Register the collectives' kernels, and the backend's name with torch."""
    library = Library("c10d", "IMPL", "")
    for name, written in OPERATORS.items():
        library.impl(name, _kernel(name, written), KEY)
    dist.Backend.register_backend(DEVICE_TYPE, _backend, devices=[DEVICE_TYPE])
    return library
