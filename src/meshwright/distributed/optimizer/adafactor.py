"""Step parameters by factored means of squared gradients, of cut parameters too (Shazeer and Stern 2018)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.core.errors import ConfigError
from meshwright.distributed.weights.shards import SHARDS, Piece, pieces
from meshwright.distributed.weights.whole_state import whole_everywhere
from meshwright.planning.optimizer_collectives import size_of_sums

Groups = tuple[dist.ProcessGroup, ...]


class Adafactor(torch.optim.Optimizer):
    """Adafactor (arXiv 1804.04235) with the arithmetic of torch.optim.Adafactor, which cannot step cut parameters.

    The means of a matrix's squared gradients over its rows and columns, its norm and that of its update are sums over
    the ranks that have parts of it. Those of all parameters that the same axes cut travel together: two all-reduces
    for each of these axes in a step. ``row_var`` and ``col_var`` are whole on every rank; ``variance`` of vectors is
    placed as the parameter.

    Args:
        params: tensors or DTensors, or groups of them.
        lr: largest relative rate; see torch's class for the other arguments.
        beta2_decay: the mean's weight of a new gradient in step t is t to this power.
        eps: (least variance, by default the dtype's epsilon; least root mean square of a parameter).
        d: largest root mean square of an update at a rate of 1.
        weight_decay: decoupled weight decay.

    Raises:
        ConfigError: a value out of its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
    ):
        if lr < 0 or weight_decay < 0 or min(eps[0] or 0.0, eps[1]) < 0:
            raise ConfigError(f"Adafactor: lr = {lr}, weight_decay = {weight_decay} and eps = {eps} are 0 or more")
        if beta2_decay > 0 or d < 1:
            raise ConfigError(f"Adafactor: beta2_decay = {beta2_decay} is 0 or less, and d = {d} is 1 or more")
        super().__init__(
            params, {"lr": lr, "beta2_decay": beta2_decay, "eps": eps, "d": d, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of all parameters that have gradients; return what the closure returns. Collective."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stepped = [
            _Stepped.of(p, self._state(p), group)
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        _sum_together(stepped, [one.first_sums() for one in stepped])
        _sum_together(stepped, [one.update() for one in stepped])
        for one in stepped:
            one.apply()
        return loss

    def _state(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            if parameter.dim() > 1:
                *lead, rows, columns = parameter.shape
                options: dict[str, Any] = {"dtype": parameter.dtype, "device": parameter.device}
                state["row_var"] = torch.zeros((*lead, rows, 1), **options)
                state["col_var"] = torch.zeros((*lead, 1, columns), **options)
            else:
                state["variance"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        for key in ("row_var", "col_var"):  # a checkpoint's, of the parameter's shape, lies as the parameter
            if isinstance(kept := state.get(key), DTensor):
                state[key] = whole_everywhere(kept)
        return state


@dataclass
class _Stepped:
    """A parameter in a step.

    Attributes:
        groups: groups over which parts of the parameter are disjoint.
        here: this rank's boxes of the parameter, and of its gradient.
        sums: what ``first_sums`` or ``update`` returned last, summed over all parts.
        updates: updates of the boxes, before their norm is known.
    """

    parameter: Tensor
    state: dict[str, Tensor]
    group: dict[str, Any]
    groups: Groups
    here: list[tuple[Piece, Piece]]
    sums: Tensor
    norm: Tensor
    updates: list[Tensor]

    @classmethod
    def of(cls, parameter: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> _Stepped:
        gradient = parameter.grad
        assert gradient is not None
        groups: Groups = ()
        if isinstance(parameter, DTensor):
            if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
                gradient = gradient.redistribute(placements=parameter.placements)
            mesh = parameter.device_mesh
            cut = [i for i, p in enumerate(parameter.placements) if isinstance(p, SHARDS) and mesh.size(i) > 1]
            groups = tuple(mesh.get_group(i) for i in cut)
        here = list(zip(pieces(parameter), pieces(gradient), strict=True))
        empty = torch.empty(0, device=parameter.device)
        return cls(parameter, state, group, groups, here, empty, empty, [])

    @property
    def wide(self) -> torch.dtype:
        return torch.promote_types(self.parameter.dtype, torch.float32)

    def first_sums(self) -> Tensor:
        """Sum squares: of the parameter, and of the gradient's rows and columns, of this rank's first copies."""
        sums = torch.zeros(size_of_sums(self.parameter.shape), dtype=self.wide, device=self.parameter.device)
        rows, columns = self._factors(sums)
        for own, gradient in self.here:
            if own.copy:
                continue
            sums[0] += own.local.to(self.wide).square().sum()
            if self.parameter.dim() > 1:
                squares = gradient.local.to(self.wide).square()
                (*lead, top, left) = own.slices
                rows[(*lead, top, slice(None))] += squares.sum(-1, keepdim=True)
                columns[(*lead, slice(None), left)] += squares.sum(-2, keepdim=True)
        return sums

    def _factors(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows' and the columns' parts of the sums, as views; of a vector, none."""
        if self.parameter.dim() < 2:
            return sums[1:], sums[1:]
        *lead, rows, columns = self.parameter.shape
        of_rows = math.prod(lead) * rows
        return sums[1 : 1 + of_rows].view(*lead, rows, 1), sums[1 + of_rows :].view(*lead, 1, columns)

    def update(self) -> Tensor:
        """Move the means, compute updates, and return the sum of squares of those of this rank's first copies."""
        state, parameter = self.state, self.parameter
        state["step"] += 1
        weight = float(state["step"]) ** self.group["beta2_decay"]
        least = self.group["eps"][0]
        least = torch.finfo(parameter.dtype).eps if least is None else least
        self.norm = self.sums[0].sqrt()
        if parameter.dim() > 1:
            rows, columns = self._factors(self.sums)
            state["row_var"].lerp_((rows / parameter.shape[-1]).to(parameter.dtype), weight)
            state["col_var"].lerp_((columns / parameter.shape[-2]).to(parameter.dtype), weight)
            mean = state["row_var"].mean(dim=-2, keepdim=True).clamp_(min=least)
            for own, gradient in self.here:
                (*lead, top, left) = own.slices
                of_rows, of_columns = state["row_var"][(*lead, top)], state["col_var"][(*lead, slice(None), left)]
                estimate = (of_rows * of_columns).div_(mean[tuple(lead)])
                self.updates.append(estimate.clamp_(min=least * least).rsqrt_().mul_(gradient.local))
        else:
            kept = pieces(state["variance"])
            for (_, gradient), variance in zip(self.here, kept, strict=True):
                variance.local.lerp_(gradient.local.square(), weight)
                estimate = variance.local.clamp(min=least * least)
                self.updates.append(estimate.rsqrt_().mul_(gradient.local))
        total = torch.zeros(1, dtype=self.wide, device=parameter.device)
        for (own, _), update in zip(self.here, self.updates, strict=True):
            if not own.copy:
                total += update.to(self.wide).square().sum()
        return total

    def apply(self) -> None:
        """Decay the parameter, and add the update, shortened where its root mean square is too large."""
        group, elements = self.group, self.parameter.numel()
        rate = float(group["lr"])
        relative = (self.norm / math.sqrt(elements)).clamp(min=group["eps"][1])
        rho = min(rate, 1 / math.sqrt(float(self.state["step"])))
        length = (self.sums[0].sqrt() / (math.sqrt(elements) * group["d"])).clamp(min=1.0)
        scale = relative * rho / length
        for (own, _), update in zip(self.here, self.updates, strict=True):
            own.local.mul_(1 - rate * group["weight_decay"])
            own.local.sub_(update.mul_(scale.to(update.dtype)))


def _sum_together(stepped: Sequence[_Stepped], parts: Sequence[Tensor]) -> None:
    """Sum each parameter's numbers over the groups that cut it; those of the same groups and dtype in one message."""
    packs: dict[tuple[Groups, torch.dtype], list[int]] = {}
    for number, (one, part) in enumerate(zip(stepped, parts, strict=True)):
        one.sums = part
        if one.groups:
            packs.setdefault((one.groups, part.dtype), []).append(number)
    for (groups, _), numbers in packs.items():
        packed = torch.cat([parts[number] for number in numbers])
        for group in groups:
            dist.all_reduce(packed, group=group)
        sums = packed.split([len(parts[number]) for number in numbers])
        for number, summed in zip(numbers, sums, strict=True):
            stepped[number].sums = summed
