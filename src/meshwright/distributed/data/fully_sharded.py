"""Apply fully sharded data parallelism (FSDP2), also hybrid (HSDP): ZeRO-3 (arXiv 1910.02054) by fully_shard.

torch packs a unit's existing gradients in order: ranks that used other parameters would sum gradients of different
ones. So missing gradients are filled with zeros before the reduction, and after the backward the ranks agree on the
parameters that any rank used. An unused one gets no gradient, as in one process, where an optimizer skips it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from meshwright.core.axes import Axis
from meshwright.core.devices import is_accelerator
from meshwright.core.dtypes import torch_dtype
from meshwright.core.errors import ConfigError, NonFiniteError
from meshwright.core.names import clean, is_within
from meshwright.core.record import recall
from meshwright.core.torch_private import (
    call_behind_backward,
    has_no_values,
    is_in_backward,
    tree_leaves,
    tree_map,
    uncompiled,
)
from meshwright.distributed import torch_private
from meshwright.distributed.mesh import axis_sizes, data_groups, get_expert_mesh, replica_axis, sharding_axis
from meshwright.distributed.process import agree
from meshwright.distributed.process.agree import word_device
from meshwright.distributed.products import gather_in_float8
from meshwright.distributed.torch_private import (
    as_no_view,
    base_of,
    gathered,
    has_partial_sums,
    local_part,
    units_of,
)
from meshwright.introspection.signature import with_logits
from meshwright.planning.experts import ExpertPlan
from meshwright.planning.layout import sharded_dim
from meshwright.planning.plan import Plan
from meshwright.planning.values import DataParallel, PrecisionPlan, Unit


def apply(model: nn.Module, plan: Plan, device_mesh: DeviceMesh) -> nn.Module:
    """Shard every unit of the plan, then the root, in place; ``model`` may be on meta."""
    shards, replicas = sharding_axis(device_mesh, plan.shares.shard_axes), replica_axis(device_mesh, plan.shares)
    if shards is None:
        there = tuple(axis_sizes(device_mesh))
        raise ConfigError(f"fully_shard needs a mesh axis named dp_shard (size 1 will do); the mesh has {there}")
    mesh = shards if replicas is None else device_mesh[(*replicas.mesh_dim_names, *shards.mesh_dim_names)]  # type: ignore[misc]
    shared: dict[str, Any] = {"mesh": mesh, "offload_policy": _offload(plan)}
    placement = partial(_placement, shards=plan.shares.shards)
    if any(placement(parameter).dim for parameter in model.parameters() if parameter.dim() > 2):
        shared["shard_placement_fn"] = placement
    names = {unit.name for unit in plan.units}
    for unit in reversed(plan.units):  # torch wraps what is inside first
        if unit.experts:
            _shard_experts(model, unit, plan, device_mesh)
        elif unit.name and not plan.data.own_units:
            is_inside = any(name and name != unit.name and is_within(unit.name, name) for name in names)
            modules = [model.get_submodule(path) for path in unit.blocks or (unit.name,)]
            for module in modules:
                module.register_forward_hook(_without_views, with_kwargs=True)
            own = policy(plan.precision, unit)
            fully_shard(
                modules if len(modules) > 1 else modules[0],  # type: ignore[arg-type]
                reshard_after_forward=unit.reshard_after_forward,
                mp_policy=replace(own, cast_forward_inputs=False) if is_inside or unit.outside_blocks else own,
                **shared,
            )
            for module in modules[:-1]:  # torch gathers again where a gradient reaches the last of them
                module.register_forward_hook(_gather_before_backward)
            if unit.reshard_after_forward and not unit.gathers_in_backward:
                # torch's prefetch would gather frozen blocks that no gradient reaches
                cast(FSDPModule, modules[0]).set_unshard_in_backward(False)
    root = next((unit for unit in plan.units if not unit.name), None)
    if plan.data.own_units:
        blocks = [unit for unit in plan.units if not unit.outside_blocks]
        reshard = next((unit.reshard_after_forward for unit in blocks), False)
        own = policy(plan.precision, root)
        cast(Any, model).fully_shard(reshard_after_forward=reshard, mp_policy=own, **shared)
    for module in sharded_modules(model) if plan.data.own_units else ():
        cast(nn.Module, module).register_forward_hook(_without_views, prepend=True, with_kwargs=True)
    model.register_forward_hook(_without_views, with_kwargs=True)
    output = torch_dtype(plan.precision.output) if plan.precision.output else None
    whole = replace(policy(plan.precision, root), output_dtype=output)  # a block's output is not the model's
    fully_shard(model, reshard_after_forward=False, mp_policy=whole, **shared)

    def see_into_output(root: Any, inputs: tuple, output: Any) -> None:
        """Start the root's backward from the logits of a user-defined output object, in which torch finds no tensor."""
        logits = None if isinstance(output, Tensor) else getattr(output, "logits", None)
        if isinstance(logits, Tensor):
            begin_backward_at(root, logits)

    model.register_forward_hook(see_into_output)
    if plan.float8 is not None and plan.float8.all_gather and plan.shares.shards > 1:
        gather_in_float8(model, [parameter for group in parameter_groups(model) for parameter in group.fsdp_params])
    for module in sharded_modules(model):
        if plan.data.reduction == "sum":
            # gloo has no pre-multiplied sum, and torch wants both settings on every module, not on the root alone
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    if is_accelerator(plan.device):
        # The next units are gathered while one computes. Inside blocks only stacks of experts are: the backward order
        # of several units there is not known, and one that was done already would be gathered again.
        found = {name: module for name, module in _named_units(model) if name}
        stacks = {unit.name for unit in plan.units if unit.experts}
        small = {n for n in found if any(n != other and is_within(n, other) for other in found)}
        forward, backward = prefetched([name for name in found if name not in small or clean(name) in stacks])
        for name, module in found.items():
            module.set_modules_to_forward_prefetch([found[other] for other in forward.get(name, [])])
            # itself, where there is none: with an empty list torch takes the unit that it met before, needed or not
            module.set_modules_to_backward_prefetch([found[other] for other in backward.get(name, [])] or [module])
    return model


