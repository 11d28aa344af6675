"""Reach private parts of torch.distributed (DTensor, FSDP2, process groups), which no other module touches.

The table of ``meshwright.core.private_names`` says what needs each name, and which public way would replace it. The
tests in ``tests/distributed/test_distributed_private.py`` exercise every function.
"""

from __future__ import annotations

import functools
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel

from meshwright.core.devices import CUDA
from meshwright.core.private_names import found, found_or_none, needs
from meshwright.core.record import recall, remember
from meshwright.core.torch_private import by_values, modules_in

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
else:
    DTensorSpec = found("torch.distributed.tensor._dtensor_spec.DTensorSpec")
    TensorMeta = found("torch.distributed.tensor._dtensor_spec.TensorMeta")

__all__ = ["STRIDED", "DTensorSpec", "TensorMeta"]

_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState"
_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup"
_PARAMETER = "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam"

STRIDED: tuple[type[Shard], ...] = tuple(
    filter(None, [found_or_none("torch.distributed.tensor.placement_types._StridedShard")])
)
"""torch's placement of a dim that FSDP2 cuts after another axis did; empty where torch has none of its own."""

_WITHOUT_SUMS = (Shard, Replicate, *STRIDED)

_CACHED = type(functools.cache(len))

# --- DTensor


def local_part(tensor: Tensor) -> Tensor:
    """Return a DTensor's local tensor, outside autograd; any other tensor itself.

    ``to_local`` would record a node whose backward derives placements anew, and a subclass may change it.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def spec_of(tensor: DTensor) -> DTensorSpec:
    """Return mesh, placements and global shape as one value."""
    return tensor._spec


def shares_in_lists(values: Iterable[Any]) -> list[Any] | None:
    """Return the arguments of an operator on lists with local tensors for DTensors; None where shares do not suffice.

    They do if the DTensors at one place of all lists lie alike, without partial sums, beside nothing but numbers.
    """
    lists = [value for value in values if isinstance(value, (list, tuple)) and value]
    if any(isinstance(value, DTensor) for value in values):
        return None
    for place in zip(*lists, strict=True):
        first: Any = None
        has_plain = False
        for leaf in place:
            if type(leaf) is DTensor:
                if first is None:
                    first = leaf._spec
                elif (spec := leaf._spec) is not first and (
                    spec.placements != first.placements
                    or leaf.shape != first.tensor_meta.shape
                    or spec.mesh != first.mesh
                ):
                    return None
            elif isinstance(leaf, Tensor) and (leaf.dim() or isinstance(leaf, DTensor)):
                has_plain = True
        if first is not None and (has_plain or any(type(where) not in _WITHOUT_SUMS for where in first.placements)):
            return None
    return [
        [leaf._local_tensor if type(leaf) is DTensor else leaf for leaf in value]
        if isinstance(value, (list, tuple))
        else value
        for value in values
    ]


def forget_meshes() -> None:
    """Empty torch's caches of DTensor operations, which ``destroy_process_group`` leaves.

    They pass an old process group's equal meshes to tensors of the next one, and keep its threads.
    """
    for module in [m for name, m in sys.modules.items() if name.startswith("torch.distributed.tensor")]:
        for name, value in list(vars(module).items()):
            if name.startswith("clear_") and name.endswith("_cache"):
                value()
            for held in (value, *(vars(value).values() if isinstance(value, type) else ())):
                cached = getattr(held, "__func__", held) if isinstance(held, staticmethod) else held
                if isinstance(cached, _CACHED):
                    cached.cache_clear()
    if (rules := found_or_none("torch.distributed.tensor.DTensor._op_dispatcher")) is not None:
        rules.sharding_propagator.propagate_op_sharding.cache_clear()
    if (clear := found_or_none("torch._C._clear_DTensor_sharding_propagator_cache")) is not None:
        clear()


@needs("torch.distributed.device_mesh.DeviceMesh._flatten")
def flattened(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Flatten a mesh's axes into one."""
    return mesh._flatten(name)


@by_values
def ranks_in(mesh: DeviceMesh) -> Tensor:
    """Return a mesh's ranks as a tensor with values, also where new tensors are fake."""
    return mesh.mesh


# --- process groups


def set_group_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """Set the time limit of a group's collectives; torch >= 2.14: ``set_timeout``."""
    public = getattr(dist.distributed_c10d, "set_timeout", None)
    (public or found("torch.distributed.distributed_c10d._set_pg_timeout"))(timedelta(seconds=seconds), group)


@contextmanager
def other_groups() -> Iterator[None]:
    """Set all process groups aside, and restore them on exit; those made inside are destroyed."""
    world, update_default = (found(f"torch.distributed.distributed_c10d.{x}") for x in ("_world", "_update_default_pg"))
    before, count, default = set(world.pg_names), world.group_count, world.default_pg
    world.default_pg = None
    try:
        yield
    finally:
        update_default(default)
        for group in [group for group in world.pg_names if group not in before]:
            dist.destroy_process_group(group)
        world.group_count = count


