"""Apply a tensor plan, rehearsed with threads for ranks: distribute parameters and wrap modules.

The code that lays out the real model wraps the modules here too; only the transport of messages differs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from meshwright.core.errors import UnsupportedError
from meshwright.core.names import clean, owner
from meshwright.core.parts import FusedPart, is_plain, ranges, take
from meshwright.core.record import remember
from meshwright.distributed.exchange import ProcessGroupRanks, RankGroup, Thread, on_threads
from meshwright.distributed.rehearsal import Errors, errors_of, labels_of, loss_of, why_wrong
from meshwright.distributed.torch_private import local_part
from meshwright.distributed.weights.parts_tensor import distribute
from meshwright.distributed.weights.shards import own_streams, pieces, placement_of_cut
from meshwright.introspection.facts import ModelFacts
from meshwright.introspection.signature import logits_of
from meshwright.introspection.small.copies import copy_of
from meshwright.introspection.small.sample import Sample
from meshwright.introspection.structure.regions import Region
from meshwright.planning.experts import ExpertPlan
from meshwright.planning.plan import Plan
from meshwright.planning.tensor.plan import BlocksPlan, TensorPlan

from . import ends, functions, layers
from .functions import Overlap, TokenSequence
from .layers import ColumnLayer, LayersOfInput, LocalView, LossRequest, Runtime, routers_of_parts, use_local_parameters
from .loss import vocabulary_parallel_cross_entropy_sum

# --- apply a tensor plan

NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def apply(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> nn.Module:
    """Cut the model in place as planned. The mesh has the tensor axis alone; the model may be on meta."""
    tensor = plan.tensor
    assert tensor is not None
    group, sums_at_once = mesh.get_group(), plan.data.reduction == "mean"
    overlap = Overlap(group) if tensor.async_tensor_parallel else None
    ranks = ProcessGroupRanks(group)
    wrap_modules(model, tensor, ranks, sums_at_once=sums_at_once, overlap=overlap, leaving=plan.experts)
    made: dict[int, nn.Parameter] = {}  # tied parameters stay tied
    for raw, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            full = clean(f"{raw}.{name}" if raw else name)
            if parameter is None or (plan.experts is not None and plan.experts.has(full)):
                continue
            if id(parameter) not in made:
                cut = tensor.cut_of(full, parameter.shape)
                placement = Replicate() if cut is None else placement_of_cut(*cut, tensor.ranks)
                made[id(parameter)] = distribute(parameter, mesh, placement)
                made[id(made[id(parameter)])] = made[id(parameter)]
            module._parameters[name] = made[id(parameter)]
    remember(model, tensor)
    return model


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
    # Every forward gets plain tensors for the parameters of its module and of all modules inside: many blocks read the
    # weights of their children. A block's own forward prepares its parameters, because that forward may be compiled or
    # recomputed, and because FSDP gathers for it.
    modules, blocks = dict(model.named_modules()), set(plan.blocks)
    inside: dict[str, list[LocalView]] = {}
    for path, module in modules.items():
        # whole parameters, and parts that several ranks hold, whose gradients are sums over the ranks
        summed = [
            name
            for name, p in module._parameters.items()
            if p is not None
            and plan.cut_of(full := clean(f"{path}.{name}" if path else name), p.shape) is None
            and plan.is_summed(full)
        ]
        views = [] if module in done else LocalView.of(module, summing=summed, group=group if sums_at_once else None)
        around = path
        while views:
            inside.setdefault(around, []).extend(views)
            if not around or clean(around) in blocks:
                break
            around = owner(around)
    for path, views in inside.items():
        if modules[path] not in done and not isinstance(modules[path], NEVER_CALLED):
            use_local_parameters(modules[path], views)
    if plan.kinds:
        first = model.get_submodule(plan.blocks[0])
        if plan.begins:
            ends.first_block(first, plan.kind_of(plan.blocks[0]).hidden, runtime)
        if isinstance(group, ProcessGroupRanks):  # threads share one stream
            # a rank has other tokens, and all ranks draw the same numbers before the blocks
            is_wanted = lambda: model.training and runtime.sequence.cut  # noqa: E731
            own_streams(model, first, is_wanted, ("tensor rank", group.rank))
    if plan.gathers_after_blocks:
        ends.last_block(model.get_submodule(plan.last_block), runtime, alike=not plan.head)
    return runtime


def _wrap_block(block: nn.Module, kind: BlocksPlan, runtime: Runtime, sums_at_once: bool) -> set[nn.Module]:
    """Wrap a block, and return the modules that compute with their own cut parameters."""
    regions, at = [planned.region for planned in kind.regions], block.get_submodule
    done: list[nn.Module] = []
    # whether weights are stored (in, out): outputs are cut, or inputs if the layer ends a region
    transposed: dict[str, bool] = {}
    for region in regions:
        begins, ends = list(region.producers), [region.consumer]
        for found in region.adapted:
            is_end = found.host == region.consumer
            (ends if is_end else begins).extend(pair[not is_end] for pair in found.pairs)
        for paths, dim in ((begins, 1), (ends, 0)):
            cuts = {path: region.cut_of(f"{path}.weight") for path in paths}
            transposed |= {path: cut is not None and cut.dim == dim for path, cut in cuts.items()}
    # parameters with parts that lie on several ranks, by their layers
    copied: dict[str, dict[str, tuple[int, tuple[FusedPart, ...]]]] = defaultdict(dict)
    for cut in kind.cuts() if sums_at_once else ():
        if any(part.copies(runtime.group.size) > 1 for part in cut.parts):
            copied[owner(cut.name)][cut.name.rpartition(".")[2]] = cut.dim, cut.parts

    def column(path: str, **options: Any) -> ColumnLayer:
        done.append(at(path))
        return ColumnLayer(done[-1], transposed.get(path, False), copied.get(path, {}), **options)

    for planned in kind.regions:
        region = planned.region
        for path in region.spanning:
            cut = region.cut_of(f"{path}.weight")
            assert cut is not None
            layers.norm_over_all_features(at(path), cut.parts, runtime)
        done += _wrap_consumer(block, kind, region, transposed, runtime, sums_at_once)
        if region.container or planned.form.numbers:
            layers.container(at(region.container), region.container, planned.form, runtime)
    if kind.norms:
        branches = [
            LayersOfInput([column(path) for path in paths], at(norm), sums_at_once)
            for norm, paths in zip(kind.norms, kind.gathers, strict=True)
        ]
        layers.SharedInput(runtime, branches)
        return {*done, *map(at, kind.norms)}
    latent = {path for region in regions for path in region.latent}
    for path in (path for region in regions for path in region.fed):
        layers.local_linear(column(path), runtime)
    for paths in kind.gathers:
        around = {
            path: found for region in regions for path in paths if (found := region.adapters_of(path)) is not None
        }
        linears = [
            column(path, sums=sums_at_once and path in latent, parts=kind.parts_of(path))
            for path in (*paths, *(second for found in around.values() for _, second in found.pairs))
        ]
        if not around:
            layers.SharedInput(runtime, [LayersOfInput(linears)])
            continue
        for layer in linears:
            layers.local_linear(layer, runtime)
        layers.GatheredInput(runtime, [at(around[path].around if path in around else path) for path in paths])
    for path in (path for region in regions for found in region.adapted for path in found.idle):
        layers.refuse_idle(at(path), path)
        done.append(at(path))
    return set(done)


def _wrap_consumer(
    block: nn.Module,
    kind: BlocksPlan,
    region: Region,
    transposed: dict[str, bool],
    runtime: Runtime,
    sums_at_once: bool,
) -> list[nn.Module]:
    """Wrap the layer that ends a region, with its adapters, and return the modules that hold cut parameters."""
    reduction = layers.Reduction(
        defers=region.consumer in kind.summed[:-1],
        begins=region.consumer in kind.summed[:1],
        takes_deferred=region.consumer in kind.summed[-1:],
        sums_bias=sums_at_once and runtime.sequence.cut,
    )
    found = region.adapters_of(region.consumer)
    if found is None:
        consumer = block.get_submodule(region.consumer)
        layers.row_parallel(consumer, transposed[region.consumer], runtime, reduction)
        return [consumer]
    cut = [
        ColumnLayer(block.get_submodule(path), transposed[path], parts=kind.parts_of(path))
        for path in (region.consumer, *(first for first, _ in found.pairs))
    ]
    for layer in cut:
        layers.local_summand(layer, runtime, sums_at_once=sums_at_once)
    layers.reduce_behind(block.get_submodule(found.around), runtime, reduction)
    return [layer.module for layer in cut]


# --- sum partial gradients over the tensor axis, for whole parameters and for parts that several ranks hold


@dataclass(frozen=True)
class Sums:
    """Parameters that several ranks hold, sorted by how their gradients are combined.

    Attributes:
        whole: whole on every rank, with a partial gradient on each.
        copied: cut, but some parts lie on several ranks, with a partial gradient on each.
        alike: whole, with the same gradient on every rank. Their mean is taken: kernels that add up in no fixed order
            would let the ranks drift apart.
    """

    whole: list[nn.Parameter] = field(default_factory=list)
    copied: list[nn.Parameter] = field(default_factory=list)
    alike: list[nn.Parameter] = field(default_factory=list)


def sums_of(model: nn.Module, plan: Plan) -> Sums:
    """Return the parameters that several ranks hold."""
    tensor, own, found = plan.tensor, plan.experts, Sums()
    for raw, parameter in model.named_parameters() if tensor is not None else ():
        name = clean(raw)
        if own is not None and own.has(name):
            continue
        assert tensor is not None
        if (cut := tensor.cut_of(name, parameter.shape)) is None:
            (found.whole if tensor.is_summed(name) else found.alike).append(parameter)
        elif any(part.copies(tensor.ranks) > 1 for part in cut[1]):
            found.copied.append(parameter)
    return found


@contextmanager
def gradients_aside(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Put gradients from before aside, and add them afterwards."""
    before = [(parameter, parameter.grad) for parameter in parameters]
    for parameter, _ in before:
        parameter.grad = None
    yield
    for parameter, earlier in before:
        if earlier is not None:
            parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)