def _placement(parameter: nn.Parameter, shards: int) -> Shard:
    """Return how a parameter of the whole model, or a tensor rank's part of one, is cut."""
    placed = parameter.placements if isinstance(parameter, DTensor) else ()
    return Shard(sharded_dim(parameter.shape, shards) if all(place.is_replicate() for place in placed) else 0)


def _shard_experts(model: nn.Module, unit: Unit, plan: Plan, device_mesh: DeviceMesh) -> None:
    """Shard a stack that holds this rank's share of the expert axis; its inputs have their dtypes already."""
    experts, mesh = plan.experts, get_expert_mesh(device_mesh)
    assert experts is not None
    if recall(model, ExpertPlan) is None:
        raise ConfigError(
            f"the mesh has ep = {experts.ranks}, and the experts of {unit.name} are whole on every rank: nothing"
            f" would add up their gradients. Call apply_expert_parallel (or the transform expert_parallel) before, or"
            f" make the mesh with ep = 1."
        )
    if mesh is None:
        raise ConfigError(
            f"the experts of {unit.name} are shared out over ep = {experts.ranks}, and the mesh that was given"
            f" ({', '.join(axis_sizes(device_mesh))}) does not know that axis: a part of a mesh is another mesh. Give"
            " all of it, as init_distributed made it."
        )
    replicas = (Axis.DP_REPLICATE.value,) if axis_sizes(mesh)[Axis.DP_REPLICATE.value] > 1 else ()
    made = fully_shard(
        model.get_submodule(unit.name),
        mesh=mesh[(*replicas, Axis.EFSDP.value)],
        reshard_after_forward=unit.reshard_after_forward,
        mp_policy=replace(policy(plan.precision, unit), cast_forward_inputs=False),
        offload_policy=_offload(plan),
        shard_placement_fn=lambda parameter: Shard(experts.sharded_dim(tuple(parameter.shape))),
    )
    if unit.reshard_after_forward and not unit.gathers_in_backward:
        made.set_unshard_in_backward(False)
    made.set_force_sum_reduction_for_comms(True)  # for a mean, each rank computes its part already
    made.set_gradient_divide_factor(1.0)


