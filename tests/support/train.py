"""The job of a parity test: compute a problem in some way with meshwright, on every rank."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from meshwright import parallelize
from meshwright.core.losses import cross_entropy_sum
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.distributed.process.world import get_world_info

from .oracle import Errors, Named, Outcome, differences, oracle
from .problems import SEED, Problem, Way, as_brought, make_optimizer, share


class Disturbed(Exception):
    """Raised on purpose."""


class Loss:
    """The usual loss, until a test disturbs it. What is not finite is so on the last rank only."""

    disturbance = ""

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = cross_entropy_sum(logits, labels)
        rank, _, world = get_world_info()
        if self.disturbance == "raise":
            raise Disturbed
        if rank == world - 1:
            if self.disturbance == "infinite":  # with finite gradients
                return loss + torch.inf
            if self.disturbance == "nan":
                return loss * torch.nan
            if self.disturbance == "nan in backward":  # the loss stays what it is
                return loss + (logits.sum() * 0).sqrt()
        return loss


def lay_out(problem: Problem, way: Way, **options: Any) -> ParallelModel:
    techniques = {"precision": {"master": problem.dtype}, "freeze": problem.freeze, **dict(way.techniques)}
    return parallelize(
        problem.model, way.layout, techniques=techniques, seed=SEED, microbatch_rows=way.microbatch_rows, **options
    )


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor on every rank. Collective."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def weights(model: ParallelModel) -> Named:
    return collect(dict(model.named_parameters()))


def gradients(model: ParallelModel) -> Named:
    return collect({name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None})


def collect(tensors: Named) -> Named:
    """The whole tensors on rank 0, nothing elsewhere.

    One collective for all, where ``full_tensor`` would take one for each.
    """
    if not dist.is_initialized():
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}
    first = dist.get_rank() == 0
    mine = [
        (name, tensor.shape, *_placed(tensor))
        for name, tensor in tensors.items()
        if first or isinstance(tensor, DTensor)
    ]
    everybodys: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(mine, everybodys if first else None)
    found: Named = {}
    for name, shape, offset, part in [item for one in everybodys if one for item in one]:
        into = found.setdefault(name, torch.full(shape, torch.nan, dtype=part.dtype))
        into[tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))] = part
    return found


def _placed(tensor: torch.Tensor) -> tuple[tuple[int, ...], torch.Tensor]:
    """Where this rank's part begins, and the part."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim(), tensor.detach().clone()
    offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1]
    part = tensor.to_local().detach().clone()
    return (tuple(offset) if part.numel() else (0,) * tensor.dim()), part


def mutated(name: str) -> AbstractContextManager:
    from . import mutants

    return getattr(mutants, name)() if name else nullcontext()


DISTURBANCES = ("raise", "raise in backward", "infinite", "evaluate")
"""What may happen in the second step of a run without changing its outcome.

"raise" and "raise in backward": a first attempt breaks off in the loss, or in the middle of the backward, of the
first of several microbatches. "infinite": an extra step whose loss, not its gradients, is infinite on one rank.
"evaluate": evaluation and generation before the optimizer step, and evaluation after it.
"""


def train(problem: Problem, way: Way, disturbances: tuple[str, ...] = (), mutant: str = "") -> Outcome:
    """The outcome on this rank (tensors on rank 0 only); replicas are audited at the end.

    ``mutant``: a name in support.mutants.
    """
    with mutated(mutant):
        return _train(problem, way, disturbances)


def _train(problem: Problem, way: Way, disturbances: tuple[str, ...]) -> Outcome:
    rank, _, world = get_world_info()
    compiles = "compile" in dict(way.techniques)
    if compiles:
        torch._dynamo.reset()  # earlier jobs of this worker count towards the limit of recompilations
        torch._dynamo.utils.counters.clear()
    loss_fn = Loss()
    model = lay_out(problem, way, loss_fn=loss_fn)
    optimizer = make_optimizer(problem.optimizer, model.parameters())
    outcome = Outcome([], [], weights(model), {}, {})
    for number, batch in enumerate(problem.data.steps(problem.steps)):
        mine = as_brought(share(batch, rank, world), way)
        now = disturbances if number == 1 else ()
        for disturbance in [d for d in now if d != "evaluate"]:
            in_pieces = as_brought(share(batch, rank, world), replace(way, microbatches="list"))
            disturb(model, loss_fn, disturbance, in_pieces, optimizer)
        loss = model.forward_backward(mine)
        if number == 0:
            outcome.gradients = gradients(model)
        if "evaluate" in now:
            model.evaluate(mine)
            model.generate([1, 2, 3], 2)
        result = model.optimizer_step(optimizer, problem.max_norm)
        if "evaluate" in now:
            model.evaluate(mine)
        outcome.losses.append(float(loss))
        outcome.norms.append(result.grad_norm)
    outcome.parameters = weights(model)
    model.audit()
    assert not compiles or torch._dynamo.utils.counters["stats"]["unique_graphs"], "nothing was compiled"
    return outcome


def disturb(
    model: ParallelModel, loss_fn: Loss, disturbance: str, batch: Any, optimizer: torch.optim.Optimizer
) -> None:
    loss_fn.disturbance = disturbance
    trap = model.parts[0].get_submodule("layers.1").register_forward_hook(_raise_in_backward)
    if disturbance != "raise in backward":
        trap.remove()
    try:
        model.forward_backward(batch)
        model.optimizer_step(optimizer)
    except Disturbed:
        optimizer.zero_grad(set_to_none=True)
    trap.remove()
    loss_fn.disturbance = ""


def _raise_in_backward(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
    def fail(gradient: torch.Tensor) -> None:
        raise Disturbed

    if output.requires_grad:
        output.register_hook(fail)


def gradients_of_first_step(problem: Problem, way: Way, mutant: str = "", disturbance: str = "") -> Named:
    rank, _, world = get_world_info()
    batch, loss_fn = share(problem.data.step(0), rank, world), Loss()
    with mutated(mutant):
        model = lay_out(problem, way, loss_fn=loss_fn)
        if disturbance:
            in_pieces = as_brought(batch, replace(way, microbatches="list"))
            disturb(model, loss_fn, disturbance, in_pieces, make_optimizer("sgd", model.parameters()))
        model.forward_backward(as_brought(batch, way))
    return gradients(model)


def compare(problem: Problem, way: Way) -> Errors:
    """Train and compare with the oracle, computed here and now on rank 0."""
    outcome = train(problem, way)
    found = differences(outcome, oracle(problem)) if get_world_info()[0] == 0 else {}
    if dist.is_initialized():
        dist.barrier()
    return found
