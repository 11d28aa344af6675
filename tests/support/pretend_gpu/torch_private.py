"""Reach torch's private names that the pretend device needs: each one in a function, with the reason."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup  # pyright: ignore[reportMissingImports]

CPU_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
"""The CPU's kernels. Until a device written in Python may name kernels to inherit."""


def dlpack_of(tensor: Tensor) -> Any:
    """Return a DLPack capsule; ``Tensor.__dlpack__`` asks the device for its streams."""
    return torch._C._to_dlpack(tensor)


def from_dlpack(capsule: Any) -> Tensor:
    """Return a tensor over a capsule's memory; the public function asks devices that it does not know."""
    return torch._C._from_dlpack(capsule)


def register(name: str, module: Any) -> None:
    """Register a device that is written in Python: torch has no public name for this yet."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(name, backend_module=module)


def know_factories() -> None:
    """Let ``torch.device`` as a context know torch's own factories, before others stand in their place."""
    from torch.utils._device import _device_constructors

    _device_constructors()


def silent_group(rank: int, size: int) -> Any:
    """Return a backend that sends nothing; the device's messages never reach their own backend."""
    return FakeProcessGroup._create_internal(rank, size)


def autograd_node() -> str | None:
    """Return the name of the operation whose backward runs on this thread."""
    node = torch._C._current_autograd_node()
    return None if node is None else node.name()


def boxed(work: dist.Work) -> Any:
    """Return a Work as the dispatcher hands it on."""
    return work.boxed()  # pyright: ignore[reportAttributeAccessIssue]


def unboxed(work: Any) -> dist.Work:
    """Return the Work that the dispatcher handed on."""
    return dist.Work.unbox(work)  # pyright: ignore[reportAttributeAccessIssue]


def group_of(boxed_group: Any) -> dist.ProcessGroup:
    """Return the process group that the dispatcher handed on."""
    return dist.ProcessGroup.unbox(boxed_group)  # pyright: ignore[reportAttributeAccessIssue]


def below_autocast() -> Any:
    """Return a context in which autocast of the device is over."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # pyright: ignore[reportAttributeAccessIssue]
    return torch._C._ExcludeDispatchKeyGuard(keys)
