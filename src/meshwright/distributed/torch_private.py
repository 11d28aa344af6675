"""Reach private parts of torch.distributed (DTensor, FSDP2, process groups), which no other module touches.

Each function names the public way that it waits for, or the release of torch with another one. The tests in
``tests/distributed/test_distributed_private.py`` exercise every one.
"""

from __future__ import annotations

import functools
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor, _collective_utils, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes

from meshwright.core.devices import CUDA

__all__ = ["DTensorSpec", "FSDPParam", "StridedShard", "TensorMeta"]


# --- DTensor


def local_part(tensor: Tensor) -> Tensor:
    """Return a DTensor's local tensor, outside autograd; any other tensor itself.

    Waits for: a public form. ``to_local`` records a node whose backward derives placements anew, and a subclass may
    change it.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def spec_of(tensor: DTensor) -> DTensorSpec:
    """Return mesh, placements and global shape as one value. Waits for: a public constructor of DTensor from them."""
    return tensor._spec


def forget_meshes() -> None:
    """Empty torch's caches of DTensor operations. Waits for: ``destroy_process_group`` doing so.

    The caches pass an old process group's equal meshes to tensors of the next one, and keep its threads.
    """
    for forget in (
        lambda: DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear(),  # type: ignore[attr-defined]
        lambda: torch._C._clear_DTensor_sharding_propagator_cache(),  # type: ignore[attr-defined]
        lambda: _redistribute.clear_redistribute_planner_cache(),
        lambda: _redistribute._gen_transform_infos.cache_clear(),
        lambda: _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear(),  # type: ignore[attr-defined]
    ):
        with suppress(AttributeError):  # another torch may keep them elsewhere
            forget()


def flattened(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Flatten a mesh's axes into one. Waits for: a public ``flatten``."""
    return mesh._flatten(name)


def ranks_in(mesh: DeviceMesh) -> Tensor:
    """Return a mesh's ranks as a tensor with values, also where new tensors are fake.

    Waits for: a mesh that answers in plain numbers.
    """
    with _disable_current_modes():
        return mesh.mesh


# --- process groups


def set_group_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """Set the time limit of a group's collectives; torch >= 2.14: ``set_timeout``."""
    c10d: Any = dist.distributed_c10d
    (getattr(c10d, "set_timeout", None) or c10d._set_pg_timeout)(timedelta(seconds=seconds), group)


@contextmanager
def other_groups() -> Iterator[None]:
    """Set all process groups aside, and restore them on exit; those made inside are forgotten.

    Waits for: worlds that are values, and not the state of a module.
    """
    c10d: Any = dist.distributed_c10d
    world = c10d._world
    tables = (
        world.pg_map,
        world.pg_names,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.tags_to_pg,
        world.pg_to_tag,
    )
    before, count, default = [dict(table) for table in tables], world.group_count, world.default_pg
    tags = {tag: list(groups) for tag, groups in world.tags_to_pg.items()}
    world.default_pg = None
    try:
        yield
    finally:
        for group, name in list(world.pg_names.items()):
            if group not in before[1]:
                c10d._unregister_process_group(name)
        for table, old in zip(tables, before, strict=True):
            table.clear()
            table.update(old)
        world.tags_to_pg.update(tags)
        world.group_count = count
        c10d._update_default_pg(default)


def silent_store() -> dist.Store:
    """Return a store for torch's fake backend, and register that backend. Waits for: a public form of both."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def finished_work(result: list[Tensor]) -> Any:
    """Return the work of a message that has ended. Waits for: a public constructor."""
    devices: list[int | str | torch.device] = [*{t.device for t in result if t.device.type != "cpu"}]
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=devices)
    future.set_result(result)
    from torch._C import _distributed_c10d

    made: Any = _distributed_c10d
    return made._create_work_from_future(future)


@contextmanager
def other_kernels(operators: str, kernels: Mapping[str, Callable[..., Any]], devices: Iterable[str]) -> Iterator[None]:
    """Replace the kernels of a namespace's operators on these devices. Waits for: a library that can be closed."""
    library = torch.library.Library(operators, "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(?s).*verriding a previously registered kernel")
        for device in devices:
            for name, kernel in kernels.items():
                library.impl(name, _unseen(kernel), torch._C._dispatch_key_for_device(device))
    try:
        yield
    finally:
        library._destroy()


