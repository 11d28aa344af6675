"""The oracle: one process, plain torch, no code of ours but the model and its initial weights.

And the one measure of equality.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.models.layers import Router

from .problems import SEED, Problem, Way, everybodys, frozen, make_optimizer, pieces

Named = dict[str, torch.Tensor]


@dataclass
class Outcome:
    """What a run came to: per step losses and gradient norms.

    By name the initial weights, first gradients, final weights.
    """

    losses: list[float]
    norms: list[float]
    initial: Named
    gradients: Named
    parameters: Named


def relative_errors(found: Named, reference: Named) -> dict[str, float]:
    """Per tensor: ‖found − reference‖₂ / max(‖reference‖₂, 1e-6 · global norm of the reference).

    Infinite where one is missing.
    """
    whole = torch.stack([r.double().norm() for r in reference.values()]).norm().item()
    errors = dict.fromkeys(found.keys() ^ reference.keys(), math.inf)
    for name in found.keys() & reference.keys():
        r = reference[name].double()
        error = ((found[name].double() - r).norm() / max(r.norm().item(), 1e-6 * whole)).item()
        errors[name] = math.inf if math.isnan(error) else error
    return errors


Errors = dict[str, dict[str, float]]
"""What was compared -> tensor (or step) -> relative error."""


def differences(found: Outcome, reference: Outcome) -> Errors:
    """The relative error of everything that an outcome holds; infinite for a tensor of another dtype."""
    errors: Errors = {}
    for what in ("initial", "gradients", "parameters"):
        mine, theirs = getattr(found, what), getattr(reference, what)
        others = [name for name in mine.keys() & theirs.keys() if mine[name].dtype != theirs[name].dtype]
        errors[what] = relative_errors(mine, theirs) | dict.fromkeys(others, math.inf)
    for what in ("losses", "norms"):
        pairs = zip(getattr(found, what), getattr(reference, what), strict=True)
        relative = {f"step {n}": abs(a - b) / abs(b) for n, (a, b) in enumerate(pairs)}
        errors[what] = {step: math.inf if math.isnan(e) else e for step, e in relative.items()}
    return errors


def worst(errors: Errors) -> dict[str, float]:
    return {what: max(by_name.values()) for what, by_name in errors.items()}


def excesses(errors: Errors, bound: float, floors: Errors | None = None) -> list[str]:
    """One line for each error above max(``bound``, 4 × its floor), the worst first.

    Initial weights must be equal bit by bit.
    """
    found = []
    for what, by_name in errors.items():
        for name, error in by_name.items():
            limit = 0.0 if what == "initial" else max(bound, 4 * floors[what][name] if floors else 0.0)
            if error > limit:
                found.append((error, f"{what} of {name}: {error:.2e} > {limit:.1e}"))
    return [line for _, line in sorted(found, reverse=True)]


def faults(runs: list[Outcome], reference: Outcome, bound: float, floors: Errors | None = None) -> list[str]:
    """What is wrong with the outcomes of all ranks, worst first: they must report the same, and rank 0's must be the
    reference's.
    """
    disagree = [
        f"rank {rank} reports other losses or norms than rank 0"
        for rank, run in enumerate(runs)
        if said(run) != said(runs[0])
    ]
    return excesses(differences(runs[0], reference), bound, floors) + disagree


def said(run: Outcome) -> tuple[list[str], list[str]]:
    return [str(x) for x in run.losses], [str(x) for x in run.norms]  # as text: NaN equals NaN


def build(problem: Problem) -> nn.Module:
    """The model of a problem with its initial weights, in one process. Ours and those on meta follow the init law."""
    from meshwright.distributed.weights.constructed import materialise
    from meshwright.introspection.facts import model_facts
    from meshwright.introspection.source import as_module

    model = as_module(problem.model)
    facts = model_facts(model)
    model = model.to(getattr(torch, problem.dtype)) if problem.dtype else model
    if facts.on_meta:
        ties = {alias: p.name for p in facts.parameters for alias in p.aliases}
        materialise(model, torch.device("cpu"), SEED, ties)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and not frozen(name, problem.freeze))
    return model


def loss_sum(model: nn.Module, piece: Named, problem: Problem) -> torch.Tensor:
    inputs = {argument: piece[key] for key, argument in problem.data.arguments}
    output = model(piece["tokens"], **inputs)
    logits = output if isinstance(output, torch.Tensor) else output.logits
    labels = piece["labels"].where(piece["loss_mask"], -100)
    logits = logits.flatten(0, 1)
    return F.cross_entropy(
        logits.to(torch.promote_types(logits.dtype, torch.float32)),
        labels.flatten(),
        ignore_index=-100,
        reduction="sum",
    )


def real_tokens(batch: Named) -> int:
    return int(((batch["labels"] != -100) & batch["loss_mask"]).sum())


def values(model: nn.Module) -> Named:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def oracle(
    problem: Problem, order: Any = (), make: Callable[[nn.Module], torch.optim.Optimizer] | None = None
) -> Outcome:
    """Train in one process.

    ``order``: rows before which a step's batch is cut; or "backwards", to take its rows from the last. ``make``: makes
    the optimizer, by default the problem's.
    """
    model = build(problem).train()
    routers = [module for module in model.modules() if isinstance(module, Router)]
    optimizer = make(model) if make is not None else make_optimizer(problem.optimizer, model.parameters())
    outcome = Outcome([], [], values(model), {}, {})
    for batch in problem.data.steps(problem.steps):
        if order == "backwards":
            batch = {key: value.flip(0) for key, value in batch.items()}
        losses = []
        for piece in pieces(batch, () if order == "backwards" else order):
            loss = loss_sum(model, piece, problem) / real_tokens(batch)
            (
                loss
                + sum(router.auxiliary for router in routers if router.auxiliary is not None) / batch["tokens"].numel()
            ).backward()
            losses.append(loss.item())
        outcome.losses.append(sum(losses))
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        outcome.gradients = outcome.gradients or {name: g.clone() for name, g in gradients.items()}
        outcome.norms.append(torch.stack([g.double().norm() for g in gradients.values()]).norm().item())
        if problem.max_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), problem.max_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for router in routers:
            router.balance(router.counts)
    outcome.parameters = values(model)
    return outcome


def floors(problem: Problem) -> Errors:
    """What rounding alone does: for everything compared, the worst error that comes from reordering one process's own
    sums.
    """
    base, rows = oracle(problem), problem.data.rows
    orders = (range(1, rows), range(2, rows, 2), (rows // 2,), (1, 3, rows - 2), "backwards")
    found = [differences(oracle(problem, order), base) for order in orders]
    return {what: {name: max(f[what][name] for f in found) for name in found[0][what]} for what in found[0]}


def bf16_gradients(problem: Problem, way: Way) -> Named:
    """The first step's gradients with parameters and activations in bf16: plain torch on a cast copy, in the
    microbatches of the way, summed over them in fp32.
    """
    model = copy.deepcopy(build(problem)).to(torch.bfloat16).train()
    batch = problem.data.step(0)
    total: Named = {}
    for piece in everybodys(batch, way):
        (loss_sum(model, piece, problem) / real_tokens(batch)).backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                total[name] = total.get(name, 0) + p.grad.float()
                p.grad = None
    return total
