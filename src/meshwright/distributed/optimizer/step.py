"""Step an optimizer by its plan: of the requested kind, with its state in the requested memory."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from weakref import ReferenceType, WeakSet, ref

import torch
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from meshwright.core import readers
from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.core.torch_private import EagerDispatchMode, has_no_values
from meshwright.distributed.averaging import ScheduleFreeAdamW
from meshwright.distributed.torch_private import local_part, shares_in_lists
from meshwright.distributed.weights.parts_tensor import WHOLE_LISTS
from meshwright.distributed.weights.shards import with_local
from meshwright.planning.optimizer import OptimizerPlan

from . import low_bit
from .grad_clip import are_of_stages
from .low_bit import TorchaoAdamW
from .muon import Lion, Muon

SMALLEST = 2.0**-14
LARGEST = 2.0**24
INTERVAL = 2000


@dataclass
class LossScale:
    """The factor of a step's loss, by which the gradients are divided when they are whole.

    The scale is halved after a step whose gradients are not finite, and doubled after ``interval`` finite steps in a
    row. All ranks agree, since finiteness follows from a sum over them. A power of two as a scale rounds nothing.

    Attributes:
        value: the present scale.
        interval: steps before the scale is doubled.
        good_steps: finite steps in a row since the last change.
    """

    value: float
    interval: int = INTERVAL
    good_steps: int = 0

    def follow(self, *, is_finite: bool) -> None:
        """Adjust the scale after a step whose gradients were finite, or not."""
        if not is_finite:
            self.value, self.good_steps = max(self.value / 2, SMALLEST), 0
            return
        self.good_steps += 1
        if self.good_steps >= self.interval:
            self.value, self.good_steps = min(self.value * 2, LARGEST), 0

    def state(self) -> dict[str, Any]:
        """Return JSON values for a checkpoint."""
        return {"value": self.value, "good_steps": self.good_steps}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore ``state``; an empty one, from a checkpoint without a scale, changes nothing."""
        if state:
            self.value, self.good_steps = float(state["value"]), int(state["good_steps"])


# --- try an unknown optimizer on small parameters with the placements of the model's, before it changes a weight

ELEMENT_BY_ELEMENT = frozenset(
    (
        optim.Adadelta,
        optim.Adagrad,
        optim.Adam,
        optim.Adamax,
        optim.AdamW,
        optim.ASGD,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.SGD,
        Lion,
        ScheduleFreeAdamW,
    )
)
"""Optimizers that update an element by its own gradients alone, so that a shard updates as the whole."""

OTHERWISE: dict[type[optim.Optimizer], tuple[str, str]] = {
    optim.LBFGS: (
        "computes the loss again inside its step, over all parameters as one vector, where a layout has gradients of a"
        " step that is over, and ranks have parts of the vector",
        "Use AdamW, or LBFGS in one process on a module of your own.",
    ),
    optim.SparseAdam: (
        "takes sparse gradients alone, and those of a model that is laid out are dense",
        "Use Adam, which steps each element alike.",
    ),
}
"""Optimizers that no trial of a small parameter can judge: the reason, and the remedy."""

STEPS, ALIKE, ROWS, COLUMNS = 2, 8, 4, 6
"""Steps of a trial, and of one whose gradients are alike, so that an estimate over all parameters leaves its first
value; the sizes of its parameters."""
RATES = ("params", "lr", "initial_lr")
"""Keys of a group whose values do not choose how a parameter is updated."""
RATE = 0.01
"""Of a trial where a schedule begins at 0."""
LARGEST_ERROR = 0.05
"""Relative to the update's norm: torch's Muon iterates in bfloat16; taking a shard for the whole errs by about 1."""

_KNOWN: WeakSet[optim.Optimizer] = WeakSet()


