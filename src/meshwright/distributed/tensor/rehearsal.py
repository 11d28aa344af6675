"""Rehearse a tensor plan before its first use, with threads for ranks, and compare with plain torch.

The code that lays out the real model wraps the modules here too; only the transport of messages differs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.core.errors import UnsupportedError
from meshwright.core.names import clean
from meshwright.core.parts import is_plain, ranges, take
from meshwright.distributed.exchange.threads import Thread, on_threads
from meshwright.introspection.facts import ModelFacts
from meshwright.introspection.outputs import logits_of
from meshwright.introspection.small.copies import copy_of
from meshwright.introspection.small.sample import Sample
from meshwright.introspection.small.wide import widened
from meshwright.planning.tensor.plan import TensorPlan

from .loss import vocabulary_parallel_cross_entropy_sum
from .parallel import wrap_modules
from .runtime import LossRequest, Runtime

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
