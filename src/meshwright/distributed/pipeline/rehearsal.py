"""Rehearse a cut into stages before its first use, on a small copy of the model with one block for each stage.

The code that makes the stages of the real model makes them here too; only the transport of messages differs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.core.errors import UnsupportedError
from meshwright.core.names import clean
from meshwright.distributed.step.deferred import DeferredGradients, defer_linear
from meshwright.introspection.facts import ModelFacts
from meshwright.introspection.outputs import logits_of
from meshwright.introspection.small.copies import copy_of
from meshwright.introspection.stages.between_blocks import read_outside
from meshwright.planning.pipeline.plan import PipelinePlan, StagePlan

from .absent import StageIO
from .split import arguments_of, stage_of

LARGEST_ERROR = 1e-6
"""Largest relative error, in fp64; models that compute in fp32 inside are not more exact."""


def prove(facts: ModelFacts, plan: PipelinePlan, ranks: int) -> None:
    """Rehearse the plan on a small copy of the model, without communication, once for each model and plan.

    Args:
        ranks: size of the tensor axis, for which the small copy was measured.

    Raises:
        UnsupportedError: the stages' results differ from the whole model's; the text names the first tensor that does.
    """
    sample = facts.measurements.structure(ranks).sample
    stages = tuple(StagePlan(0, (block,)) for block in sample.blocks)
    small = replace(plan, stages=stages, dtype="float64")
    if small in facts.measurements.proven:
        return
    for inputs in (*sample.inputs, *filter(None, [sample.pictured])):
        try:
            errors = rehearse(sample.model, small, inputs)
        except Exception as error:
            outside = read_outside(sample.model, sample.blocks, inputs)
            why = outside or f"its forward or backward fails: {type(error).__name__}: {error}"
            raise UnsupportedError(_refused(facts, plan, why)) from error
        worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
        if not errors[worst] <= LARGEST_ERROR:
            what = "the loss" if worst == "loss" else f"the gradient of {worst}"
            wrong = f"{what} is wrong (relative error {errors[worst]:.1e})"
            outside = read_outside(sample.model, sample.blocks, inputs)
            raise UnsupportedError(_refused(facts, plan, f"{wrong}: {outside}" if outside else wrong))
    facts.measurements.proven.add(small)


def _refused(facts: ModelFacts, plan: PipelinePlan, why: str) -> str:
    return (
        f"layout.pp = {plan.ranks}: {facts.kind}, cut between its blocks, was rehearsed on a small copy of it, and"
        f" {why}. Only what one block gives to the next may go from stage to stage. Set layout.pp = 1."
    )


def rehearse(model: nn.Module, plan: PipelinePlan, inputs: dict[str, Any]) -> dict[str, float]:
    """Return the relative error of the loss ("loss"), and of each parameter's gradient, against the whole model.

    Args:
        model: a small model with weights.
        plan: plan of its stages.
        inputs: arguments of its forward.
    """
    reference = copy_of(model)
    expected_loss = _loss(reference, inputs)
    expected_loss.backward()
    loss, found = _through_stages(copy_of(model), plan, inputs)
    errors = {"loss": float(((loss - expected_loss) / expected_loss).abs().detach())}
    expected = {clean(name): p.grad for name, p in reference.named_parameters() if p.grad is not None}
    scale = float(torch.stack([gradient.norm() for gradient in expected.values()]).norm())
    for name, gradient in expected.items():
        off = (found.get(name, torch.zeros_like(gradient)) - gradient).norm()
        errors[name] = float(off / gradient.norm().clamp(min=1e-6 * scale))
    return errors


def _through_stages(model: nn.Module, plan: PipelinePlan, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss, and the gradients of the parameters by name.

    The gradients of tied parameters add up, since the stages share the parameters here.
    """
    passages = [StageIO() for _ in plan.stages]
    stages = [stage_of(model, plan, number, passage) for number, passage in enumerate(passages)]
    deferred = DeferredGradients()
    for stage, module in zip(plan.stages, stages, strict=True):
        for path, transposed in plan.kind_of(stage.blocks[0]).linears if plan.splits_backward else ():
            defer_linear(module.get_submodule(f"{stage.blocks[0]}.{path}"), transposed, deferred)
    left: list[Tensor] = []
    entered: list[Tensor | None] = []
    for number, (module, passage) in enumerate(zip(stages, passages, strict=True)):
        passage.shape = tuple(next(iter(inputs.values())).shape)
        passage.entering = left[-1].detach().requires_grad_() if left else None
        entered.append(passage.entering)
        output = module(**arguments_of(number, inputs))
        left.append(_loss_of(output) if module is stages[-1] else _given(passage))
    gradient: Tensor | None = None
    for number in reversed(range(len(stages))):
        deferred.begin(number)
        torch.autograd.backward(left[number], gradient)
        deferred.end()
        gradient = None if (given := entered[number]) is None else given.grad
        deferred.do(number)
    found = {clean(name): p.grad for name, p in model.named_parameters() if p.grad is not None}
    return left[-1].detach(), found


def _given(passage: StageIO) -> Tensor:
    assert passage.leaving is not None
    return passage.leaving


def _loss(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    return _loss_of(model(**inputs))


def _loss_of(output: Any) -> Tensor:
    logits = logits_of(output)
    labels = torch.arange(logits[..., 0].numel(), device=logits.device) * 7 % logits.shape[-1]  # of tokens, or of rows
    return F.cross_entropy(logits.flatten(0, -2), labels)
