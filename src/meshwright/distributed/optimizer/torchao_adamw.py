"""Run torchao's AdamW: moments in 8 or 4 bits (arXiv 2110.02861, 2309.01507), and stochastic rounding to bfloat16.

States and arithmetic are torchao's. Two things differ: each rank steps its own part of a parameter, of any placement;
and random numbers are a function of (seed, step, name, position), so that copies of a weight are rounded alike,
wherever they lie, and after a resume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.core.errors import ConfigError, MissingExtraError
from meshwright.core.names import clean
from meshwright.core.parts import mixes_copies
from meshwright.core.torch_private import without_recompilation_limit
from meshwright.distributed.float8.torchao_private import kind_of_state, step_of_adam
from meshwright.distributed.torch_private import local_part
from meshwright.distributed.weights.shards import pieces, seed_of, with_local
from meshwright.planning.optimizer.kinds import KINDS
from meshwright.planning.optimizer.plan import BLOCKS, OptimizerPlan

SIGNED = {tensor.name: tensor.signed for tensor in KINDS["adamw"].state}
"""AdamW's moments, and whether each can be negative."""


class TorchaoAdamW(torch.optim.Optimizer):
    """AdamW with low-bit moments, or stochastic rounding of new bfloat16 weights, or both.

    A moment has 8 or 4 bits if a rank holds 4096 elements of its parameter or more, a multiple of the block (256 or
    128); else the parameter's dtype. torchao's compiled function computes the step in float32, one graph per local
    shape.

    Args:
        groups: parameter groups with plain tensors or DTensors, float32 or bfloat16.
        plan: bits of the moments, and rounding of the weights.
        named_parameters: (global name, parameter) of all of them, where weights are rounded stochastically.
        seed: seed of the rounding.

    Raises:
        MissingExtraError: torchao is not installed.
        ConfigError: stochastic rounding is requested for weights without a name or not in bfloat16.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        plan: OptimizerPlan,
        *,
        named_parameters: Iterable[tuple[str, nn.Parameter]] = (),
        seed: int = 0,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ):
        refuse_absent(plan)
        self.state_word, self.stochastic, self.seed = plan.state, plan.stochastic_rounding, seed
        self._plan = plan
        self._names = {parameter: clean(name) for name, parameter in named_parameters}
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; raise ConfigError as the constructor does."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"] if self.stochastic else ():
            if parameter not in self._names or parameter.dtype is not torch.bfloat16:
                named = self._names.get(parameter, "one without a name")
                raise ConfigError(
                    f"stochastic rounding is of bfloat16 parameters whose names are given (named_parameters), and it"
                    f" was asked for {named}, {parameter.dtype}"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Step every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)
        return loss

    def _step(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state |= {key: self.new_moment(parameter, key) for key in SIGNED}
        state["step"] += 1
        gradient = parameter.grad
        assert gradient is not None
        local = _local(parameter.detach())
        if not local.numel():
            return
        noise = self._noise(parameter, int(state["step"])) if self.stochastic else None
        rate, (beta1, beta2) = torch.as_tensor(group["lr"], dtype=torch.float32), group["betas"]
        moments = (_local(state[key]) for key in SIGNED)
        with without_recompilation_limit():  # there are as many graphs as shapes
            _compiled()(
                local,
                noise,
                _local(gradient).contiguous(),
                state["step"],
                *moments,
                rate,
                beta1,
                beta2,
                group["weight_decay"],
                group["eps"],
            )

    def new_moment(self, parameter: Tensor, key: str) -> Tensor:
        """Create zeros for a moment of a parameter, in its storage format."""
        local = _local(parameter.detach())
        if self._plan.rounds(local.numel()) and not _mixes_copies(parameter):
            made = kind_of_state(self.state_word).zeros(
                local.shape, SIGNED[key], BLOCKS[self.state_word], local.device, dtype=local.dtype
            )
        else:
            made = torch.zeros_like(local, memory_format=torch.contiguous_format)
        return with_local(parameter, made) if isinstance(parameter, DTensor) else made

    def _noise(self, parameter: Tensor, step: int) -> Tensor:
        """Draw (local shape) int32, 0 to 2¹⁶ − 1: the same for the same elements of a parameter on any rank."""
        local = _local(parameter.detach())
        noise = torch.empty(local.shape, dtype=torch.int32, device=local.device)
        for piece in pieces(with_local(parameter, noise) if isinstance(parameter, DTensor) else noise):
            generator = torch.Generator(local.device).manual_seed(self._seed_of(parameter, step, piece.offset))
            piece.local.copy_(
                torch.randint(
                    0, 1 << 16, piece.local.shape, dtype=torch.int32, device=local.device, generator=generator
                )
            )
        return noise

    def _seed_of(self, parameter: Tensor, step: int, offset: Sequence[int]) -> int:
        return seed_of("stochastic rounding", self.seed, step, self._names[parameter], *offset)  # type: ignore[index]


def refuse_absent(plan: OptimizerPlan) -> None:
    """Raise MissingExtraError if the plan needs torchao, and torchao is not installed."""
    if not plan.needs_torchao:
        return
    try:
        import torchao.optim  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(plan.request, "torchao", "float8") from error


def is_rounded(tensor: Tensor) -> bool:
    """Return whether a tensor is stored as torchao's codes and scales."""
    return hasattr(_local(tensor), "dequantize") and hasattr(_local(tensor), "codes")


def _local(tensor: Tensor) -> Tensor:
    return local_part(tensor)


def _mixes_copies(parameter: Tensor) -> bool:
    """Return whether blocks would span a rank's own elements and copies, which each rank would round differently."""
    if not isinstance(parameter, DTensor):
        return False
    places = [
        (getattr(place, "parts", ()), parameter.device_mesh.size(axis))
        for axis, place in enumerate(parameter.placements)
    ]
    return any(mixes_copies(parts, ranks) for parts, ranks in places)


@cache
def _compiled() -> Callable[..., None]:
    return torch.compile(_stepped, fullgraph=True, dynamic=False)


def _stepped(
    weight: Tensor,
    noise: Tensor | None,
    gradient: Tensor,
    step: Tensor,
    first: Tensor,
    second: Tensor,
    rate: Tensor,
    beta1: float,
    beta2: float,
    decay: float,
    eps: float,
) -> None:
    """Run torchao's step of one parameter in place, without its own random numbers, whose stream differs by rank."""
    wide = weight if noise is None else weight.float()
    step_of_adam(wide, gradient, step, (first, second), rate, (beta1, beta2, decay, eps))
    if noise is not None:
        weight.copy_(rounded_by(wide, noise))


def rounded_by(wide: Tensor, noise: Tensor) -> Tensor:
    """Round float32 to bfloat16 so that, over uniform noise, the mean is the value itself.

    Rounds away from zero where ``noise`` is less than the bits beyond bfloat16's last, else towards zero.

    Args:
        noise: int32 of the same shape, each 0 to 2¹⁶ − 1.
    """
    bits = wide.view(torch.int32)
    towards_zero = bits & 0xFFFF0000
    return (
        torch.where(noise < (bits & 0xFFFF), towards_zero + 0x10000, towards_zero)
        .view(torch.float32)
        .to(torch.bfloat16)
    )