def silent_store() -> dist.Store:
    """Return a store for torch's fake backend, and register that backend."""
    return found("torch.testing._internal.distributed.fake_pg").FakeStore()


def finished_work(result: list[Tensor]) -> Any:
    """Return the work of a message that has ended, as a kernel returns it."""
    devices: list[int | str | torch.device] = [*{t.device for t in result if t.device.type != "cpu"}]
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=devices)
    future.set_result(result)
    return found("torch._C._distributed_c10d._create_work_from_future")(future).boxed()


@contextmanager
def other_kernels(operators: str, kernels: Mapping[str, Callable[..., Any]], devices: Iterable[str]) -> Iterator[None]:
    """Replace the kernels of a namespace's operators on these devices."""
    guard = found("torch._C._AutoDispatchBelowADInplaceOrView")

    def unseen(kernel: Callable[..., Any]) -> Callable[..., Any]:
        """Hide a kernel's operators from autograd, which would count their writes."""

        @functools.wraps(kernel)
        def run(*args: Any, **kwargs: Any) -> Any:
            with guard():
                return kernel(*args, **kwargs)

        return run

    library = torch.library.Library(operators, "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(?s).*verriding a previously registered kernel")
        for name, kernel in kernels.items():
            torch.library.impl(f"{operators}::{name}", tuple(devices), unseen(kernel), lib=library)
    try:
        yield
    finally:
        del library  # its finalizer takes the kernels back


def map_memory(group: dist.ProcessGroup) -> None:
    """Let ranks read each other's GPU memory, for torch's fused operators."""
    found("torch.distributed._symmetric_memory").get_symm_mem_workspace(group.group_name, min_size=1)


def group_of_recorder(name: str) -> dist.ProcessGroup | None:
    """Find a group by its name in the flight recorder."""
    world = found("torch.distributed.distributed_c10d._world")
    return next((group for group, known in world.pg_names.items() if known == name), None)


def recorder_dumps() -> list[Callable[..., bytes]]:
    """List this build's flight recorder dumps; none before torch.distributed is imported."""
    if "torch._C._distributed_c10d" not in sys.modules:
        return []
    known = ("_dump_fr_trace", "_dump_nccl_trace")
    dumps = (found_or_none(f"torch._C._distributed_c10d.{name}") for name in known)
    return [dump for dump in dumps if dump is not None]


# --- DDP


@needs("torch.nn.parallel.DistributedDataParallel._static_graph_delay_allreduce_enqueued")
def has_recorded_graph(wrapped: DistributedDataParallel) -> bool:
    """Return whether DDP has seen the first backward of a static graph."""
    return wrapped._static_graph_delay_allreduce_enqueued


# --- FSDP2: modules


@needs("torch.distributed.fsdp.FSDPModule._get_fsdp_state")
def _state(module: Any) -> Any:
    return module._get_fsdp_state()


def base_of(x: Tensor) -> Tensor | None:
    """Return the tensor of which autograd takes another for a view; None where it is none."""
    return x._base


def as_no_view(x: Tensor, shape: Any) -> Tensor:
    """Return a tensor in a shape, and no view to autograd; nothing else may use its memory."""
    return torch.ops.aten._unsafe_view(x, shape)


@needs(f"{_STATE}._lazy_init")
def begin_forward(root: FSDPModule) -> None:
    """Set up the state that FSDP2 creates at the first forward."""
    _state(root)._lazy_init()


@needs(f"{_STATE}._is_root")
def has_begun(root: FSDPModule) -> bool:
    """Return whether a forward has set up the state."""
    return _state(root)._is_root is not None


@needs(f"{_STATE}._register_pre_backward_hook")
def begin_backward_at(module: FSDPModule, output: Any) -> None:
    """Start a unit's backward at the gradients of these tensors, at which FSDP2 would not."""
    _state(module)._register_pre_backward_hook(output)


@needs(f"{_STATE}._state_ctx", f"{_STATE}._root_post_backward_final_callback")
def end_backward(root: FSDPModule) -> None:
    """Run FSDP2's work after a last backward; torch >= 2.15: ``finalize_backward``."""
    state = _state(root)
    context: Any = state._state_ctx
    if getattr(context, "manual_backward_finalization_active", False) is None:  # torch >= 2.15 sets it in a backward
        context.manual_backward_finalization_active = context.manual_backward_finalization
    state._root_post_backward_final_callback()


class Units(dict[Any, list[Any]]):
    """The first module of each unit, with torch's groups of its parameters; ``modules``: all that are sharded."""

    modules: Sequence[FSDPModule] = ()

    def __reduce__(self) -> Any:
        return Units, ()  # a copy of the model has units of its own


def units_of(model: nn.Module) -> Units:
    """Return a model's units in module order; they are looked for again where other modules are sharded than before."""
    modules = [module for module in modules_in(model) if isinstance(module, FSDPModule)]
    known = (recall(model, Units) if modules else None) or Units()
    if list(known.modules) != modules:
        found: dict[int, FSDPModule] = {}
        for module in modules:
            found.setdefault(id(_state(module)), module)
        known = Units((module, groups_of_parameters(module)) for module in found.values())
        known.modules = modules
        remember(model, known)
    return known


