"""Apply a tensor plan: distribute parameters and wrap modules."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from meshwright.core.names import clean, owner
from meshwright.core.parts import FusedPart
from meshwright.core.record import remember
from meshwright.distributed.exchange.ranks import ProcessGroupRanks, RankGroup
from meshwright.distributed.weights.parts_tensor import distribute
from meshwright.distributed.weights.placement import placement_of_cut
from meshwright.introspection.structure.region import Cut, Region
from meshwright.planning.experts.plan import ExpertPlan
from meshwright.planning.plan import Plan
from meshwright.planning.tensor.plan import BlocksPlan, TensorPlan

from . import adapted, ends, layers, normed
from .ends import separate_streams
from .layers import routers_of_parts
from .overlap import Overlap
from .runtime import LocalView, Runtime, use_local_parameters
from .sequence import Sequence
from .sums import Sums

NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def apply(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> nn.Module:
    """Cut the model in place as planned. The mesh has the tensor axis alone; the model may be on meta."""
    tensor = plan.tensor
    assert tensor is not None
    overlap = Overlap(mesh.get_group()) if tensor.async_tensor_parallel else None
    sums_at_once = plan.data.reduction == "mean"
    wrap_modules(
        model,
        tensor,
        ProcessGroupRanks(mesh.get_group()),
        sums_at_once=sums_at_once,
        overlap=overlap,
        leaving=plan.experts,
    )
    distribute_parameters(model, tensor, mesh, leaving=plan.experts)
    remember(model, tensor)
    return model


def sums_of(model: nn.Module, plan: Plan) -> Sums:
    """Return the parameters that several ranks hold, sorted by how their gradients are combined."""
    tensor, own = plan.tensor, plan.experts
    if tensor is None:
        return Sums([], [], [])
    named = [(clean(name), parameter) for name, parameter in model.named_parameters()]
    named = [(name, parameter) for name, parameter in named if own is None or not own.has(name)]
    cuts = {name: tensor.cut_of(name, parameter.shape) for name, parameter in named}
    whole = [(parameter, tensor.is_summed(name)) for name, parameter in named if cuts[name] is None]
    copied = [
        p
        for name, p in named
        if (cut := cuts[name]) is not None and any(part.copies(tensor.ranks) > 1 for part in cut[1])
    ]
    return Sums([p for p, is_summed in whole if is_summed], copied, [p for p, is_summed in whole if not is_summed])


def distribute_parameters(
    model: nn.Module, plan: TensorPlan, mesh: DeviceMesh, *, leaving: ExpertPlan | None = None
) -> None:
    """Make every parameter a DTensor on the tensor axis; tied parameters stay tied.

    Experts that are ``leaving`` for another axis are skipped.
    """
    made: dict[int, nn.Parameter] = {}
    for raw, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            full = clean(f"{raw}.{name}" if raw else name)
            if parameter is None or (leaving is not None and leaving.has(full)):
                continue
            if id(parameter) not in made:
                cut = plan.cut_of(full, parameter.shape)
                placement = Replicate() if cut is None else placement_of_cut(*cut, plan.ranks)
                made[id(parameter)] = distribute(parameter, mesh, placement)
                made[id(made[id(parameter)])] = made[id(parameter)]
            module._parameters[name] = made[id(parameter)]


def wrap_modules(
    model: nn.Module,
    plan: TensorPlan,
    group: RankGroup,
    *,
    sums_at_once: bool = False,
    overlap: Overlap | None = None,
    leaving: ExpertPlan | None = None,
) -> Runtime:
    """Wrap the model's forwards, and return their shared state.

    Args:
        sums_at_once: sum the partial gradients of whole parameters in the backward, instead of before the optimizer
            step.
        overlap: computes products together with messages; a rehearsal has none.
        leaving: plan of another technique that distributes the experts.
    """
    runtime = Runtime(sequence=Sequence(group, plan.sequence_parallel, plan.regather, overlap))
    remember(model, runtime)
    if plan.sequence_parallel:
        routers_of_parts(model, runtime)
    done = {model.get_submodule(stack.path) for stack in (leaving.stacks if leaving is not None else ())}
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
        if plan.sequence_parallel and not takes_whole:
            ends.kept_logits(model, runtime)
        ends.answer_behind(model, runtime)
    for path, module in model.named_modules():
        if module not in done and module._parameters:
            layers.shared_linear(module, plan.parts_of(clean(path)), runtime)
    runtime.own = done
    _use_local_parameters(model, plan, done, group if sums_at_once else None)
    if plan.kinds:
        first = model.get_submodule(plan.blocks[0])
        if plan.begins:
            ends.first_block(first, plan.kind_of(plan.blocks[0]).hidden, runtime)
        if isinstance(group, ProcessGroupRanks):  # threads share one stream
            separate_streams(model, first, runtime)
    if plan.gathers_after_blocks:
        ends.last_block(model.get_submodule(plan.last_block), runtime, alike=not plan.head)
    return runtime


def _use_local_parameters(
    model: nn.Module, plan: TensorPlan, done: set[nn.Module], summing_over: RankGroup | None
) -> None:
    """Give every forward plain tensors for the parameters of its module and of all modules inside.

    Many blocks read the weights of their children. A block's own forward prepares its parameters, because that forward
    may be compiled or recomputed, and because FSDP gathers for it.
    """
    modules, blocks = dict(model.named_modules()), set(plan.blocks)
    inside: dict[str, list[LocalView]] = {}
    for path, module in modules.items():
        views = (
            LocalView.of(module, summing=_summed(plan, path, module), group=summing_over) if module not in done else []
        )
        around = path
        while views:
            inside.setdefault(around, []).extend(views)
            if not around or clean(around) in blocks:
                break
            around = owner(around)
    for path, views in inside.items():
        if modules[path] not in done and not isinstance(modules[path], NEVER_CALLED):
            use_local_parameters(modules[path], views)


def _summed(plan: TensorPlan, path: str, module: nn.Module) -> tuple[str, ...]:
    """Return the whole parameters of a module whose gradients are sums over the ranks."""
    names = (name for name, parameter in module._parameters.items() if parameter is not None)
    return tuple(
        name for name in names if is_summed(plan, clean(f"{path}.{name}" if path else name), module._parameters[name])
    )


def is_summed(plan: TensorPlan, name: str, parameter: nn.Parameter | None) -> bool:
    """Return whether the ranks' gradients of this parameter, or of a part held by several ranks, are partial."""
    assert parameter is not None
    return plan.cut_of(name, parameter.shape) is None and plan.is_summed(name)


