"""Let the head compute the loss itself, in chunks, on request, so that whole logits never exist."""

from __future__ import annotations

from torch import nn

from meshwright.core.record import recall, remember
from meshwright.distributed.tensor.ends import answer_behind, loss_computing_head
from meshwright.distributed.tensor.runtime import LossSite, runtime_of
from meshwright.planning.plan import Plan


def apply(model: nn.Module, plan: Plan) -> nn.Module:
    """Enable the planned head to compute the loss; a head that is cut can do so already."""
    assert plan.loss is not None
    runtime = runtime_of(model)
    if runtime is None or (plan.tensor is not None and not plan.tensor.head):
        site = runtime or LossSite()
        loss_computing_head(model.get_submodule(plan.loss.head), site)
        answer_behind(model, site)
        remember(model, site)
    return model


def site_of(model: nn.Module) -> LossSite | None:
    """Return the place of loss requests to the model's head; None for a head that computes logits only."""
    return runtime_of(model) or recall(model, LossSite)
