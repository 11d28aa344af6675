"""Tensor parallelism applied: parameters distributed, modules wrapped, by the plan."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from meshwright.core.names import clean, owner
from meshwright.core.parts import Part
from meshwright.introspection.facts import CUT_BY
from meshwright.introspection.structure.region import Cut
from meshwright.planning.plan import Plan
from meshwright.planning.tensor_plan import BlocksPlan, TensorPlan

from . import ends, layers
from .functions import Sequence
from .group import ProcessGroupRanks, TensorGroup
from .placement import distribute, placement_of_cut
from .runtime import Runtime, use_local_parameters
from .streams import separate_streams
from .sums import Sums


def apply(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> nn.Module:
    """Cut the model in place as the plan says; ``mesh`` has the tensor axis alone. ``model`` may be on meta."""
    tensor = plan.tensor
    assert tensor is not None
    wrap_modules(model, tensor, ProcessGroupRanks(mesh.get_group()), sums_at_once=plan.data.reduction == "mean")
    distribute_parameters(model, tensor, mesh)
    model.__dict__[CUT_BY] = tensor
    return model


def sums_of(model: nn.Module, plan: Plan) -> Sums:
    """The trained parameters of which ranks hold the same, by what their gradients are."""
    tensor = plan.tensor
    if tensor is None:
        return Sums([], [], [])
    trained = [(clean(name), parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    cuts = {name: tensor.cut_of(name, parameter.shape) for name, parameter in trained}
    whole = [(parameter, tensor.is_summed(name)) for name, parameter in trained if cuts[name] is None]
    copied = [p for name, p in trained if (cut := cuts[name]) is not None and any(part.copies(tensor.ranks) > 1 for part in cut[1])]
    return Sums([p for p, is_summed in whole if is_summed], copied, [p for p, is_summed in whole if not is_summed])


def distribute_parameters(model: nn.Module, plan: TensorPlan, mesh: DeviceMesh) -> None:
    """Every parameter becomes a DTensor on the tensor axis; tied ones stay one."""
    made: dict[int, nn.Parameter] = {}
    for raw, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in made:
                cut = plan.cut_of(clean(f"{raw}.{name}" if raw else name), parameter.shape)
                placement = Replicate() if cut is None else placement_of_cut(*cut, plan.ranks)
                made[id(parameter)] = distribute(parameter, mesh, placement)
                made[id(made[id(parameter)])] = made[id(parameter)]
            module._parameters[name] = made[id(parameter)]


def wrap_modules(model: nn.Module, plan: TensorPlan, group: TensorGroup, *, sums_at_once: bool = False) -> Runtime:
    """Wrap forwards; returns what they share.

    Args:
        sums_at_once: gradients of whole parameters that are sums over the ranks are summed as soon as they are there, and not by
            whoever steps.
    """
    runtime = Runtime(sequence=Sequence(group, plan.sequence_parallel, plan.regather))
    model.__dict__["_meshwright_tensor"] = runtime
    done: set[nn.Module] = set()
    for kind in plan.kinds:
        for path in kind.blocks:
            done |= _wrap_block(model.get_submodule(path), kind, runtime, sums_at_once)
    if plan.embedding:
        module = model.get_submodule(plan.embedding)
        rows = module.get_parameter("weight").shape[0]
        ends.vocabulary_embedding(module, runtime, rows, is_hidden=plan.embedding_is_hidden)
    if plan.head:
        module = model.get_submodule(plan.head)
        weight = module.get_parameter("weight")
        takes_whole = plan.sequence_parallel and plan.gathers_after_blocks
        ends.vocabulary_head(module, runtime, weight.shape[0], takes_whole=takes_whole)
        done.add(module)
    for path, module in model.named_modules():
        if module not in done and any(parameter is not None for parameter in module._parameters.values()):
            use_local_parameters(module, _summed(plan, path, module) if sums_at_once else (), group)
    if plan.kinds:
        first = model.get_submodule(plan.blocks[0])
        ends.first_block(first, plan.kind_of(plan.blocks[0]).hidden, runtime)
        if isinstance(group, ProcessGroupRanks):  # threads share one stream
            separate_streams(model, first, runtime)
    if plan.gathers_after_blocks:
        ends.last_block(model.get_submodule(plan.last_block), runtime, alike=not plan.head)
    return runtime


def _summed(plan: TensorPlan, path: str, module: nn.Module) -> tuple[str, ...]:
    """The whole parameters of a module whose gradients are sums over the ranks."""
    names = (name for name, parameter in module._parameters.items() if parameter is not None)
    return tuple(name for name in names if is_summed(plan, clean(f"{path}.{name}" if path else name), module._parameters[name]))


def is_summed(plan: TensorPlan, name: str, parameter: nn.Parameter | None) -> bool:
    """Whether the gradient of this parameter, or of a copy of a part of it, is a sum over the ranks."""
    assert parameter is not None
    return plan.cut_of(name, parameter.shape) is None and plan.is_summed(name)


def _wrap_block(block: nn.Module, kind: BlocksPlan, runtime: Runtime, sums_at_once: bool) -> set[nn.Module]:
    """The modules that compute with cut parameters of their own."""
    wrapped: set[nn.Module] = set()
    ways: dict[str, bool] = {}
    for planned in kind.regions:
        region = planned.region
        ways |= {path: _is_transposed(region.cuts, path, is_consumer=False) for path in region.producers}
        ways[region.consumer] = _is_transposed(region.cuts, region.consumer, is_consumer=True)
        for path in region.spanning:
            cut = region.cut_of(f"{path}.weight")
            assert cut is not None
            layers.norm_over_all_features(block.get_submodule(path), cut.parts, runtime)
        defers = region.consumer in kind.summed[:-1]
        consumer = block.get_submodule(region.consumer)
        takes = region.consumer in kind.summed[-1:]
        sums_bias = sums_at_once and runtime.sequence.cut
        layers.row_parallel(consumer, ways[region.consumer], runtime, defers=defers, takes_deferred=takes, sums_bias=sums_bias)
        wrapped.add(consumer)
        if region.container:
            layers.container(block.get_submodule(region.container), region.container, planned.form, runtime)
    for paths in kind.gathers:
        copied = {path: _copied(kind, path, runtime.group.size) if sums_at_once else {} for path in paths}
        linears = [layers.ColumnLayer(block.get_submodule(path), ways[path], copied[path]) for path in paths]
        layers.SharedInput(runtime, linears)
        wrapped |= {layer.module for layer in linears}
    return wrapped


def _copied(kind: BlocksPlan, path: str, ranks: int) -> dict[str, tuple[int, tuple[Part, ...]]]:
    """(dim, parts) of a layer's parameters of which several ranks have the same parts."""
    cuts = (cut for cut in kind.cuts() if owner(cut.name) == path)
    return {cut.name.rpartition(".")[2]: (cut.dim, cut.parts) for cut in cuts if any(part.copies(ranks) > 1 for part in cut.parts)}


def _is_transposed(cuts: tuple[Cut, ...], path: str, *, is_consumer: bool) -> bool:
    """Whether a layer's weight is stored (in, out): what is cut are its outputs, or of the layer that ends a region its inputs."""
    cut = next(cut for cut in cuts if cut.name == f"{path}.weight")
    return cut.dim == (0 if is_consumer else 1)
