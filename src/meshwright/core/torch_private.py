"""Access torch's private API.

``distributed/torch_private`` does so for tensors on meshes, FSDP2 and messages; nothing else does. After "until",
each function states the public API that would replace it. ``tests/unit/test_torch_private.py`` exercises every one,
so that another torch shows what it moved. The registries of ``nn.Module`` (``_parameters``, ``_buffers``,
``_modules``, ``_apply``) have been the same since its first release, and are read where they are needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, MutableMapping
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, ParamSpec, TypeVar

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
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map, tree_map_only, tree_unflatten

from .devices import CUDA

__all__ = [
    "BatchNorm",
    "Dropout",
    "EagerDispatchMode",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "devices_with_foreach",
    "devices_with_fused",
    "is_traceable_wrapper_subclass",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "without_modes",
]


P = ParamSpec("P")
R = TypeVar("R")


class EagerDispatchMode(TorchDispatchMode):
    """A dispatch mode for code that is never compiled: torch wraps others by its compiler, which takes a second to
    import.

    Until a mode can say in public that it has nothing to do with the compiler.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def by_values(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function about places and sizes outside of all dispatch modes: its tensors have values everywhere.

    Also where a model's have none, in a dry run.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with without_modes():
            return function(*args, **kwargs)

    return run


def has_no_values(tensor: Tensor) -> bool:
    """Return whether a tensor is one of a dry run, until ``FakeTensor`` is public."""
    return isinstance(tensor, FakeTensor)


SAMPLES_NORMAL = "_no_grad_trunc_normal_"
"""Name of torch.nn.init's function that redraws out-of-bounds numbers, until ``trunc_normal_`` is one operator."""
GROUPED_PRODUCT = torch.ops.aten._grouped_mm.default
"""The operator behind ``torch.nn.functional.grouped_mm``."""


# --- tensors and operators


def fake_mode() -> FakeTensorMode:
    """Return a mode whose tensors have no values, and which a deep copy of a tensor shares.

    torch copies the mode with the tensor (``copy.deepcopy`` of a module, in a constructor); the copy then releases weak
    references to storages that it does not own, which corrupts the heap.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.__deepcopy__ = lambda memo: mode  # type: ignore[attr-defined]
    return mode


def address_of(storage: torch.UntypedStorage) -> int:
    """Identify a storage, even on meta (where ``data_ptr`` is 0), until ``UntypedStorage`` has a public identity."""
    return storage._cdata


def version_of(tensor: Tensor) -> int:
    """Return the number of writes to a tensor, until torch has a public version counter."""
    return tensor._version


def schema_of(operator: Any) -> Any:
    """Return an operator's schema or None, until ``OpOverload.schema`` is public."""
    return getattr(operator, "_schema", None)


def name_of_operator(operator: Any) -> str:
    """Return an operator's name without namespace and overload, until such a name is public."""
    return operator._opname


def foreach_zero_(tensors: list[Tensor]) -> None:
    """Zero many tensors in place, until a public function does."""
    torch._foreach_zero_(tensors)


# --- autograd


def is_in_backward() -> bool:
    """Return whether this thread is in a backward (recomputation is), until ``_current_graph_task_id`` is public."""
    return torch._C._current_graph_task_id() != -1


def call_behind_backward(function: Callable[[], None]) -> None:
    """Call a function when the running backward has ended, until ``queue_callback`` is public."""
    Variable._execution_engine.queue_callback(function)


def gradient_hooks(parameter: Tensor) -> list[Callable[..., Any]]:
    """List the hooks that ``register_hook`` registered, until a public list exists."""
    return list((parameter._backward_hooks or {}).values())


def accumulation_hooks(parameter: Tensor) -> list[Callable[..., Any]]:
    """List the hooks that ``register_post_accumulate_grad_hook`` registered, until a public list exists."""
    return list((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values())


# --- modules


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Return whether a buffer belongs to the state dict, until torch has a public flag."""
    return buffer not in module._non_persistent_buffers_set


def resetting(module: nn.Module) -> Callable[[], object] | None:
    """Return ``reset_parameters`` or its private form (``nn.MultiheadAttention``, ``nn.Transformer``), else None."""
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def forward_hooks(
    module: nn.Module,
) -> tuple[MutableMapping[int, Callable[..., Any]], MutableMapping[int, Callable[..., Any]]]:
    """Return the mutable tables of a module's forward pre-hooks and hooks, until public tables exist."""
    return module._forward_pre_hooks, module._forward_hooks


def optimizer_has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether hooks are registered around an optimizer's step, until a public list exists."""
    made: Any = optimizer
    return bool(made._optimizer_step_pre_hooks or made._optimizer_step_post_hooks)


# --- the compiler


def import_compiler() -> None:
    """Import the compiler's front end, which torch otherwise loads at its first use."""
    import torch._dynamo  # noqa: F401


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Exclude a function from compilation, until ``torch.compiler.disable`` imports the compiler lazily."""
    return torch._disable_dynamo(function)


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """Return the call that ``module.compile()`` made, None without one, until a public attribute exists."""
    return getattr(module, "_compiled_call_impl", None)


def set_compiled_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Route a compiled module's calls through another function, until a public attribute exists."""
    module._compiled_call_impl = call


def with_activation_budget(share: float) -> AbstractContextManager[Any]:
    """Compile in this context with at most this share of activations saved, until ``torch.compile`` has an option."""
    import torch._functorch.config as config

    return config.patch(activation_memory_budget=share)


def without_recompilation_limit() -> AbstractContextManager[Any]:
    """Allow as many graphs of a function as it has shapes, until each compiled function has its own limit."""
    return torch._dynamo.utils.disable_cache_limit()


def graph_break_counts() -> dict[str, int]:
    """Count this process's graph breaks by torch's reason, until ``torch._dynamo.utils.counters`` is public."""
    from torch._dynamo.utils import counters

    return dict(counters["graph_break"])


# --- memory


def record_memory_history(max_entries: int | None) -> None:
    """Start recording the CUDA allocator's allocations, or stop with None; torch documents the private name."""
    memory = torch.get_device_module(CUDA).memory
    if max_entries is None:
        memory._record_memory_history(enabled=None)
    else:
        memory._record_memory_history(max_entries=max_entries)


def dump_memory_history(path: str) -> None:
    """Write the recording for https://pytorch.org/memory_viz; torch documents the private name."""
    torch.get_device_module(CUDA).memory._dump_snapshot(path)


# --- kernels of attention that return logarithms


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return attention and the logarithms of the sums of exponentials, (rows, heads, queries), on the CPU.

    Until ``F.scaled_dot_product_attention`` returns them.
    """
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal, scale=scale)


def flash_attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logarithm: Tensor,
    *,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value; output and logarithms may be those over more keys than these.

    Until it has a public name.
    """
    given = (gradient, query, key, value, output, logarithm, 0.0, is_causal)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, scale=scale)


def cuda_flash_attention(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute ``flash_attention`` on CUDA, in bf16 or fp16; logarithms are fp32. Until it has a public name."""
    given = (query, key, value, 0.0, is_causal, False)
    output, logarithm, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*given, scale=scale)
    return output, logarithm


def cuda_flash_attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logarithm: Tensor,
    *,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``flash_attention_backward`` on CUDA. Until it has a public name."""
    state, unused = (torch.empty(n, dtype=torch.uint64, device=query.device) for n in (2, 0))  # nothing is dropped out
    lengths = (None, None, query.shape[2], key.shape[2])  # rows are as long as each other
    given = (gradient, query, key, value, output, logarithm, *lengths, 0.0, is_causal, state, unused)
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(*given, scale=scale)


def efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute ``flash_attention`` by CUDA's memory-efficient kernel, also in fp32. Until it has a public name."""
    given = (query, key, value, None, True, 0.0, is_causal)
    output, logarithm, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(*given, scale=scale)
    return output, logarithm.narrow(2, 0, query.shape[2])


def efficient_attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logarithm: Tensor,
    *,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``flash_attention_backward`` by CUDA's memory-efficient kernel. Until it has a public name."""
    missing = -query.shape[2] % 32  # the kernel reads logarithms in runs of 32; of none, no exponential is left
    padded = torch.nn.functional.pad(logarithm, (0, missing), value=float("inf"))
    state = torch.empty((), dtype=torch.int64, device=query.device)  # nothing is dropped out
    given = (gradient, query, key, value, None, output, padded, state, state, 0.0, [True, True, True, False], is_causal)
    found = torch.ops.aten._scaled_dot_product_efficient_attention_backward(*given, scale=scale)
    return found[0], found[1], found[2]


def flex_operator() -> Any:
    """Return the operator that ``flex_attention`` calls above autograd. Until the function itself can be overridden."""
    return torch.ops.higher_order.flex_attention


def flex_score_is_plain(score_mod: Any) -> bool:
    """Return whether ``flex_attention`` was given no function of scores. Until its operator takes None."""
    from torch.nn.attention import flex_attention

    return score_mod is None or score_mod is flex_attention._identity


def is_asked_by_flex(frame: FrameType) -> bool:
    """Return whether a frame is that in which ``flex_attention`` refuses a backward on a CPU. Until it has one."""
    from torch.nn.attention import flex_attention

    return frame.f_code is flex_attention._validate_device.__code__