@contextmanager
def summing(sums: Sums, group: RankGroup) -> Iterator[None]:
    """Sum over ``group``, on exit, the gradients that backwards inside add."""
    with gradients_aside((*sums.whole, *sums.copied, *sums.alike)):
        yield
        for parameter in sums.alike:
            if parameter.grad is not None:
                local_part(parameter.grad).div_(group.size)
        places = [(local_part(p.grad), 0, 1) for p in (*sums.whole, *sums.alike) if p.grad is not None]
        for parameter in sums.copied:
            # ranks with copies of the same part share a slot
            for piece in pieces(parameter.grad) if parameter.grad is not None else ():
                if (n := piece.copies) > 1:
                    places.append((piece.local, group.rank // n, group.size // n))
        functions.add_up(places, group)


# --- rehearse a tensor plan before its first use, with threads for ranks, and compare with plain torch


def prove(facts: ModelFacts, plan: TensorPlan, *, sums_at_once: bool = False) -> None:
    """Rehearse the plan on a small copy, without communication, once for each; raise where results differ."""
    model = facts.module
    if (plan, sums_at_once) in facts.measurements.proven:
        return
    sample = facts.measurements.structure(plan.ranks).sample
    small = plan.for_sample(sample, model)
    for inputs, logits in _performances(sample, plan.ranks):
        run = partial(rehearse, plan=small, inputs=inputs, logits=logits, sums_at_once=sums_at_once)
        try:
            why = why_wrong(sample.model, run)
        except Exception as error:
            words = f"its forward or backward fails: {type(error).__name__}: {error}"
            raise UnsupportedError(_refused(facts, plan, words)) from error
        if why:
            raise UnsupportedError(_refused(facts, plan, why))
    facts.measurements.proven.add((plan, sums_at_once))


Logits = Literal["whole", "own", "never"]
"""How a loss is computed: from all logits on every rank, from each rank's part of them, or by the head in chunks."""


def _performances(sample: Sample, ranks: int) -> Iterator[tuple[dict[str, Any], Logits]]:
    """Yield the cases to rehearse: every kind of loss, a padding mask, a long row that does not divide, images."""
    yield sample.inputs[0], "own"
    yield sample.inputs[-1], "whole"
    name, tokens = next(iter(sample.long.items()))
    yield sample.long | {name: tokens[:1, tokens.shape[1] % ranks == 0 :]}, "never"
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
) -> Errors:
    """Compare ranks with one process. ``model`` is a small one with weights, in fp64."""
    reference = copy_of(model)
    expected_logits = logits_of(reference(**inputs))
    expected_loss = loss_of(expected_logits)
    expected_loss.backward()
    by_token = expected_logits.dim() == 3  # a classifier of whole rows has no loss of tokens
    logits = logits if plan.head and not plan.tail.obstacle_if_cut and by_token else "whole"

    def on_rank(group: Thread) -> tuple[float, dict[str, Tensor]]:
        made = copy_of(model)
        vocabulary = made.get_submodule(plan.head).get_parameter("weight").shape[0] if plan.head else 0
        runtime = wrap_modules(made, plan, group, sums_at_once=sums_at_once)
        cuts = {clean(name): plan.cut_of(clean(name), p.shape) for name, p in made.named_parameters()}
        for name, parameter in made.named_parameters():
            cut = cuts[clean(name)]
            if cut is not None:
                parameter.data = take(parameter.data, *cut, group.rank, group.size).clone()
        for module in runtime.own:
            # Python finds these before the parameters
            module.__dict__.update({key: Resting(p) for key, p in module._parameters.items() if p is not None})
        if logits == "whole":
            loss = loss_of(logits_of(made(**inputs)))
        else:
            labels = labels_of((*next(iter(inputs.values())).shape, vocabulary))
            request = LossRequest(labels, chunks=2)
            runtime.logits, runtime.request = ("own", None) if logits == "own" else (runtime.logits, request)
            output = made(**inputs)
            if logits == "own":
                assert runtime.shard is not None
                request.result = vocabulary_parallel_cross_entropy_sum(logits_of(output), labels, runtime.shard)
            assert request.result is not None
            loss, runtime.request = request.result / labels.numel(), None
        loss.backward()
        gradients = {}
        for name, parameter in made.named_parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if not sums_at_once and cuts[clean(name)] is None and plan.is_summed(clean(name)):
                gradient = group.sum(gradient.clone())
            gradients[clean(name)] = gradient
        return loss.item(), gradients

    found = on_threads(plan.ranks, on_rank)

    def wholes(name: str, gradient: Tensor) -> list[Tensor]:
        parts, cut = [gradients[name] for _, gradients in found], plan.cut_of(name, gradient.shape)
        if cut is None:
            return parts
        if is_plain(cut[1], plan.ranks):
            return [torch.cat(parts, dim=cut[0])]
        whole = parts[0].new_zeros(gradient.shape)
        for rank, part in enumerate(parts):
            runs = ranges(cut[1], rank, plan.ranks)
            split = part.split([high - low for low, high in runs], dim=cut[0])
            for piece, (low, high) in zip(split, runs, strict=True):
                here = whole.narrow(cut[0], low, high - low)
                here.copy_(piece) if sums_at_once else here.add_(piece)  # copies are added up, unless they are sums
        return [whole]

    return errors_of([loss for loss, _ in found], expected_loss.item(), reference, wholes)


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