def _wrap_block(block: nn.Module, kind: BlocksPlan, runtime: Runtime, sums_at_once: bool) -> set[nn.Module]:
    """Wrap a block, and return the modules that compute with their own cut parameters."""
    wrapped: set[nn.Module] = set()
    ways: dict[str, bool] = {}
    for planned in kind.regions:
        region = planned.region
        ways |= {path: _is_transposed(region.cuts, path, is_consumer=False) for path in region.producers}
        ways[region.consumer] = _is_transposed(region.cuts, region.consumer, is_consumer=True)
        for found in region.adapted:
            ends = found.host == region.consumer
            ways |= {
                path: _is_transposed(region.cuts, path, is_consumer=ends)
                for path in (pair[not ends] for pair in found.pairs)
            }
        for path in region.spanning:
            cut = region.cut_of(f"{path}.weight")
            assert cut is not None
            layers.norm_over_all_features(block.get_submodule(path), cut.parts, runtime)
        wrapped |= _wrap_consumer(block, kind, region, ways, runtime, sums_at_once)
        if region.container or planned.form.numbers:
            layers.container(block.get_submodule(region.container), region.container, planned.form, runtime)
    if kind.norms:
        return wrapped | _wrap_normed(block, kind, ways, runtime, sums_at_once)
    regions = [planned.region for planned in kind.regions]
    latent = {path for region in regions for path in region.latent}
    for path in (path for region in regions for path in region.fed):
        layer = layers.ColumnLayer(
            block.get_submodule(path), ways[path], _copied(kind, path, runtime.group.size) if sums_at_once else {}
        )
        layers.local_linear(layer, runtime)
        wrapped.add(layer.module)
    for paths in kind.gathers:
        around = {
            path: found for region in regions for path in paths if (found := region.adapters_of(path)) is not None
        }
        cut = [*paths, *(second for found in around.values() for _, second in found.pairs)]
        copied = {path: _copied(kind, path, runtime.group.size) if sums_at_once else {} for path in cut}
        linears = [
            layers.ColumnLayer(
                block.get_submodule(path), ways.get(path, False), copied[path], sums_at_once and path in latent, parts
            )
            for path in cut
            for parts in (kind.parts_of(path),)
        ]
        if around:
            for layer in linears:
                layers.local_linear(layer, runtime)
            modules = [block.get_submodule(around[path].around if path in around else path) for path in paths]
            adapted.GatheredInput(runtime, modules)
        else:
            layers.SharedInput(runtime, linears)
        wrapped |= {layer.module for layer in linears}
    for path in (path for region in regions for found in region.adapted for path in found.idle):
        adapted.refuse_idle(block.get_submodule(path), path)
        wrapped.add(block.get_submodule(path))
    return wrapped


