"""Apply a tensor plan, rehearsed with threads for ranks: distribute parameters and wrap modules.

The code that lays out the real model wraps the modules here too; only the transport of messages differs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from meshwright.core.errors import UnsupportedError
from meshwright.core.names import clean, owner
from meshwright.core.parts import FusedPart, is_plain, ranges, take
from meshwright.core.record import remember
from meshwright.distributed.exchange import ProcessGroupRanks, RankGroup, Thread, on_threads
from meshwright.distributed.weights.parts_tensor import distribute
from meshwright.distributed.weights.shards import placement_of_cut
from meshwright.introspection.facts import ModelFacts
from meshwright.introspection.signature import logits_of
from meshwright.introspection.small.copies import copy_of, widened
from meshwright.introspection.small.sample import Sample
from meshwright.introspection.structure.regions import Cut, Region
from meshwright.planning.experts import ExpertPlan
from meshwright.planning.plan import Plan
from meshwright.planning.tensor.plan import BlocksPlan, TensorPlan

from . import ends, layers, normed
from . import normed as adapted
from .ends import separate_streams
from .functions import Overlap, TokenSequence
from .layers import LocalView, LossRequest, Runtime, Sums, routers_of_parts, use_local_parameters
from .loss import vocabulary_parallel_cross_entropy_sum

# --- apply a tensor plan

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
    runtime = Runtime(sequence=TokenSequence(group, plan.sequence_parallel, plan.regather, overlap))
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


# --- rehearse a tensor plan before its first use, with threads for ranks, and compare with plain torch

LARGEST_ERROR = 1e-6
"""Largest relative error in fp64."""


def prove(facts: ModelFacts, plan: TensorPlan, *, sums_at_once: bool = False) -> None:
    """Rehearse the plan on a small copy of the model, without communication, once for each model and plan.

    Args:
        sums_at_once: how the plan will be applied: see ``wrap_modules``.

    Raises:
        UnsupportedError: the results differ from those of one process; the text names the first tensor that does.
    """
    model = facts.module
    if (plan, sums_at_once) in facts.measurements.proven:
        return
    sample = facts.measurements.structure(plan.ranks).sample
    assert model is not None
    small = plan.for_sample(sample, model)
    for inputs, logits in _performances(sample):
        try:
            errors = rehearse(sample.model, small, inputs, logits=logits, sums_at_once=sums_at_once)
            if not all(error <= LARGEST_ERROR for error in errors.values()):  # the model's code may round to float32
                errors = rehearse(widened(sample.model), small, inputs, logits=logits, sums_at_once=sums_at_once)
        except Exception as error:
            raise UnsupportedError(
                _refused(facts, plan, f"its forward or backward fails: {type(error).__name__}: {error}")
            ) from error
        worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
        if not errors[worst] <= LARGEST_ERROR:
            what = "the loss" if worst == "loss" else f"the gradient of {worst}"
            raise UnsupportedError(_refused(facts, plan, f"{what} is wrong (relative error {errors[worst]:.1e})"))
    facts.measurements.proven.add((plan, sums_at_once))


Logits = Literal["whole", "own", "never"]
"""How a loss is computed: from all logits on every rank, from each rank's part of them, or by the head in chunks."""


def _performances(sample: Sample) -> Iterator[tuple[dict[str, Any], Logits]]:
    """Yield the cases to rehearse: every kind of loss, a padding mask, a length that does not divide, images."""
    yield sample.inputs[0], "own"
    yield sample.inputs[-1], "whole"
    name, tokens = next(iter(sample.inputs[0].items()))
    yield sample.inputs[0] | {name: tokens[:, :-1]}, "never"
    if sample.pictured is not None:
        yield sample.pictured, "own"


def _refused(facts: ModelFacts, plan: TensorPlan, why: str) -> str:
    way = "with its sequences cut" if plan.sequence_parallel else "with whole sequences"
    hint = " Set techniques.sequence_parallel = false, or" if plan.sequence_parallel else ""
    return (
        f"layout.tp = {plan.ranks}: the plan to cut {facts.kind} ({plan.source}) was rehearsed on a small copy of it,"
        f" {way}, and {why}.{hint or ' Set'} layout.tp = 1."
    )