@uncompiled
def _gather_before_backward(module: nn.Module, inputs: tuple, output: Any) -> None:
    """Let a unit of several blocks be gathered by the first gradient that reaches any of them."""
    torch_private.begin_backward_at(cast(FSDPModule, module), output)


@uncompiled
def _without_views(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    """Return outputs that are no views, before FSDP2 hangs a unit's backward on them.

    A write into a view drops FSDP2's hook, so that the weights are not there when they are needed; on a view that was
    written to before, torch 2.13 ends the process. Views of inputs and of parameters stay what they are: others use
    these.
    """
    if isinstance(output, Tensor) and base_of(output) is None:
        return output
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    others = {id(each) for leaf in given for each in (leaf, base_of(leaf))}

    def own(leaf: Any) -> Any:
        base = base_of(leaf) if isinstance(leaf, Tensor) else None
        return leaf if base is None or base.is_leaf or id(base) in others else as_no_view(leaf, leaf.shape)

    logits = getattr(output, "logits", None)  # of an object into which tree_map does not look
    if isinstance(logits, Tensor) and own(logits) is not logits:
        output = with_logits(output, own(logits))
    return tree_map(own, output)


def begin_backward_at(root: Any, tensor: Tensor) -> None:
    """Start a root's backward from a tensor that torch misses in its output; do nothing if it is not sharded."""
    if isinstance(root, FSDPModule) and tensor.requires_grad:
        torch_private.begin_backward_at(root, tensor)


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """List a module of each unit, its first, in module order."""
    return list(units_of(model))


def policy(precision: PrecisionPlan, unit: Unit | None) -> MixedPrecisionPolicy:
    """Build torch's policy for a unit's dtypes; empty where nothing is mixed, so that torch casts nothing."""
    reduced_in = precision.reduce if unit is None else precision.reduced_in(unit.dtype)
    if not precision.casts:
        return MixedPrecisionPolicy(reduce_dtype=torch_dtype(reduced_in))
    if not precision.is_mixed:
        return MixedPrecisionPolicy()
    dtypes = torch_dtype(precision.compute), torch_dtype(reduced_in)
    return MixedPrecisionPolicy(*dtypes, cast_forward_inputs=precision.cast_forward_inputs)


def _named_units(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the first module of each unit, with its path."""
    units = units_of(model)
    yield from ((name, module) for name, module in (model.named_modules() if units else ()) if module in units)


@contextmanager
def accumulation(model: nn.Module, data: DataParallel, is_last: bool) -> Iterator[None]:
    """Communicate gradients only as ``data`` requests; restore the default afterwards, also after an exception.

    Parameters that ``data`` keeps gathered through a step are freed by the backward of its last microbatch, before
    anything can change the weights.
    """
    asked = True, data.gathers_per_step, data.sync_grad_accum is False, data.sync_grad_accum is not True
    try:
        _set_backward(model, [is_last if each else None for each in asked])
        yield
    except BaseException:
        recover(model)
        raise
    finally:
        if not is_last:
            _set_backward(model)


@contextmanager
def postponing(model: nn.Module, plan: Plan) -> Iterator[None]:
    """Let forwards and backwards of several microbatches follow in any order, without reducing gradients.

    Gradients stay whole until ``reduce_gradients``, and so do units that the plan does not free after a forward.
    """
    frees = {unit.name for unit in plan.units if unit.reshard_after_forward}
    for name, module in _named_units(model):
        module.set_reshard_after_backward(clean(name) in frees, recurse=False)
    _set_backward(model, (False, None, False, False))
    try:
        yield
    except BaseException:
        recover(model)
        raise
    finally:
        _set_backward(model)


def _set_backward(model: nn.Module, wanted: Sequence[bool | None] = (True,) * 4) -> None:
    """Set whether the next backward is the last, and whether it frees, reduces and sums over replicas (None: leave)."""
    is_last, frees, reduces, all_reduces = wanted
    for number, (module, groups) in enumerate(units_of(model).items()):
        if number == 0 and is_last is not None:
            module.set_is_last_backward(is_last)  # all units share it with the root
        for group in groups:
            if frees not in (None, group.reshard_after_backward):
                module.set_reshard_after_backward(frees, recurse=False)
            if reduces not in (None, group.reduce_grads):
                module.set_requires_gradient_sync(reduces, recurse=False)
            if all_reduces not in (None, group.all_reduce_grads):
                module.set_requires_all_reduce(all_reduces, recurse=False)


def reduce_gradients(model: nn.Module) -> None:
    """Reduce the postponed gradients, last blocks first, as torch does after a last backward."""
    _set_backward(model)
    _reduce_now(model)


def reduce_between(model: nn.Module, plan: Plan) -> None:
    """Reduce the gradients postponed so far, inside ``postponing``, where more microbatches follow."""
    _set_backward(model, (None, None, True, plan.data.sync_grad_accum != "shard"))
    _reduce_now(model)
    _set_backward(model, (None, None, False, False))


def _reduce_now(model: nn.Module) -> None:
    first, *others = units_of(model).values() or [[]]
    for group in chain(*reversed(others), first):
        group.post_backward()
    for module in sharded_modules(model)[:1]:
        torch_private.end_backward(module)


def parameter_groups(model: nn.Module) -> list[Any]:
    """List torch's own parameter groups, of all units of a model."""
    return [group for groups in units_of(model).values() for group in groups]


def recover(model: nn.Module) -> None:
    """Reset torch's per-iteration state after a forward or backward that raised; the step's gradients are lost."""
    for module in sharded_modules(model)[:1]:
        if torch_private.has_begun(module) and hasattr(module, "reset_iter_state"):  # torch >= 2.12
            module.reset_iter_state()
    for group in parameter_groups(model):
        torch_private.drop_partial_sums(group)
        for parameter in group.fsdp_params:
            torch_private.drop_accumulated(parameter)
    reshard(model)


def reshard(model: nn.Module) -> None:
    """Free gathered parameters, which would be stale after the next optimizer step if no backward follows."""
    for group in parameter_groups(model):
        if not group.is_sharded:
            group.reshard()


def _offload(plan: Plan) -> OffloadPolicy:
    return CPUOffloadPolicy(pin_memory=plan.data.pin_memory) if plan.data.cpu_offload else OffloadPolicy()


def prefetched(units: list[str]) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return the units to gather while each one computes in forward and in backward, from all in module order.

    A unit inside another always comes after it. In forward the outermost one gathers the next block, not the last one
    inside: the forward of that runs again where activations are recomputed, when the next block has had its backward.
    """
    together: list[list[str]] = []
    for name in units:
        if together and is_within(name, together[-1][0]):
            together[-1].append(name)
        else:
            together.append([name])
    forward: dict[str, list[str]] = {name: [] for name in units}
    backward: dict[str, list[str]] = {name: [] for name in units}
    for names in together:
        for this, following in pairwise(names):
            forward[this].append(following)
    for this, following in pairwise(together):
        forward[this[0]].append(following[0])
    for this, following in pairwise(name for names in reversed(together) for name in names):
        backward[this].append(following)
    return forward, backward


# --- handle gradients of parameters that, by their rows, some ranks use and others do not, under fully_shard


def fill(model: nn.Module, plan: Plan, device_mesh: DeviceMesh) -> None:
    """Fill in gradients for the plan's idle parameters of a model whose units are sharded."""
    names = {id(parameter): clean(name) for name, parameter in model.named_parameters()}
    watched = [
        (group, parameter)
        for group in parameter_groups(model)
        for parameter in group.fsdp_params
        if names.get(id(parameter.sharded_param)) in plan.data.idle
    ]
    if watched:
        usage = _Usage([parameter for _, parameter in watched], data_groups(device_mesh))
        for group in dict.fromkeys(group for group, _ in watched):
            usage.watch(group, [parameter for other, parameter in watched if other is group])


class _Usage:
    """Tracks the parameters that got a gradient on this rank; the ranks agree on them after each reducing backward."""

    def __init__(self, parameters: Sequence[Any], groups: list[dist.ProcessGroup]):
        self.parameters, self.groups = parameters, groups
        self.used = {id(parameter): False for parameter in parameters}
        self._is_waiting = False

    def watch(self, group: Any, parameters: list[Any]) -> None:
        """Let a unit fill in missing gradients of these parameters before it reduces its gradients."""
        reduce = group.post_backward

        def post_backward(*unused: Any) -> None:
            if group.reduce_grads:
                for parameter in parameters:
                    whole, gradient = gathered(parameter), parameter.unsharded_accumulated_grad
                    has_gradient = gradient is not None or (whole is not None and whole.grad is not None)
                    begins = parameter.sharded_param.grad is None and not has_partial_sums(group)
                    self.used[id(parameter)] = has_gradient or (self.used[id(parameter)] and not begins)
                    if not has_gradient and whole is not None:
                        whole.grad = torch.zeros_like(whole)
                if group.all_reduce_grads and is_in_backward() and not self._is_waiting:
                    self._is_waiting = True
                    call_behind_backward(self.agree)
            reduce(*unused)
            if group.reduce_grads and group.all_reduce_grads and not is_in_backward():  # of a pipeline's stage
                self.agree()

        group.post_backward = post_backward

    def agree(self) -> None:
        """Take the zeros of parameters that no rank used away again (collective)."""
        self._is_waiting = False
        own = [self.used[id(parameter)] for parameter in self.parameters]
        words = torch.tensor(own, dtype=torch.int64, device=word_device())
        for group in self.groups:
            dist.all_reduce(words, op=dist.ReduceOp.MAX, group=group)
        every = own if has_no_values(words) else words.tolist()  # a dry run has no peers
        for parameter, used in zip(self.parameters, every, strict=True):
            self.used[id(parameter)] = bool(used)
            if not used:
                parameter.sharded_param.grad = None


class GradientCheck:
    """Raises, on all ranks after a backward that ``groups`` run, if a gradient that it reduces is not finite on any.

    Gradients of a microbatch that wait for the next one are not checked: an error in them is in the sum.
    """

    def __init__(self, model: nn.Module, groups: list[dist.ProcessGroup]):
        self.groups, self._waits = groups, False
        model.register_forward_hook(self._begin)

    def _begin(self, model: nn.Module, inputs: tuple, output: Any) -> None:
        """Hook the output after FSDP2's own hooks, so that gradients are reduced before the check."""
        self._waits = False
        if not torch.is_grad_enabled():
            return
        leaves = [*tree_leaves(output), getattr(output, "logits", None)]
        tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad}
        if not tensors:
            raise ConfigError(
                f"check_for_nan_in_grad = True: {type(model).__name__} returns a {type(output).__name__}, in which no"
                " tensor is found whose backward could be waited for. Return logits (or an object with .logits), or set"
                " it to False."
            )

        def check() -> None:
            self._waits = False
            named = [(clean(name), p) for name, p in model.named_parameters() if p.requires_grad]
            if not named or not all(group.reduce_grads and group.all_reduce_grads for group in parameter_groups(model)):
                return  # of a microbatch, whose gradients are not summed over all data ranks yet
            none = torch.zeros((), device=named[0][1].device)
            gradients = [none if p.grad is None else local_part(p.grad) for _, p in named]
            words = agree.total(torch.stack([(~each.isfinite().all()).long() for each in gradients]), self.groups)
            if wrong := [name for (name, _), count in zip(named, words.tolist(), strict=True) if count]:
                more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
                raise NonFiniteError(
                    f"check_for_nan_in_grad: the gradient of {', '.join(wrong[:4])}{more} is NaN or infinite. The"
                    f" optimizer has not stepped."
                )

        def wait_for_the_end(gradient: Tensor) -> None:
            if not self._waits:
                self._waits = True
                call_behind_backward(check)

        for tensor in tensors.values():
            tensor.register_hook(wait_for_the_end)
