"""Keep optimizer state in few bits (arXiv 2110.02861, 2309.01507) or in host memory (arXiv 2101.06840).

States and arithmetic are torchao's. Two things differ: each rank steps its own part of a parameter, of any placement;
and random numbers are a function of (seed, step, name, position), so that copies of a weight are rounded alike,
wherever they lie, and after a resume.

The state comes to the device by portions, so the arithmetic is the same as for state that stays there. On an
accelerator, host memory is pinned, and copies run on the computing stream. On the CPU the same is done by plain copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.core.devices import finish_stream, is_accelerator
from meshwright.core.dtypes import dtype_bytes
from meshwright.core.errors import ConfigError, MissingExtraError, UnsupportedError
from meshwright.core.names import clean
from meshwright.core.parts import mixes_copies
from meshwright.core.torch_private import optimizer_has_step_hooks, without_recompilation_limit
from meshwright.distributed.products import kind_of_state, step_of_adam
from meshwright.distributed.torch_private import local_part
from meshwright.distributed.weights.shards import in_memory, memory_of, pieces, seed_of, with_local
from meshwright.planning.optimizer import BLOCKS, KINDS, ROOM, OptimizerPlan

from .grad_clip import loss_of
from .muon import Lion

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
        loss = loss_of(closure)
        for group in self.param_groups:
            rate, decay, eps = torch.as_tensor(group["lr"], dtype=torch.float32), group["weight_decay"], group["eps"]
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state |= {key: self.new_moment(parameter, key) for key in SIGNED}
                state["step"] += 1
                local, moments = local_part(parameter.detach()), [local_part(state[key]) for key in SIGNED]
                if not local.numel():
                    continue
                noise = self._noise(parameter, int(state["step"])) if self.stochastic else None
                given = local, noise, local_part(parameter.grad).contiguous(), state["step"], *moments
                with without_recompilation_limit():  # there are as many graphs as shapes
                    compiled_step()(*given, rate, *group["betas"], decay, eps)
        return loss

    def _noise(self, parameter: Tensor, step: int) -> Tensor:
        """Draw (local shape) int32, 0 to 2¹⁶ − 1: the same for the same elements of a parameter on any rank."""
        local = local_part(parameter.detach())
        noise = torch.empty(local.shape, dtype=torch.int32, device=local.device)
        for piece in pieces(with_local(parameter, noise) if isinstance(parameter, DTensor) else noise):
            seed = seed_of("stochastic rounding", self.seed, step, self._names[parameter], *piece.offset)  # type: ignore[index]
            generator, shape = torch.Generator(local.device).manual_seed(seed), piece.local.shape
            options: dict[str, Any] = {"dtype": torch.int32, "device": local.device, "generator": generator}
            piece.local.copy_(torch.randint(0, 1 << 16, shape, **options))
        return noise

    def new_moment(self, parameter: Tensor, key: str) -> Tensor:
        """Create zeros for a moment of a parameter, in its storage format."""
        local = local_part(parameter.detach())
        # blocks that span a rank's own elements and copies would be rounded by each rank otherwise
        placed = parameter.placements if isinstance(parameter, DTensor) else ()
        sizes = parameter.device_mesh.shape if isinstance(parameter, DTensor) else ()
        mixed = any(mixes_copies(getattr(p, "parts", ()), n) for p, n in zip(placed, sizes, strict=True))
        if self._plan.rounds(local.numel()) and not mixed:
            made = kind_of_state(self.state_word).zeros(
                local.shape, SIGNED[key], BLOCKS[self.state_word], local.device, dtype=local.dtype
            )
        else:
            made = torch.zeros_like(local, memory_format=torch.contiguous_format)
        return with_local(parameter, made) if isinstance(parameter, DTensor) else made


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
    return hasattr(local_part(tensor), "dequantize") and hasattr(local_part(tensor), "codes")


@cache
def compiled_step() -> Callable[..., None]:
    """Compile torchao's step of one parameter in place, without its random numbers, whose stream differs by rank."""

    def stepped(
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
        wide = weight if noise is None else weight.float()
        step_of_adam(wide, gradient, step, (first, second), rate, (beta1, beta2, decay, eps))
        if noise is not None:
            weight.copy_(rounded_by(wide, noise))

    return torch.compile(stepped, fullgraph=True, dynamic=False)


def rounded_by(wide: Tensor, noise: Tensor) -> Tensor:
    """Round float32 to bfloat16 so that, over uniform ``noise`` from 0 to 2¹⁶ − 1, the mean is the value itself.

    Rounds away from zero where ``noise`` is less than the bits beyond bfloat16's last, else towards zero.
    """
    bits = wide.view(torch.int32)
    towards_zero = bits & 0xFFFF0000
    return (
        torch.where(noise < (bits & 0xFFFF), towards_zero + 0x10000, towards_zero)
        .view(torch.float32)
        .to(torch.bfloat16)
    )


class LowBitStates(torch.optim.Optimizer):
    """Holds as many bytes as torchao's optimizer, whose compiled step cannot be run on fake tensors."""

    def __init__(self, parameters: list[torch.nn.Parameter], plan: OptimizerPlan, master: str):
        super().__init__(parameters, {})
        self._plan, self._bytes = plan, dtype_bytes(master)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            elements = local_part(parameter).numel()
            size = len(self._plan.row.state) * elements * self._bytes
            if self._plan.rounds(elements):
                size = self._plan.bytes_of_rounded(elements, 1)
            if not self.state[parameter]:
                self.state[parameter] = {"moments": torch.empty(size, dtype=torch.uint8)}


# --- store optimizer state in host memory

STATES = 2
"""Number of parameter-sized state tensors that a portion allows for."""
COUPLED = ("LBFGS",)
"""torch's optimizers whose step uses all parameters together."""
OURS = (Lion, TorchaoAdamW)
"""Those of this library whose step does not, and whose state nobody reads between two steps."""


def step(optimizer: torch.optim.Optimizer, device: torch.device, room: int = ROOM) -> None:
    """Step portions of the parameters in turn, each with its state on ``device`` meanwhile, else in host memory.

    ``room``: bytes of state on the device at a time; a single parameter may have more.
    """
    kind = type(optimizer)
    if kind not in (*OURS, LowBitStates) and (
        not kind.__module__.startswith("torch.optim.") or kind.__name__ in COUPLED
    ):
        able = f"torch's own optimizers (but {', '.join(COUPLED)}) and {' and '.join(one.__name__ for one in OURS)}"
        raise UnsupportedError(
            f"techniques.cpu_offload = optimizer steps some parameters after the others, which is known to be sound of"
            f" {able}, and this is {kind.__module__}.{kind.__qualname__}. Use one of those, or leave it out."
        )
    if optimizer_has_step_hooks(optimizer):
        raise UnsupportedError(
            "techniques.cpu_offload = optimizer steps some parameters after the others, and the hooks that are"
            " registered on this"
            " optimizer's step would be called once for each portion. Call what they do around optimizer_step instead."
        )
    groups = optimizer.param_groups
    every = [group["params"] for group in groups]
    try:
        for group, parameters in zip(groups, every, strict=True):
            optimizer.param_groups = [group]
            for portion in portions([p for p in parameters if p.grad is not None], room):
                group["params"] = portion
                rested: dict[Tensor, dict[str, Tensor]] = {}
                for state, p in ((optimizer.state[p], p) for p in portion if p in optimizer.state):
                    rested[p] = {key: x for key, x in state.items() if _moves(x) and x.device.type == "cpu"}
                    for key, host in rested[p].items():
                        state[key] = in_memory(host, [_copied(plain, device) for plain in memory_of(host)])
                optimizer.step()
                for parameter in portion:
                    _put_back(optimizer.state.get(parameter, {}), rested.get(parameter, {}), device)
    finally:
        optimizer.param_groups = groups
        for group, parameters in zip(groups, every, strict=True):
            group["params"] = parameters
    finish_stream(device)  # from now on host memory may be read


def _put_back(state: dict[str, Any], rested: dict[str, Tensor], device: torch.device) -> None:
    """Copy a parameter's state back to host memory; new state gets host memory of its own."""
    for key, value in state.items():
        if not _moves(value):
            continue
        if key not in rested:
            state[key] = at_rest(value, device)
            continue
        for host, plain in zip(memory_of(rested[key]), memory_of(value), strict=True):
            host.copy_(plain, non_blocking=True)
        state[key] = rested[key]


def _copied(plain: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(plain, device=device).copy_(plain, non_blocking=True)


def _to_host(plain: Tensor, *, pinned: bool) -> Tensor:
    return torch.empty_like(plain, device="cpu", pin_memory=pinned).copy_(plain, non_blocking=True)


def portions(parameters: Sequence[Tensor], room: int) -> Iterator[list[Tensor]]:
    """Cut parameters into portions with at most ``room`` bytes of state, two tensors like each, or one parameter."""
    portion: list[Tensor] = []
    taken = 0
    for parameter in parameters:
        size = STATES * sum(plain.nbytes for plain in memory_of(parameter))
        if portion and taken + size > room:
            yield portion
            portion, taken = [], 0
        portion.append(parameter)
        taken += size
    if portion:
        yield portion


def _moves(value: Any) -> bool:
    """Return whether a value moves: tensors like the parameter do, step counts stay where the optimizer wants them."""
    return isinstance(value, Tensor) and value.dim() > 0


def at_rest(state: Tensor, device: torch.device) -> Tensor:
    """Copy state to host memory, pinned where it will travel to an accelerator."""
    return in_memory(state, [_to_host(plain, pinned=is_accelerator(device)) for plain in memory_of(state)])
