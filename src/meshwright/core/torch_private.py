"""Access torch's private API.

``distributed/torch_private`` does so for tensors on meshes, FSDP2 and messages; nothing else does. The table of
``private_names`` says what needs each name, and which public API would replace it.
``tests/unit/test_torch_private.py`` exercises every function, so that another torch shows what it moved.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from .devices import CUDA
from .private_names import absent, found, found_or_none, needs

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves, tree_map
else:
    TorchDispatchMode = found("torch.utils._python_dispatch.TorchDispatchMode")
    tree_leaves, tree_map = found("torch.utils._pytree.tree_leaves"), found("torch.utils._pytree.tree_map")

# Looked up once: compiled code reaches what calls these.
_LEAVES_MODES = found_or_none("torch.utils._python_dispatch._disable_current_modes")
_FAKE = found_or_none("torch._subclasses.fake_tensor.FakeTensor")
_BACKWARD = found_or_none("torch._C._current_graph_task_id")

__all__ = ["EagerDispatchMode", "TorchDispatchMode", "tree_leaves", "tree_map"]

P = ParamSpec("P")
R = TypeVar("R")


class EagerDispatchMode(TorchDispatchMode):
    """A dispatch mode for code that is never compiled: torch wraps others by its compiler, which takes a second to
    import.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def without_modes() -> AbstractContextManager[Any]:
    """Leave all dispatch modes for a context."""
    if _LEAVES_MODES is None:
        raise absent("torch.utils._python_dispatch._disable_current_modes")
    return _LEAVES_MODES()


def by_values(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function about places and sizes outside of all dispatch modes: its tensors have values everywhere.

    Also where a model's have none, in a dry run.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if _LEAVES_MODES is None:  # right where there is no mode; in a dry run torch refuses to read values
            return function(*args, **kwargs)
        with _LEAVES_MODES():
            return function(*args, **kwargs)

    return run


def tree_map_only(kind: type, function: Callable[[Any], Any], tree: Any) -> Any:
    """Map a function over the leaves of a type in a nest of containers."""
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, kind) else leaf, tree)


def tree_map_with_path(function: Callable[[str, Any], Any], tree: Any) -> Any:
    """Map a function of (path, leaf) over a nest of containers; a path is written as code: "[0]['mask']"."""
    mapped = found("torch.utils._pytree.tree_map_with_path")
    return mapped(lambda path, leaf: function("".join(map(str, path)), leaf), tree)


def tensors_by_path(tree: Any) -> dict[str, Tensor]:
    """Return the tensors inside a nest of containers, by their paths in it."""
    found: dict[str, Any] = {}
    tree_map_with_path(found.__setitem__, tree)
    return {path: leaf for path, leaf in found.items() if isinstance(leaf, Tensor)}


SAMPLES_NORMAL = "_no_grad_trunc_normal_"
"""Name of torch.nn.init's function that redraws out-of-bounds numbers."""


def has_no_values(value: Any) -> bool:
    """Return whether a value is a tensor of a dry run."""
    return _FAKE is not None and isinstance(value, _FAKE)


def fake_mode(*, keeps_known: bool = False) -> FakeTensorMode:
    """Return a mode whose tensors have no values, and which a deep copy of a tensor shares.

    torch copies the mode with the tensor (``copy.deepcopy`` of a module, in a constructor); the copy then releases weak
    references to storages that it does not own, which corrupts the heap.

    Args:
        keeps_known: tensors of ``with_values``, and what follows from them alone, keep their values beside.
    """
    mode = found("torch._subclasses.fake_tensor.FakeTensorMode")(allow_non_fake_inputs=True)
    mode.__deepcopy__ = lambda memo: mode
    if keeps_known:  # torch keeps single numbers
        found("torch._subclasses.fake_tensor.FakeTensorMode.may_turn_const")
        mode.may_turn_const = lambda made: not has_no_values(made) and made.device.type != "meta"
    return mode


def with_values(tensor: Tensor) -> Tensor:
    """Return a tensor without memory of a mode that keeps known values, from one that has some."""
    return torch.ops.aten.lift_fresh.default(tensor)


@needs("torch.Tensor._version")
def version_of(tensor: Tensor) -> int:
    """Return the number of writes to a tensor."""
    return tensor._version