@needs(f"{_STATE}._mp_policy")
def mixed_precision_of(module: FSDPModule) -> MixedPrecisionPolicy:
    """Return the policy that a module was sharded with."""
    return _state(module)._mp_policy


# --- FSDP2: the groups of parameters that travel together


@needs(f"{_STATE}._fsdp_param_group")
def groups_of_parameters(module: FSDPModule) -> list[Any]:
    """List a module's own groups, renamed in torch 2.12."""
    state = _state(module)
    groups = getattr(state, "_fsdp_param_groups", None)
    return list(filter(None, [state._fsdp_param_group])) if groups is None else list(groups)


@needs(f"{_GROUP}._all_gather_result")
def arriving(group: Any) -> Tensor | None:
    """Return the buffer into which a group's parameters are being gathered."""
    result = group._all_gather_result
    return None if result is None else result.all_gather_output


@needs(f"{_GROUP}._partial_reduce_output")
def has_partial_sums(group: Any) -> bool:
    """Return whether a group holds gradients that are reduced within a replica only."""
    return group._partial_reduce_output is not None


def drop_partial_sums(group: Any) -> None:
    """Drop a group's gradients that are reduced within a replica only; torch >= 2.12: ``reset_iter_state``."""
    group._partial_reduce_output = None


# --- FSDP2: parameters


def let_fsdp_make(tensors: Callable[[Tensor, DTensorSpec], DTensor]) -> None:
    """Let FSDP2 make the DTensors of its shards, gathered parameters and gradients by ``tensors(local, spec)``.

    By itself FSDP2 does not keep the class of a parameter that is a subclass of DTensor.
    """
    found("torch.distributed.fsdp._fully_shard._fsdp_param._from_local_no_grad")
    module: Any = sys.modules["torch.distributed.fsdp._fully_shard._fsdp_param"]
    module._from_local_no_grad = tensors


def gathered(parameter: Any) -> Tensor | None:
    """Return the whole parameter that forward and backward compute with; None before the first all-gather."""
    return getattr(parameter, "unsharded_param", None)


def drop_accumulated(parameter: Any) -> None:
    """Drop a parameter's gradient of several microbatches, which torch >= 2.15 keeps at the gathered parameter alone.

    torch documents that ``reset_iter_state`` does so, and it does not.
    """
    if not isinstance(getattr(type(parameter), "unsharded_accumulated_grad", None), property):
        parameter.unsharded_accumulated_grad = None
    if (whole := gathered(parameter)) is not None:
        whole.grad = None


def cuts_beside(parameter: Any) -> list[tuple[Any, dist.ProcessGroup]]:
    """List the placement on each axis beside FSDP2's own that a sharded parameter lies on, with its group."""
    shard: DTensor = parameter.sharded_param
    axes = range(parameter.mesh_info.mesh.ndim, shard.device_mesh.ndim)
    return [(shard.placements[axis], shard.device_mesh.get_group(axis)) for axis in axes]


def padded_shard(parameter: Any) -> Tensor:
    """Return this rank's shard as it is gathered, padded to the size of the other ranks' shards."""
    shard = local_part(parameter.sharded_param).detach()
    wanted = zip(parameter.padded_sharded_param_size, shard.shape, strict=True)
    lacking = [whole - own for whole, own in wanted]
    return pad(shard, [end for size in reversed(lacking) for end in (0, size)]) if any(lacking) else shard


@needs(f"{_PARAMETER}._init_extensions")
def gather_through(parameter: Any, extension: Any) -> None:
    """Let an object serve FSDP2's hooks on a parameter's shard (``fsdp_pre_all_gather``, ``fsdp_post_all_gather``).

    torch calls the shard itself, which would have to be a subclass of Tensor at rest.
    """
    parameter.__class__ = _gathered_through()
    parameter.__dict__["_meshwright_extension"] = extension
    parameter._init_extensions()


@functools.cache
def _gathered_through() -> type:
    kind: Any = found(_PARAMETER)
    found(f"{_PARAMETER}._sharded_local_tensor")

    class GatheredThrough(kind):
        @property
        def _sharded_local_tensor(self) -> Any:
            return self.__dict__["_meshwright_extension"]

    return GatheredThrough


@needs(f"torch.{CUDA}._sleep")
def occupy_stream(device: torch.device, seconds: float) -> None:
    """Keep a CUDA device's current stream busy without memory or products; elsewhere the host sleeps."""
    if device.type != CUDA:
        time.sleep(seconds)
        return
    module = torch.get_device_module(device)
    with module.device(device):
        module._sleep(int(1000 * module.get_device_properties(device).clock_rate * seconds))  # the rate is in kHz


@needs("torch.distributed.distributed_c10d._get_default_store")
def default_store() -> dist.Store:
    """Return the store in which the ranks of the default group met."""
    return dist.distributed_c10d._get_default_store()