@cache
def watch_steps() -> None:
    """Before steps of this process, in users' own loops too, let readers of weights finish, and try unknown optimizers.

    ``optimizer_step`` refuses some more, for all parameters.
    """

    def before(optimizer: optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        readers.finish_all()
        if type(optimizer) in ELEMENT_BY_ELEMENT or optimizer in _KNOWN or is_ours(optimizer):
            return
        if next(_ways(optimizer), None) is not None or are_of_stages(_parameters(optimizer)):
            refuse_unequal(optimizer)

    register_optimizer_step_pre_hook(before)


def is_ours(optimizer: optim.Optimizer) -> bool:
    """Return whether an optimizer is one of this library, made for parameters that are cut."""
    return type(optimizer).__module__.startswith(f"{__name__.partition('.')[0]}.")


def refuse_unequal(optimizer: optim.Optimizer) -> None:
    """Raise UnsupportedError if an optimizer fails on sharded parameters, updates them unlike whole ones, or updates
    parameters of pipeline stages by those of others.

    Each placement in each kind of group is tried on a small parameter: a few collectives, once per optimizer. An
    optimizer whose class does not take its own settings as arguments cannot be tried, and passes.
    """
    if type(optimizer) in ELEMENT_BY_ELEMENT or optimizer in _KNOWN:
        return
    if (found := next((why for kind, why in OTHERWISE.items() if isinstance(optimizer, kind)), None)) is not None:
        reason, remedy = found
        raise UnsupportedError(f"optimizer: {type(optimizer).__name__} {reason}. {remedy}")
    _KNOWN.add(optimizer)
    kind, parameters = type(optimizer).__name__, _parameters(optimizer)
    for group in dict.fromkeys(_kinds(optimizer)) if are_of_stages(parameters) else ():
        # does a parameter's update move where another is stepped beside it?
        generator = torch.Generator().manual_seed(0)
        drawn = [torch.randn(ROWS, COLUMNS, generator=generator).to(parameters[0].device) for _ in range(4)]
        own, other = [drawn[0], *[drawn[1]] * ALIKE], [drawn[2], *[drawn[3] * 8] * ALIKE]
        alone, beside = (_updated(optimizer, group, each, torch.clone) for each in ([own], [own, other]))
        if alone is None or beside is None:
            continue
        if not (beside - alone).norm() / (alone - own[0]).norm() <= LARGEST_ERROR:
            raise UnsupportedError(
                f"{kind} updates a parameter by the gradients of others too, and each rank has those of its own"
                f" pipeline stages alone. Use one that updates each parameter by itself (AdamW), or layout.pp = 1."
            )
    for group, mesh, placements, dims in dict.fromkeys(_ways(optimizer)):
        begin = (
            f"{kind} was tried on a small parameter that lies as {' × '.join(map(str, placements))} over"
            f" {mesh.mesh_dim_names}, and"
        )
        instead = "this library's Adafactor (optimizer.kind = adafactor), or " * isinstance(optimizer, optim.Adafactor)
        remedy = (
            f"Use {instead}one that updates element by element (AdamW), or a layout in which parameters are whole"
            " (layout.dp_replicate with dp_shard = tp = 1)."
        )
        try:
            error = _error(optimizer, group, mesh, placements, dims)
        except Exception as failed:
            raise UnsupportedError(
                f"{begin} its step fails: {type(failed).__name__}: {str(failed).splitlines()[0]} {remedy}"
            ) from failed
        if not error <= LARGEST_ERROR:
            raise UnsupportedError(
                f"{begin} its update is not that of the whole parameter (relative error {error:.1e}). {remedy}"
            )


def _parameters(optimizer: optim.Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _kinds(optimizer: optim.Optimizer) -> list[int]:
    """Return for each group the first one with the same options, but for the rate."""
    options = [repr({key: group[key] for key in sorted(group) if key not in RATES}) for group in optimizer.param_groups]
    return [options.index(each) for each in options]


def _ways(optimizer: optim.Optimizer) -> Iterator[tuple[int, DeviceMesh, tuple[Placement, ...], int]]:
    """Yield the kind of group, the mesh, the placements and the number of dims of each parameter that is cut."""
    for kind, group in zip(_kinds(optimizer), optimizer.param_groups, strict=True):
        for parameter in group["params"]:
            if has_no_values(local_part(parameter)):
                continue  # of a dry run, whose tensors have no values to compare
            if type(parameter.data) is DTensor and any(placement.is_shard() for placement in parameter.placements):
                yield kind, parameter.device_mesh, parameter.placements, parameter.dim()


def _error(
    optimizer: optim.Optimizer, group: int, mesh: DeviceMesh, placements: tuple[Placement, ...], dims: int
) -> float:
    """Return the relative error of a sharded parameter's update against that of a whole one."""
    generator = torch.Generator().manual_seed(0)
    shape = (ROWS * mesh.size(), *[COLUMNS * mesh.size()] * (dims - 1))
    values = [torch.randn(shape, generator=generator).to(mesh.device_type) for _ in range(1 + STEPS)]
    whole = _updated(optimizer, group, [values], lambda tensor: tensor)
    if whole is None:
        return 0.0
    lay = partial(distribute_tensor, device_mesh=mesh, placements=placements, src_data_rank=None)
    cut = _updated(optimizer, group, [values], lay)
    assert isinstance(cut, DTensor)
    return float((cut.full_tensor() - whole).norm() / (whole - values[0]).norm())


def _updated(optimizer: optim.Optimizer, group: int, values: list[list[Tensor]], laid: Any) -> Tensor | None:
    """Return the first of some parameters after some steps of another optimizer of this kind; None if none can be made.

    Args:
        group: the group whose options they have.
        values: of each parameter its value, and its gradient of each step.
        laid: lays a tensor out.
    """
    parameters = [nn.Parameter(laid(value.clone())) for value, *_ in values]
    takes = inspect.signature(type(optimizer)).parameters
    options = {name: value for name, value in optimizer.param_groups[group].items() if name != "initial_lr"}
    if "lr" in options:
        options["lr"] = options["lr"] or optimizer.defaults.get("lr") or RATE
    try:
        other = type(optimizer)(
            [options | {"params": parameters}],
            **{name: value for name, value in optimizer.defaults.items() if name in takes},
        )
    except Exception:  # noqa: BLE001  (the class may need other arguments)
        return None
    _KNOWN.add(other)  # its step is the trial
    for gradients in zip(*[each[1:] for each in values], strict=True):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = laid(gradient)
        other.step()
    return parameters[0].detach()


def step(
    optimizer: torch.optim.Optimizer, plan: OptimizerPlan, device: torch.device, mesh: DeviceMesh | None = None
) -> None:
    """Step an optimizer whose gradients are ready; one of whole matrices shares them out over the ``mesh``."""
    check(optimizer, plan)
    if isinstance(optimizer, Muon):
        optimizer.share_out(mesh)
    elif not is_ours(optimizer):
        refuse_unequal(optimizer)
    readers.finish_all()  # portions of state move before torch's hook is called
    in_lists = type(optimizer) in ELEMENT_BY_ELEMENT and any(
        (group.get("fused") or group.get("foreach")) and DTensor in set(map(type, group["params"]))
        for group in optimizer.param_groups
    )
    with OnShares() if in_lists else nullcontext():
        if plan.in_host_memory:
            low_bit.step(optimizer, device)
        else:
            optimizer.step()


def of_model(optimizer: optim.Optimizer, parameters: Iterable[tuple[str, nn.Parameter]]) -> ReferenceType:
    """Return a weak reference to an optimizer of these parameters.

    Raises:
        ConfigError: it lacks trained parameters and has others: made before ``parallelize``, it would update weights
            that nothing reads any more.
    """
    held = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    own = {id(parameter): name for name, parameter in parameters if parameter.requires_grad}
    lacking, others = own.keys() - held.keys(), held.keys() - own.keys()
    if lacking and any(held[other].requires_grad for other in others) and isinstance(optimizer, optim.Optimizer):
        first = next(name for key, name in own.items() if key in lacking)
        raise ConfigError(
            f"the optimizer lacks {len(lacking)} of the {len(own)} trained parameters here, such as {first}, and holds"
            f" {len(others)} tensors that are none of the model's: was it made before parallelize, or of another model?"
            f" Make it of model.parameters() afterwards (parameters that shall not be trained: requires_grad_(False))."
        )
    return ref(optimizer)


class OnShares(EagerDispatchMode):
    """Runs torch's operators on lists of tensors on this rank's shares of DTensors that lie alike.

    torch derives each result's placements from those of all tensors in the lists: for 200 parameters this takes half a
    second of the first step, and grows as their square.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if not name.startswith(("_foreach_", "_fused_")) or name.endswith(WHOLE_LISTS):
            return func(*args, **kwargs)
        if (shares := shares_in_lists((*args, *kwargs.values()))) is None:
            return func(*args, **kwargs)
        made = func(*shares[: len(args)], **dict(zip(kwargs, shares[len(args) :], strict=True)))
        if made is None:
            return None
        likes = next(each for each in args if isinstance(each, (list, tuple)))
        return [with_local(like, x) if type(like) is DTensor else x for like, x in zip(likes, made, strict=True)]


def check(optimizer: torch.optim.Optimizer, plan: OptimizerPlan) -> None:
    """Raise ConfigError if an optimizer stores its state or rounds otherwise than planned."""
    kind = type(optimizer).__name__
    have = (optimizer.state_word, optimizer.stochastic) if isinstance(optimizer, TorchaoAdamW) else ("full", False)
    if have != (plan.state, plan.stochastic_rounding):
        planned = (
            f"techniques.optimizer_state = {plan.state}, techniques.stochastic_rounding ="
            f" {str(plan.stochastic_rounding).lower()}"
        )
        raise ConfigError(
            f"optimizer: the model was laid out with {planned}, and this {kind} would do otherwise. Make it with"
            f" meshwright.training.optimizer.make_optimizer(groups, lr=…, plan=model.plan.optimizer,"
            f" named_parameters=model.named_parameters()).optimizer."
        )