def rehearse(
    model: nn.Module, plan: TensorPlan, inputs: dict[str, Any], *, logits: Logits = "whole", sums_at_once: bool = False
) -> dict[str, float]:
    """Return the relative error of the loss ("loss") and of each parameter's gradient, against one process.

    Args:
        model: a small model with weights, in fp64.
        inputs: arguments of its forward.
        sums_at_once: whether partial gradients are summed in the backward.
        logits: how the loss is computed, if the plan cuts the head.
    """
    reference = copy_of(model)
    expected_logits = logits_of(reference(**inputs))
    expected_loss = _loss_of(expected_logits)
    expected_loss.backward()
    by_token = expected_logits.dim() == 3  # a classifier of whole rows has no loss of tokens
    logits = logits if plan.head and not plan.tail.obstacle_if_cut and by_token else "whole"
    found = on_threads(plan.ranks, lambda group: _on_rank(copy_of(model), plan, inputs, group, logits, sums_at_once))
    losses = torch.tensor([loss for loss, _ in found], dtype=torch.float64)
    # NaN if one of them is NaN
    errors = {"loss": float(((losses - expected_loss.detach()) / expected_loss.detach()).abs().amax())}
    expected = {
        clean(name): parameter.grad for name, parameter in reference.named_parameters() if parameter.grad is not None
    }
    scale = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    for name, gradient in expected.items():
        wholes = _wholes(plan, name, [gradients[name] for _, gradients in found], gradient.shape, sums_at_once)
        off = torch.stack([(whole - gradient).norm() for whole in wholes]).amax()  # NaN if one of them is NaN
        errors[name] = float(off / gradient.norm().clamp(min=1e-6 * float(scale)))
    return errors


class Resting:
    """Replaces a parameter of ``Runtime.own`` in a rehearsal, and raises if it is read.

    In the real model such a reader would find a DTensor instead of a plain tensor.
    """

    def __init__(self, parameter: Tensor):
        self.dtype, self.device, self.requires_grad = parameter.dtype, parameter.device, parameter.requires_grad

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a weight that is cut is read ({name}) outside of its own module")

    @classmethod
    def __torch_function__(cls, operation: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        raise RuntimeError(f"a weight that is cut is read ({operation.__name__}) outside of its own module")


def _on_rank(
    model: nn.Module, plan: TensorPlan, inputs: dict[str, Any], group: Thread, logits: Logits, sums_at_once: bool
) -> tuple[float, dict[str, Tensor]]:
    vocabulary = model.get_submodule(plan.head).get_parameter("weight").shape[0] if plan.head else 0
    runtime = wrap_modules(model, plan, group, sums_at_once=sums_at_once)
    cuts = {clean(name): plan.cut_of(clean(name), p.shape) for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        cut = cuts[clean(name)]
        if cut is not None:
            parameter.data = take(parameter.data, *cut, group.rank, group.size).clone()
    for module in runtime.own:
        # Python finds these before the parameters
        module.__dict__.update({key: Resting(p) for key, p in module._parameters.items() if p is not None})
    if logits == "whole":
        loss = _loss_of(logits_of(model(**inputs)))
    else:
        labels = _labels((*next(iter(inputs.values())).shape, vocabulary))
        loss = _loss_of_parts(model, inputs, runtime, labels, logits) / labels.numel()
    loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if not sums_at_once and cuts[clean(name)] is None and plan.is_summed(clean(name)):
            gradient = group.sum(gradient.clone())
        gradients[clean(name)] = gradient
    return loss.item(), gradients


def _loss_of_parts(
    model: nn.Module, inputs: dict[str, Any], runtime: Runtime, labels: Tensor, logits: Logits
) -> Tensor:
    """Return the sum of the losses, computed from this rank's part of the vocabulary."""
    if logits == "own":
        runtime.logits = "own"
        own = logits_of(model(**inputs))
        assert runtime.shard is not None
        return vocabulary_parallel_cross_entropy_sum(own, labels, runtime.shard)
    request = LossRequest(labels, chunks=2)
    runtime.request = request
    model(**inputs)
    runtime.request = None
    assert request.result is not None
    return request.result


def _wholes(
    plan: TensorPlan, name: str, gradients: list[Tensor], shape: torch.Size, copies_are_sums: bool
) -> list[Tensor]:
    """Return every rank's gradient of a whole parameter, or one gradient assembled from the parts of all ranks.

    Copies are added up, unless each is the sum already.
    """
    cut = plan.cut_of(name, shape)
    if cut is None:
        return gradients
    dim, parts = cut
    if is_plain(parts, plan.ranks):
        return [torch.cat(gradients, dim=dim)]
    whole = gradients[0].new_zeros(shape)
    for rank, gradient in enumerate(gradients):
        runs = ranges(parts, rank, plan.ranks)
        for piece, (low, high) in zip(gradient.split([high - low for low, high in runs], dim=dim), runs, strict=True):
            here = whole.narrow(dim, low, high - low)
            here.copy_(piece) if copies_are_sums else here.add_(piece)
    return [whole]


def _loss_of(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), _labels(logits.shape))


def _labels(shape: Sequence[int]) -> Tensor:
    """Return flat labels for logits (rows, seq, vocabulary) or (rows, classes), spread over the last dim."""
    return torch.arange(math.prod(shape[:-1])) * 7 % shape[-1]
