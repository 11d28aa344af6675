"""A small problem, and what plain torch and a layout make of it on the device: the oracle has no code of ours but the
model and its initial weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.models.decoder import Decoder
from meshwright.models.decoder_config import DecoderConfig, MoEConfig

from .machine import machine

Named = dict[str, Tensor]
SEED, MAX_NORM, LR = 3, 1.0, 1e-3
DRAW_ON = "cpu"  # one seed gives other weights on each device, and some techniques keep weights in host memory
EXACT, SINGLE, FLOOR, NARROW = 1e-10, 1e-6, 4.0, 2.0
"""CONTRIBUTING.md, "How parity is measured": the bound in fp64; that in fp32, and the factor on what reordering sums
does; the factor on what a narrow dtype does."""
ORDERS = ("whole", "rows", "backwards")


@dataclass(frozen=True)
class Problem:
    """Some steps of training that one process and a layout compute.

    Attributes:
        experts: a mixture of experts takes the place of the feed-forwards.
        dtype: of everything (float64, float32), or of forward and backward from fp32 weights.
        techniques: of the layout, besides dtypes.
        rows: of the global batch; 0: as many as suit one device.
    """

    experts: bool = False
    dtype: str = "float64"
    techniques: dict[str, Any] = field(default_factory=dict)
    microbatch_rows: int = 0
    steps: int = 3
    rows: int = 0

    @property
    def config(self) -> DecoderConfig:
        small = machine().is_dry
        base = DecoderConfig(97, 32, 2, 4, 2, 48, 64) if small else DecoderConfig(1000, 512, 4, 8, 4, 1408, 512)
        moe = MoEConfig(n_experts=4, top_k=2, hidden_dim=32 if small else 512)
        return replace(base, qk_norm=True, moe=moe if self.experts else None)

    @property
    def is_exact(self) -> bool:
        return self.dtype == "float64"

    @property
    def master(self) -> str:
        return self.dtype if self.dtype in ("float64", "float32") else "float32"

    @property
    def compute(self) -> str:
        return "bfloat16" if self.dtype == "float8" else self.dtype

    @property
    def requested(self) -> dict[str, Any]:
        return {**self.techniques, "precision": {"master": self.master, "compute": self.compute}}

    def batch(self, step: int) -> Named:
        rows, seq = (4, 16) if machine().is_dry else (8, 128)
        rows = self.rows or rows
        generator = torch.Generator().manual_seed(1000 + step)
        tokens = torch.randint(0, self.config.vocab_size, (rows, seq + 1), generator=generator)
        labels = tokens[:, 1:].contiguous()
        for row in range(rows):  # rows of unlike numbers of real tokens: no mean of means is the mean
            labels[row, : (5 * row + step) % (seq - 1)] = -100
        return {"tokens": tokens[:, :-1].contiguous(), "labels": labels}

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        if self.is_exact:
            return torch.optim.AdamW(parameters, lr=LR)
        return torch.optim.SGD(parameters, lr=0.1)  # AdamW turns rounding into a difference without bound


@dataclass
class Outcome:
    """Losses and gradient norms by step, the first gradients and the last weights by name, on the CPU."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: Named = field(default_factory=dict)
    parameters: Named = field(default_factory=dict)


def plain_model(problem: Problem) -> nn.Module:
    """Build the model in one process, on the device, with its initial weights."""
    from meshwright.distributed.weights.constructed import materialise

    with torch.device("meta"):
        model: nn.Module = Decoder(problem.config)
    model = model.to(getattr(torch, problem.master))
    materialise(model, torch.device(machine().device), SEED, {}, draw_on=DRAW_ON)
    return model


