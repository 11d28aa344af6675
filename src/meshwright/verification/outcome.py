"""Outcomes: a problem computed by one process with plain torch, and by a layout."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.comparison.observe import Observed, observing
from meshwright.core.names import clean
from meshwright.distributed import agree
from meshwright.distributed.grad_clip import clip_grad_norm_
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.distributed.parallelize import parallelize
from meshwright.distributed.setup import init_distributed
from meshwright.distributed.shards import whole_on_first
from meshwright.distributed.step_batch import Signature
from meshwright.distributed.weights import materialise
from meshwright.distributed.world import get_world_info
from meshwright.introspection.facts import model_facts
from meshwright.introspection.source import as_module
from meshwright.planning.layout import Layout

from .one_process import OneProcess, labels_of, row_losses
from .problem import Batch, Parallelize, Problem, without_dropout

Named = dict[str, Tensor]


@dataclass
class Outcome:
    """What a run came to; tensors on rank 0 only."""

    losses: list[float] = field(default_factory=list)
    """Mean over the real tokens of the global batch, per step."""
    norms: list[float] = field(default_factory=list)
    """Global gradient norm before clipping, per step."""
    initial: Named = field(default_factory=dict)
    forward: Named = field(default_factory=dict)
    """Sketches of the first step, by module; (rows of the global batch, width)."""
    backward: Named = field(default_factory=dict)
    gradients: Named = field(default_factory=dict)
    """Of the first step, by parameter."""
    parameters: dict[int, Named] = field(default_factory=dict)
    """After the first and after the last step."""

    def is_kept(self, step: int, steps: int) -> bool:
        """Whether the parameters after a step (0 the first) are compared."""
        return step in (0, steps - 1)


@dataclass
class Reference(Outcome):
    """The same of one process, with what tells how much rounding may move a sum."""

    loss_parts: list[Tensor] = field(default_factory=list)
    """Per step (rows,): each row's share of the loss."""
    norm_parts: list[Tensor] = field(default_factory=list)
    """Per step: the squared norm of each parameter's gradient."""


def reference(problem: Problem, rows: int = 0) -> Reference:
    """The oracle. ``rows``: per forward; cut batches round otherwise."""
    model = build(problem)
    one = OneProcess(model, compute=getattr(torch, problem.dtype), rows=rows)
    optimizer = problem.make_optimizer(model.parameters())
    trained = [p for p in model.parameters() if p.requires_grad]
    outcome = Reference(initial=_copies(model.named_parameters()))
    for step in range(problem.steps):
        computed = one.forward_backward(problem.batch(step), observe=step == 0)
        if step == 0:
            outcome.forward, outcome.backward = computed.observed.rows()
            outcome.gradients = _copies((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
        outcome.loss_parts.append(computed.losses)
        outcome.losses.append(computed.losses.sum().item())
        outcome.norm_parts.append(torch.stack([p.grad.double().square().sum() for p in trained if p.grad is not None]))
        outcome.norms.append(torch.nn.utils.clip_grad_norm_(trained, problem.max_norm or float("inf")).item())
        optimizer.step()
        optimizer.zero_grad()
        if outcome.is_kept(step, problem.steps):
            outcome.parameters[step + 1] = _copies(model.named_parameters())
    return outcome


def references(problem: Problem) -> tuple[Reference, Reference]:
    """The oracle, and what shows how far rounding goes: its sums in another order (a row at a time); of bfloat16, all in float32."""
    if problem.dtype == "bfloat16":
        return reference(problem), reference(replace(problem, dtype="float32"))
    return reference(problem), reference(problem, 1)


def candidate(problem: Problem, layout: Layout, parallelize_fn: Parallelize | None = None) -> Outcome:
    """The same on a layout; every rank calls it."""
    rank, _, world = get_world_info()
    model = _lay_out(problem, layout, parallelize_fn)
    ours = isinstance(model, ParallelModel)
    inner = model.parts[0] if ours else model
    optimizer = problem.make_optimizer(model.parameters())
    outcome = Outcome(initial=whole_on_first(_tensors(model)))
    for step in range(problem.steps):
        rows = len(problem.batch(step)["tokens"]) // world
        mine = {key: value[rank * rows : (rank + 1) * rows] for key, value in problem.batch(step).items()}
        with observing(inner) if step == 0 else nullcontext(Observed()) as observed:
            loss = float(model.forward_backward(mine)) if ours else _their_step(model, mine, problem)
        if step == 0:
            forward, backward = observed.rows()
            if not ours:  # they divide by their own tokens where the oracle divides by all: no fault of a module's
                share = _count(mine) / _count(problem.batch(0))
                backward = {name: rows * share for name, rows in backward.items()}
            outcome.forward, outcome.backward = _of_all_ranks(forward), _of_all_ranks(backward)
            outcome.gradients = whole_on_first({name: p.grad for name, p in _parameters(model) if p.grad is not None})
        outcome.losses.append(loss)
        if ours:
            norm = model.optimizer_step(optimizer, problem.max_norm).grad_norm
        else:
            norm = float(clip_grad_norm_(model, problem.max_norm or float("inf")))
            optimizer.step()
            optimizer.zero_grad()
        outcome.norms.append(norm)
        if outcome.is_kept(step, problem.steps):
            outcome.parameters[step + 1] = whole_on_first(_tensors(model))
    return outcome


def build(problem: Problem) -> nn.Module:
    """The model of a problem with its initial weights, in one process."""
    model = as_module(problem.source())
    facts = model_facts(model)
    model = without_dropout(model.to(getattr(torch, problem.master)))
    if facts.on_meta:
        ties = {alias: p.name for p in facts.parameters for alias in p.aliases}
        materialise(model, torch.device("cpu"), problem.seed, ties)
    frozen = [re.compile(pattern) for pattern in problem.techniques.get("freeze", ())]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and not any(pattern.search(clean(name)) for pattern in frozen))
    return model


def _lay_out(problem: Problem, layout: Layout, parallelize_fn: Parallelize | None) -> Any:
    if parallelize_fn is not None:
        return parallelize_fn(build(problem), init_distributed(layout, problem.seed))
    techniques = {**problem.techniques, "precision": {"master": problem.master, "compute": problem.dtype}}
    module = without_dropout(as_module(problem.source()))
    return parallelize(module, layout, techniques=techniques, seed=problem.seed, microbatch_rows=problem.microbatch_rows)


def _their_step(model: nn.Module, batch: Batch, problem: Problem) -> float:
    """What users of a plain wrapped module do: the mean over this rank's tokens, averaged over ranks by the wrapper."""
    signature = Signature.of(getattr(model, "module", model))
    loss = row_losses(model, signature, batch).sum() / _count(batch)
    loss.backward()
    return sum(agree.everybody_says(loss.item())) / get_world_info()[2]


def _count(batch: Batch) -> int:
    """Real tokens, at least 1."""
    return max(int((labels_of(batch) != -100).sum()), 1)


def _parameters(model: Any):
    return ((clean(name), parameter) for name, parameter in model.named_parameters())


def _tensors(model: Any) -> Named:
    return dict(_parameters(model))


def _copies(tensors: Iterable[tuple[str, Tensor]]) -> Named:
    return {clean(name): tensor.detach().clone() for name, tensor in tensors}


def _of_all_ranks(sketches: Named) -> Named:
    """The rows of all ranks, in rank order; on rank 0."""
    said = agree.everybody_says(sketches)
    if get_world_info()[0] != 0:
        return {}
    names = dict.fromkeys(name for other in said for name in other)
    return {name: torch.cat([other[name] for other in said if name in other]) for name in names}