def _unseen(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Hide a kernel's operators from autograd, which would count their writes."""

    @functools.wraps(kernel)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._AutoDispatchBelowADInplaceOrView():  # type: ignore[attr-defined]
            return kernel(*args, **kwargs)

    return run


def map_memory(group: dist.ProcessGroup) -> None:
    """Let ranks read each other's GPU memory, for torch's fused operators. Waits for: a public symmetric memory.

    Raises:
        ImportError, RuntimeError: the ranks cannot.
    """
    import torch.distributed._symmetric_memory as symmetric

    symmetric.get_symm_mem_workspace(group.group_name, min_size=1)


def knows_cpu(group: dist.ProcessGroup) -> bool:
    """Return whether a group has a backend for host memory. Waits for: a public list of a group's devices."""
    return "cpu" in {device.type for device in group._device_types}


def group_of_recorder(name: str) -> dist.ProcessGroup | None:
    """Find a group by its name in the flight recorder. Waits for: records that hold the ranks."""
    return next((group for group, known in dist.distributed_c10d._world.pg_names.items() if known == name), None)


def recorder_dumps() -> list[Callable[..., bytes]]:
    """List this build's flight recorder dumps; none before torch.distributed is imported. Waits for: public ones."""
    module = sys.modules.get("torch._C._distributed_c10d")
    found = (getattr(module, name, None) for name in ("_dump_fr_trace", "_dump_nccl_trace"))
    return [dump for dump in found if dump is not None]


# --- DDP


def has_recorded_graph(wrapped: DistributedDataParallel) -> bool:
    """Return whether DDP has seen the first backward of a static graph. Waits for: a public flag."""
    return wrapped._static_graph_delay_allreduce_enqueued


# --- FSDP2: modules


def _state(module: Any) -> Any:
    return module._get_fsdp_state()


def begin_forward(root: FSDPModule) -> None:
    """Set up the state that FSDP2 creates at the first forward. Waits for: a public set-up."""
    _state(root)._lazy_init()


def has_begun(root: FSDPModule) -> bool:
    """Return whether a forward has set up the state."""
    return _state(root)._is_root is not None


def begin_backward_at(root: FSDPModule, tensor: Tensor) -> None:
    """Start the root's backward at this tensor's gradient. Waits for: hooks for outputs that FSDP2 cannot search."""
    _state(root)._register_pre_backward_hook(tensor)


def end_backward(root: FSDPModule) -> None:
    """Run FSDP2's work after a last backward; torch >= 2.15: ``finalize_backward``."""
    state = _state(root)
    context: Any = state._state_ctx
    if getattr(context, "manual_backward_finalization_active", False) is None:  # torch >= 2.15 sets it in a backward
        context.manual_backward_finalization_active = context.manual_backward_finalization
    state._root_post_backward_final_callback()


def mixed_precision_of(module: FSDPModule) -> MixedPrecisionPolicy:
    """Return the policy that a module was sharded with. Waits for: a public attribute."""
    return _state(module)._mp_policy


# --- FSDP2: the groups of parameters that travel together


def groups_of_parameters(module: FSDPModule) -> list[Any]:
    """List a module's own groups, renamed in torch 2.12. Waits for: a public list."""
    state = _state(module)
    return list(getattr(state, "_fsdp_param_groups", None) or filter(None, [state._fsdp_param_group]))


def arriving(group: Any) -> Tensor | None:
    """Return the buffer into which a group's parameters are being gathered."""
    result = getattr(group, "_all_gather_result", None)
    return None if result is None else result.all_gather_output


def has_partial_sums(group: Any) -> bool:
    """Return whether a group holds gradients that are reduced within a replica only."""
    return group._partial_reduce_output is not None


def drop_partial_sums(group: Any) -> None:
    """Drop a group's gradients that are reduced within a replica only; torch >= 2.12: ``reset_iter_state``."""
    group._partial_reduce_output = None


# --- FSDP2: parameters


def let_fsdp_make(tensors: Callable[[Tensor, DTensorSpec], DTensor]) -> None:
    """Let FSDP2 make the DTensors of its shards, gathered parameters and gradients by ``tensors(local, spec)``.

    Waits for: FSDP2 keeping the class of a parameter that is a subclass of DTensor.
    """
    assert callable(getattr(_fsdp_param, "_from_local_no_grad", None)), "FSDP2 makes its DTensors elsewhere"
    _fsdp_param._from_local_no_grad = tensors


def gathered(parameter: Any) -> Tensor | None:
    """Return the whole parameter that forward and backward compute with; None before the first all-gather."""
    return getattr(parameter, "_unsharded_param", None)


def drop_accumulated(parameter: Any) -> None:
    """Drop a parameter's gradient of several microbatches, which torch >= 2.15 keeps at the gathered parameter alone.

    Waits for: ``reset_iter_state`` doing so, as torch documents.
    """
    if not isinstance(getattr(type(parameter), "unsharded_accumulated_grad", None), property):
        parameter.unsharded_accumulated_grad = None
    if (whole := gathered(parameter)) is not None:
        whole.grad = None


def layer_of(parameter: FSDPParam) -> tuple[nn.Module, str]:
    """Return the module that has a parameter, and its name in that module."""
    return parameter._module_info.module, parameter._module_info.param_name


def name_of(parameter: FSDPParam) -> str | None:
    """Return a parameter's path."""
    return parameter._param_fqn


def spec_of_gathered(parameter: FSDPParam) -> DTensorSpec | None:
    """Return the gathered parameter's layout on axes that cut it too; None if no axis does."""
    return parameter._unsharded_dtensor_spec


def padded_shard(parameter: FSDPParam) -> Tensor:
    """Return this rank's shard as it is gathered, padded to the size of the other ranks' shards."""
    return parameter._sharded_param_data.view(parameter.padded_sharded_param_size)


def gather_through(parameter: FSDPParam, extension: Any) -> None:
    """Let an object serve FSDP2's hooks on a parameter's shard (``fsdp_pre_all_gather``, ``fsdp_post_all_gather``).

    Waits for: extensions registered for a parameter. Today torch calls the shard itself, which would have to be a
    subclass of Tensor at rest.
    """
    parameter.__class__ = _GatheredThrough
    parameter.__dict__["_meshwright_extension"] = extension
    parameter._init_extensions()


class _GatheredThrough(FSDPParam):
    @property
    def _sharded_local_tensor(self) -> Any:
        return self.__dict__["_meshwright_extension"]


def occupy_stream(device: torch.device, seconds: float) -> None:
    """Keep a CUDA device's current stream busy without memory or products; elsewhere the host sleeps.

    Waits for: a public ``torch.cuda._sleep``.
    """
    if device.type != CUDA:
        time.sleep(seconds)
        return
    module = torch.get_device_module(device)
    with module.device(device):
        module._sleep(int(1000 * module.get_device_properties(device).clock_rate * seconds))  # the rate is in kHz