def wrapper(kind: type, like: Tensor, device: torch.device) -> Any:
    """Return a tensor of a subclass without storage, that has the sizes, strides and dtype of ``like``."""
    make = found("torch.Tensor._make_wrapper_subclass")
    return make(kind, like.shape, like.stride(), like.storage_offset(), dtype=like.dtype, device=device)


def without_subclass_functions() -> AbstractContextManager[Any]:
    """Call torch's functions in a context as if no subclass answered them; operators still reach the subclass."""
    return found("torch._C.DisableTorchFunctionSubclass")()


def schema_of(operator: Any) -> Any:
    """Return an operator's schema, None of other functions."""
    return getattr(operator, "_schema", None)


def is_grouped_product(operator: Any) -> bool:
    """Return whether an operator is that behind ``torch.nn.functional.grouped_mm``."""
    return operator is found("torch.ops.aten._grouped_mm").default


def foreach_zero_(tensors: list[Tensor]) -> None:
    """Zero many tensors in place."""
    found("torch._foreach_zero_")(tensors)


# --- autograd


def is_in_backward() -> bool:
    """Return whether this thread is in a backward (recomputation is)."""
    if _BACKWARD is None:
        raise absent("torch._C._current_graph_task_id")
    return _BACKWARD() != -1


@needs("torch.autograd.Variable._execution_engine")
def call_behind_backward(function: Callable[[], None]) -> None:
    """Call a function when the running backward has ended."""
    Variable._execution_engine.queue_callback(function)


@needs("torch.Tensor._backward_hooks")
def gradient_hooks(parameter: Tensor) -> list[Callable[..., Any]]:
    """List the hooks that ``register_hook`` registered."""
    return list((parameter._backward_hooks or {}).values())


@needs("torch.Tensor._post_accumulate_grad_hooks")
def accumulation_hooks(parameter: Tensor) -> list[Callable[..., Any]]:
    """List the hooks that ``register_post_accumulate_grad_hook`` registered."""
    return list((parameter._post_accumulate_grad_hooks or {}).values())


# --- modules


def modules_in(root: nn.Module) -> list[nn.Module]:
    """List what ``modules()`` yields, which makes a call for each level above each module: every step asks."""
    found: dict[nn.Module, None] = {}
    waiting: list[nn.Module | None] = [root]
    while waiting:
        if (module := waiting.pop()) is not None and module not in found:
            found[module] = None
            waiting += reversed(module._modules.values())
    return list(found)


def parameters_in(root: nn.Module) -> list[nn.Parameter]:
    """List what ``parameters()`` yields, by few calls."""
    return list({id(p): p for m in modules_in(root) for p in m._parameters.values() if p is not None}.values())


@needs("torch.nn.Module._non_persistent_buffers_set")
def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Return whether a buffer belongs to the state dict."""
    return buffer not in module._non_persistent_buffers_set


def resetting(module: nn.Module) -> Callable[[], object] | None:
    """Return ``reset_parameters`` or its private form (``nn.MultiheadAttention``, ``nn.Transformer``), else None."""
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def forward_hooks(module: nn.Module) -> tuple[dict[int, Callable[..., Any]], dict[int, Callable[..., Any]]]:
    """Return the mutable tables of a module's forward pre-hooks and hooks."""
    return module._forward_pre_hooks, module._forward_hooks


@needs("torch.optim.Optimizer._optimizer_step_pre_hooks", "torch.optim.Optimizer._optimizer_step_post_hooks")
def optimizer_has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether hooks are registered around an optimizer's step."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


# --- the compiler


def import_compiler() -> None:
    """Import the compiler's front end, which torch otherwise loads at its first use."""
    torch.compiler.disable(lambda: None)


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Exclude a function from compilation; ``torch.compiler.disable`` would import the compiler at once."""
    return getattr(torch, "_disable_dynamo", torch.compiler.disable)(function)


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """Return the call that ``module.compile()`` made, None without one."""
    return getattr(module, "_compiled_call_impl", None)


def set_compiled_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Route a compiled module's calls through another function."""
    module._compiled_call_impl = call


def with_activation_budget(share: float) -> AbstractContextManager[Any]:
    """Compile in this context with at most this share of activations saved."""
    return found("torch._functorch.config").patch(activation_memory_budget=share)


