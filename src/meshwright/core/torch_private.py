"""Reach what torch keeps private. ``distributed/torch_private`` does so for tensors on meshes, FSDP2 and messages; nothing else does.

Each function says which public way it waits for. ``tests/unit/test_torch_private.py`` exercises every one, so that another torch shows
what it moved. The registries of ``nn.Module`` (``_parameters``, ``_buffers``, ``_modules``, ``_apply``) have been the same since its
first release, and are read where they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

# Extension points that torch documents, in modules whose names it keeps private.
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import Variable
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.dropout import _DropoutNd as Dropout
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices as devices_with_foreach
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices as devices_with_fused
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

__all__ = [
    "BatchNorm",
    "Dropout",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "devices_with_foreach",
    "devices_with_fused",
    "is_traceable_wrapper_subclass",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "without_modes",
]

SAMPLES_NORMAL = "_no_grad_trunc_normal_"
"""Name in ``torch.nn.init`` of what draws until all numbers are within bounds. Waits for: ``trunc_normal_`` as one operator."""
GROUPED_PRODUCT = torch.ops.aten._grouped_mm.default
"""The operator behind ``torch.nn.functional.grouped_mm``."""


# --- tensors and operators


def address_of(storage: torch.UntypedStorage) -> int:
    """Tell storages apart, also those without memory. Waits for: an identity of ``UntypedStorage`` (``data_ptr`` is 0 on meta)."""
    return storage._cdata


def storage_at(weak_reference: int) -> torch.UntypedStorage | None:
    """Look up the storage that a ``StorageWeakRef.cdata`` means; None where nobody holds it. Waits for: a call of ``StorageWeakRef``."""
    return torch.UntypedStorage._new_with_weak_ptr(weak_reference)


def version_of(tensor: Tensor) -> int:
    """Count the writes to a tensor. Waits for: a public version counter."""
    return tensor._version


def schema_of(operator: Any) -> Any:
    """Read an operator's schema; None of what has none. Waits for: a public ``OpOverload.schema``."""
    return getattr(operator, "_schema", None)


def name_of_operator(operator: Any) -> str:
    """Read an operator's name without namespace and overload. Waits for: a public name without both."""
    return operator._opname


def foreach_norm(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """Compute the 2-norms of many tensors at once. Waits for: a public function that gives each tensor's norm."""
    return tuple(torch._foreach_norm(tensors, 2))


def foreach_multiply_(tensors: list[Tensor], factor: float | Tensor) -> None:
    """Multiply many tensors in place. Waits for: the same."""
    torch._foreach_mul_(tensors, factor)


def foreach_zero_(tensors: list[Tensor]) -> None:
    """Zero many tensors in place. Waits for: the same."""
    torch._foreach_zero_(tensors)


# --- autograd


def is_in_backward() -> bool:
    """Ask whether this thread runs a backward, as a recomputed forward does. Waits for: a public form of ``_current_graph_task_id``."""
    return torch._C._current_graph_task_id() != -1


def call_behind_backward(function: Callable[[], None]) -> None:
    """Call a function when the backward that runs has ended. Waits for: a public ``queue_callback``."""
    Variable._execution_engine.queue_callback(function)


def gradient_hooks(parameter: Tensor) -> list[Callable[..., Any]]:
    """List what ``register_hook`` registered. Waits for: a public list."""
    return list((parameter._backward_hooks or {}).values())


def accumulation_hooks(parameter: Tensor) -> list[Callable[..., Any]]:
    """List what ``register_post_accumulate_grad_hook`` registered. Waits for: a public list."""
    return list((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values())


def forget_accumulation_hooks(parameter: Any) -> None:
    """Forget hooks that a parameter lists though they are called no longer, its memory being another.

    Waits for: ``nn.Module._apply`` doing so.
    """
    parameter._post_accumulate_grad_hooks = None


# --- modules


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Ask whether a buffer belongs to the state dict. Waits for: a public flag."""
    return buffer not in module._non_persistent_buffers_set


def resetting(module: nn.Module) -> Callable[[], object] | None:
    """Return a module's own initialiser: ``reset_parameters``, or its private form of ``nn.MultiheadAttention`` and ``nn.Transformer``."""
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def forward_hooks(module: nn.Module) -> tuple[MutableMapping[int, Callable[..., Any]], MutableMapping[int, Callable[..., Any]]]:
    """Return the tables of a module's forward pre-hooks and hooks, which may be changed. Waits for: a public table."""
    return module._forward_pre_hooks, module._forward_hooks


def optimizer_has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Ask whether hooks are registered around an optimizer's step. Waits for: a public list."""
    made: Any = optimizer
    return bool(made._optimizer_step_pre_hooks or made._optimizer_step_post_hooks)


# --- the compiler


def import_compiler() -> None:
    """Import the compiler's front end, which torch loads when something first needs it."""
    import torch._dynamo  # noqa: F401


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the compiler out of a function. Waits for: a ``torch.compiler.disable`` that does not import the compiler at once."""
    return torch._disable_dynamo(function)


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """Return what ``module.compile()`` made; None where it was not called. Waits for: a public attribute."""
    return getattr(module, "_compiled_call_impl", None)


def set_compiled_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Let a compiled module's calls go through another function. Waits for: the same."""
    module._compiled_call_impl = call


def with_activation_budget(share: float) -> AbstractContextManager[Any]:
    """Compile inside so that no more than this share of activations is kept. Waits for: an option of ``torch.compile``."""
    import torch._functorch.config as config

    return config.patch(activation_memory_budget=share)


def without_recompilation_limit() -> AbstractContextManager[Any]:
    """Allow as many graphs of a function as it has shapes. Waits for: a limit for each compiled function."""
    return torch._dynamo.utils.disable_cache_limit()


def graph_break_counts() -> dict[str, int]:
    """Count graph breaks of this process by torch's words. Waits for: a public form of ``torch._dynamo.utils.counters``."""
    from torch._dynamo.utils import counters

    return dict(counters["graph_break"])


# --- memory


def record_memory_history(max_entries: int | None) -> None:
    """Begin to record the allocations of the CUDA allocator; None ends it. torch documents the function under its private name."""
    if max_entries is None:
        torch.cuda.memory._record_memory_history(enabled=None)
    else:
        torch.cuda.memory._record_memory_history(max_entries=max_entries)


def dump_memory_history(path: str) -> None:
    """Write what was recorded, for https://pytorch.org/memory_viz. Documented under its private name."""
    torch.cuda.memory._dump_snapshot(path)
