"""Outcomes: a problem computed by one process with plain torch, and by a layout."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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

from .observe import Observed, observing
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
    parameters: Named = field(default_factory=dict)
    """After the last step."""


def reference(problem: Problem, microbatch_rows: int = 0) -> Outcome:
    """The oracle: one process, plain torch, the loss by ``F.cross_entropy``. ``microbatch_rows``: cut the batch; the sums then round
    otherwise."""
    model = build(problem)
    optimizer = problem.make_optimizer(model.parameters())
    outcome = Outcome(initial=_copies(model.named_parameters()))
    signature = Signature.of(model)
    for step in range(problem.steps):
        batch = problem.batch(step)
        count, total = _count(batch), 0.0
        with observing(model) if step == 0 else nullcontext(Observed()) as observed:
            for piece in _pieces(batch, microbatch_rows or len(batch["tokens"])):
                loss = _loss_sum(model, signature, piece) / count
                loss.backward()
                total += loss.item()
        if step == 0:
            outcome.forward, outcome.backward = observed.rows()
            outcome.gradients = _copies((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
        outcome.losses.append(total)
        norm = torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], problem.max_norm or float("inf"))
        outcome.norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
    outcome.parameters = _copies(model.named_parameters())
    return outcome


def references(problem: Problem) -> tuple[Outcome, Outcome]:
    """The oracle, and the oracle with its sums in another order (a row at a time)."""
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
    outcome.parameters = whole_on_first(_tensors(model))
    return outcome


def build(problem: Problem) -> nn.Module:
    """The model of a problem with its initial weights, in one process."""
    model = as_module(problem.source())
    facts = model_facts(model)
    model = without_dropout(model.to(getattr(torch, problem.dtype)))
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
    techniques = {**problem.techniques, "precision": {"master": problem.dtype}}
    module = without_dropout(as_module(problem.source()))
    return parallelize(module, layout, techniques=techniques, seed=problem.seed, microbatch_rows=problem.microbatch_rows)


def _their_step(model: nn.Module, batch: Batch, problem: Problem) -> float:
    """What users of a plain wrapped module do: the mean over this rank's tokens, averaged over ranks by the wrapper."""
    signature = Signature.of(getattr(model, "module", model))
    loss = _loss_sum(model, signature, batch) / _count(batch)
    loss.backward()
    return sum(agree.everybody_says(loss.item())) / get_world_info()[2]


def _loss_sum(model: nn.Module, signature: Signature, batch: Batch) -> Tensor:
    output = model(**signature.inputs(batch, torch.device("cpu")))
    logits = output if isinstance(output, Tensor) else output.logits
    logits = logits.flatten(0, 1)
    return F.cross_entropy(logits, _labels(batch).flatten(), ignore_index=-100, reduction="sum")


def _count(batch: Batch) -> int:
    """Real tokens, at least 1."""
    return max(int((_labels(batch) != -100).sum()), 1)


def _labels(batch: Batch) -> Tensor:
    mask = batch.get("loss_mask")
    return batch["labels"] if mask is None else batch["labels"].masked_fill(~mask.bool(), -100)


def _pieces(batch: Batch, rows: int):
    for begin in range(0, len(batch["tokens"]), rows):
        yield {key: value[begin : begin + rows] for key, value in batch.items()}


def _parameters(model: Any):
    return ((clean(name), parameter) for name, parameter in model.named_parameters())


def _tensors(model: Any) -> Named:
    return dict(_parameters(model))


def _copies(tensors: Any) -> Named:
    return {clean(name): tensor.detach().clone() for name, tensor in tensors}


def _of_all_ranks(sketches: Named) -> Named:
    """The rows of all ranks, in rank order; on rank 0."""
    said = agree.everybody_says(sketches)
    if get_world_info()[0] != 0:
        return {}
    names = dict.fromkeys(name for other in said for name in other)
    return {name: torch.cat([other[name] for other in said if name in other]) for name in names}