def without_recompilation_limit() -> AbstractContextManager[Any]:
    """Allow as many graphs of a function as it has shapes."""
    return found("torch._dynamo.utils.disable_cache_limit")()


def graph_break_counts() -> dict[str, int]:
    """Count this process's graph breaks by torch's reason."""
    return dict(found("torch._dynamo.utils.counters")["graph_break"])


# --- memory


@needs(f"torch.{CUDA}.memory._record_memory_history")
def record_memory_history(max_entries: int | None) -> None:
    """Start recording the CUDA allocator's allocations, or stop with None."""
    memory = torch.get_device_module(CUDA).memory
    if max_entries is None:
        memory._record_memory_history(enabled=None)
    else:
        memory._record_memory_history(max_entries=max_entries)


@needs(f"torch.{CUDA}.memory._dump_snapshot")
def dump_memory_history(path: str) -> None:
    """Write the recording for https://pytorch.org/memory_viz."""
    torch.get_device_module(CUDA).memory._dump_snapshot(path)


# --- kernels of attention that return logarithms


def flash_attention(*tensors: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return attention to (query, key, value) and the logarithms, (rows, heads, queries), of its sums, on the CPU."""
    kernel = found("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu")
    return kernel(*tensors, 0.0, is_causal, scale=scale)


def flash_attention_backward(*tensors: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value.

    Args:
        tensors: gradient, query, key, value, output and logarithms; the last two may be those over more keys.
    """
    kernel = found("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward")
    return kernel(*tensors, 0.0, is_causal, scale=scale)


def fuses_masked_groups(device: torch.device) -> bool:
    """Return whether fused attention takes a mask and fewer key heads; before 2.14 no kernel for CUDA is sure to."""
    return device.type != CUDA


def cuda_flash_attention(*tensors: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Compute ``flash_attention`` on CUDA, in bf16 or fp16; logarithms are fp32."""
    kernel = found("torch.ops.aten._scaled_dot_product_flash_attention")
    output, logarithm, *_ = kernel(*tensors, 0.0, is_causal, False, scale=scale)
    return output, logarithm


def cuda_flash_attention_backward(*tensors: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``flash_attention_backward`` on CUDA."""
    _, query, key, *_ = tensors
    state, unused = (torch.empty(n, dtype=torch.uint64, device=query.device) for n in (2, 0))  # nothing is dropped out
    lengths = (None, None, query.shape[2], key.shape[2])  # rows are as long as each other
    kernel = found("torch.ops.aten._scaled_dot_product_flash_attention_backward")
    return kernel(*tensors, *lengths, 0.0, is_causal, state, unused, scale=scale)


def efficient_attention(*tensors: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Compute ``flash_attention`` by CUDA's memory-efficient kernel, also in fp32."""
    kernel = found("torch.ops.aten._scaled_dot_product_efficient_attention")
    output, logarithm, *_ = kernel(*tensors, None, True, 0.0, is_causal, scale=scale)
    return output, logarithm.narrow(2, 0, tensors[0].shape[2])


def efficient_attention_backward(*tensors: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``flash_attention_backward`` by CUDA's memory-efficient kernel."""
    gradient, query, key, value, output, logarithm = tensors
    missing = -query.shape[2] % 32  # the kernel reads logarithms in runs of 32; of none, no exponential is left
    padded = torch.nn.functional.pad(logarithm, (0, missing), value=float("inf"))
    state = torch.empty((), dtype=torch.int64, device=query.device)  # nothing is dropped out
    given = (gradient, query, key, value, None, output, padded, state, state, 0.0, [True, True, True, False], is_causal)
    made = found("torch.ops.aten._scaled_dot_product_efficient_attention_backward")(*given, scale=scale)
    return made[0], made[1], made[2]


def flex_operator() -> Any:
    """Return the operator that ``flex_attention`` calls above autograd."""
    return torch.ops.higher_order.flex_attention


def flex_score_is_plain(score_mod: Any) -> bool:
    """Return whether ``flex_attention`` was given no function of scores."""
    return score_mod is None or score_mod is found("torch.nn.attention.flex_attention._identity")


def is_asked_by_flex(frame: FrameType) -> bool:
    """Return whether a frame is that in which ``flex_attention`` refuses a backward on a CPU."""
    check = found_or_none("torch.nn.attention.flex_attention._validate_device")
    return check is not None and frame.f_code is check.__code__