def loss_sum(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    logits = model(tokens).flatten(0, 1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")


def _pieces(batch: Named, order: str) -> Iterator[tuple[Tensor, Tensor]]:
    device = machine().device
    tokens, labels = (batch[key].to(device) for key in ("tokens", "labels"))
    if order == "backwards":
        tokens, labels = tokens.flip(0), labels.flip(0)
    size = 1 if order == "rows" else len(tokens)
    yield from zip(tokens.split(size), labels.split(size), strict=True)


def _computing(model: nn.Module, problem: Problem) -> nn.Module:
    """Return the module that forwards and backwards run on: the model, or a copy in a narrow dtype."""
    if problem.dtype in ("float64", "float32"):
        return model
    narrow = copy.deepcopy(model).to(getattr(torch, problem.compute))
    if problem.dtype == "float8":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=machine().is_dry)
        convert_to_float8_training(narrow, config=config, module_filter_fn=lambda _, path: "layers." in path)
    return narrow


def plain(problem: Problem, order: str = "whole") -> Outcome:
    """Train in one process with plain torch, sums in one of several orders."""
    model, outcome = plain_model(problem).train(), Outcome()
    optimizer = problem.optimizer(model.parameters())
    scale = 1024.0 if problem.dtype == "float16" else 1.0
    for step in range(problem.steps):
        batch = problem.batch(step)
        real, computing, losses = int((batch["labels"] != -100).sum()), _computing(model, problem), []
        for tokens, labels in _pieces(batch, order):
            loss = loss_sum(computing, tokens, labels) / real
            (loss * scale).backward()
            losses.append(loss.item())
        if computing is not model:
            for mine, narrow in zip(model.parameters(), computing.parameters(), strict=True):
                mine.grad = narrow.grad.to(mine.dtype) / scale
        outcome.losses.append(sum(losses))
        outcome.gradients = outcome.gradients or {name: p.grad.cpu() for name, p in model.named_parameters()}
        outcome.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    outcome.parameters = {name: p.detach().cpu() for name, p in model.named_parameters()}
    return outcome


def laid_out(problem: Problem, layout: Any) -> Outcome:
    """Train on a layout; tensors on rank 0 alone. Collective."""
    from meshwright import parallelize
    from meshwright.distributed.mesh import data_position
    from meshwright.distributed.weights.shards import whole_on_first

    model = parallelize(
        problem.config,
        layout,
        techniques=problem.requested,
        seed=SEED,
        microbatch_rows=problem.microbatch_rows,
        draw_on=DRAW_ON,
    )
    assert model.device.type == machine().device, f"computed on {model.device.type}, not on {machine().device}"
    outcome, optimizer = Outcome(), problem.optimizer(list(model.parameters()))
    rank, ranks = data_position(model.mesh)
    differ = model.plan.pipeline is not None
    for step in range(problem.steps):
        own = {key: value.chunk(ranks)[rank] for key, value in problem.batch(step).items()}
        outcome.losses.append(float(model.forward_backward(own)))
        if step == 0:
            gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            outcome.gradients = whole_on_first(gradients, differ=differ)
        outcome.norms.append(model.optimizer_step(optimizer, max_norm=MAX_NORM).grad_norm)
    outcome.parameters = whole_on_first(dict(model.named_parameters()), differ=differ)
    return outcome


def tensor_errors(found: Named, reference: Named) -> dict[str, float]:
    """Return ‖found − reference‖₂ / max(‖reference‖₂, 1e-6 · global norm) by tensor; infinite where one is missing."""
    whole = torch.stack([r.double().norm() for r in reference.values()]).norm().item()
    errors = dict.fromkeys(found.keys() ^ reference.keys(), float("inf"))
    for name in found.keys() & reference.keys():
        r = reference[name].double()
        error = ((found[name].double() - r).norm() / max(r.norm().item(), 1e-6 * whole)).item()
        errors[name] = error if error == error else float("inf")
    return errors


def errors_of(found: Outcome, reference: Outcome) -> dict[str, float]:
    """Return the relative error of all that an outcome holds, by "what of name"."""
    errors = {}
    for what in ("gradients", "parameters"):
        by_name = tensor_errors(getattr(found, what), getattr(reference, what))
        errors |= {f"{what} of {name}": error for name, error in by_name.items()}
    for what in ("losses", "norms"):
        pairs = zip(getattr(found, what), getattr(reference, what), strict=True)
        errors |= {f"{what} of step {n}": abs(a - b) / abs(b) for n, (a, b) in enumerate(pairs)}
    return errors


def limits(problem: Problem) -> tuple[Outcome, dict[str, float]]:
    """Return the oracle's outcome, and how far each figure of a layout may lie from it."""
    reference = plain(problem)
    if problem.is_exact:
        return reference, dict.fromkeys(errors_of(reference, reference), EXACT)
    others = [plain(problem, order) for order in ORDERS[1:]]
    if problem.dtype == "float32":
        far = [errors_of(other, reference) for other in others]
        return reference, {key: max(SINGLE, FLOOR * max(errors[key] for errors in far)) for key in far[0]}
    wide = plain(replace(problem, dtype="float32"))
    far = [errors_of(one, wide) for one in (reference, *others)]
    return reference, {key: max(SINGLE, NARROW * max(errors[key] for errors in far)) for key in far[0]}
