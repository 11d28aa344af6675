"""Step AdamW by torchao: low-bit moments (arXiv 2110.02861, 2309.01507), stochastic rounding of bfloat16.

States and arithmetic are torchao's. What is ours: each rank steps its own part of a parameter, of whatever placement;
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
"""AdamW's moments, and whether they can be negative."""


class TorchaoAdamW(torch.optim.Optimizer):
    """AdamW whose moments are kept in few bits, or whose new bfloat16 weights are rounded stochastically, or both.

    A moment is kept in 8 or 4 bits where a rank has 4096 elements of its parameter or more, a multiple of the block
    (256 or 128); else in the parameter's dtype. The step is computed in float32 by torchao's compiled function, one
    graph for each shape that a rank has.

    Args:
        groups: parameter groups with plain tensors or DTensors, float32 or bfloat16.
        plan: what is kept in how many bits, and how weights are rounded.
        named_parameters: (global name, parameter) of all of them, where weights are rounded stochastically.
        seed: of the rounding.

    Raises:
        MissingExtraError: torchao is not installed.
        ConfigError: weights are to be rounded stochastically that have no name or are not in bfloat16.
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
        """Further parameters. Raises ConfigError as the constructor does."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"] if self.stochastic else ():
            if parameter not in self._names or parameter.dtype is not torch.bfloat16:
                named = self._names.get(parameter, "one without a name")
                raise ConfigError(
                    f"stochastic rounding is of bfloat16 parameters whose names are given (named_parameters), and it"
                    f" was asked for"
                    f" {named}, {parameter.dtype}"
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

    def new_moment(self, parameter: Tensor, key: str, device: torch.device | None = None) -> Tensor:
        """Zeros for a moment of a parameter, as it is kept."""
        local = _local(parameter.detach())
        device = device or local.device
        if self._plan.rounds(local.numel()) and not _mixes_copies(parameter):
            made = kind_of_state(self.state_word).zeros(
                local.shape, SIGNED[key], BLOCKS[self.state_word], device, dtype=local.dtype
            )
        else:
            made = torch.zeros_like(local, device=device, memory_format=torch.contiguous_format)
        return with_local(parameter, made) if isinstance(parameter, DTensor) else made

    def _noise(self, parameter: Tensor, step: int) -> Tensor:
        """Return (local shape) int32, 0 to 2¹⁶ − 1: the same for the same elements of a parameter wherever they lie."""
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
    """Tell whether what an optimizer needs is here. Raises MissingExtraError without torchao."""
    if not plan.needs_torchao:
        return
    try:
        import torchao.optim  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(plan.request, "torchao", "float8") from error


def is_rounded(tensor: Tensor) -> bool:
    """Tell whether a tensor's memory is codes and scales of torchao's."""
    return hasattr(_local(tensor), "dequantize") and hasattr(_local(tensor), "codes")


def _local(tensor: Tensor) -> Tensor:
    return local_part(tensor)


def _mixes_copies(parameter: Tensor) -> bool:
    """Blocks would lie across what is a rank's own and what it has copies of, which would be rounded otherwise on
    each rank.
    """
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
    """torchao's step of one parameter, in place.

    Its own random numbers would be drawn from a stream that differs by rank.
    """
    wide = weight if noise is None else weight.float()
    step_of_adam(wide, gradient, step, (first, second), rate, (beta1, beta2, decay, eps))
    if noise is not None:
        weight.copy_(rounded_by(wide, noise))


def rounded_by(wide: Tensor, noise: Tensor) -> Tensor:
    """float32 → bfloat16, away from zero where ``noise`` is less than what lies beyond bfloat16's last bit, else
    towards zero: by uniform noise the mean is the value itself.

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