def _wrap_normed(
    block: nn.Module, kind: BlocksPlan, ways: dict[str, bool], runtime: Runtime, sums_at_once: bool
) -> set[nn.Module]:
    """Wrap parallel norms and the layers after them."""
    branches = []
    for norm, paths in zip(kind.norms, kind.gathers, strict=True):
        copied = {path: _copied(kind, path, runtime.group.size) if sums_at_once else {} for path in paths}
        linears = [layers.ColumnLayer(block.get_submodule(path), ways[path], copied[path]) for path in paths]
        branches.append(normed.NormedLayers(block.get_submodule(norm), linears, sums_at_once))
    normed.SharedNormInput(runtime, branches)
    return {module for branch in branches for module in (branch.norm, *(layer.module for layer in branch.layers))}


def _wrap_consumer(
    block: nn.Module, kind: BlocksPlan, region: Region, ways: dict[str, bool], runtime: Runtime, sums_at_once: bool
) -> set[nn.Module]:
    """Wrap the layer that ends a region, with its adapters, and return the modules that hold cut parameters."""
    reduction = layers.Reduction(
        defers=region.consumer in kind.summed[:-1],
        begins=region.consumer in kind.summed[:1],
        takes_deferred=region.consumer in kind.summed[-1:],
        sums_bias=sums_at_once and runtime.sequence.cut,
    )
    consumer = block.get_submodule(region.consumer)
    found = region.adapters_of(region.consumer)
    if found is None:
        layers.row_parallel(consumer, ways[region.consumer], runtime, reduction)
        return {consumer}
    cut = [
        layers.ColumnLayer(block.get_submodule(path), ways[path], parts=kind.parts_of(path))
        for path in (region.consumer, *(first for first, _ in found.pairs))
    ]
    for layer in cut:
        adapted.local_summand(layer, runtime, sums_at_once=sums_at_once)
    adapted.reduced(block.get_submodule(found.around), runtime, reduction)
    return {layer.module for layer in cut}


def _copied(kind: BlocksPlan, path: str, ranks: int) -> dict[str, tuple[int, tuple[FusedPart, ...]]]:
    """Return (dim, parts) of a layer's parameters whose parts lie on several ranks."""
    cuts = (cut for cut in kind.cuts() if owner(cut.name) == path)
    return {
        cut.name.rpartition(".")[2]: (cut.dim, cut.parts)
        for cut in cuts
        if any(part.copies(ranks) > 1 for part in cut.parts)
    }


def _is_transposed(cuts: tuple[Cut, ...], path: str, *, is_consumer: bool) -> bool:
    """Return whether a layer's weight is stored (in, out). Outputs are cut, or inputs if the layer ends a region."""
    cut = next(cut for cut in cuts if cut.name == f"{path}.weight")
    return cut.dim == (0 if is_consumer else 1)
