"""Store optimizer state in host memory (ZeRO-Offload, arXiv 2101.06840), but compute the step on the device.

The state comes to the device by portions, so the arithmetic is the same as for state that stays there. On an
accelerator, host memory is pinned, and copies run on the computing stream. On the CPU the same is done by plain copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.core.devices import finish_stream, is_accelerator
from meshwright.core.errors import UnsupportedError
from meshwright.core.torch_private import optimizer_has_step_hooks
from meshwright.distributed.weights.shards import in_memory, memory_of
from meshwright.planning.optimizer.plan import ROOM

from .lion import Lion
from .torchao_adamw import TorchaoAdamW

STATES = 2
"""Number of parameter-sized state tensors that a portion allows for."""
COUPLED = ("LBFGS",)
"""torch's optimizers whose step uses all parameters together."""
OURS = (Lion, TorchaoAdamW)
"""Those of this library whose step does not, and whose state nobody reads between two steps."""


def step(optimizer: torch.optim.Optimizer, device: torch.device, room: int = ROOM) -> None:
    """Step portions of the parameters in turn, each with its state on ``device`` meanwhile, else in host memory.

    Args:
        device: where the step is computed.
        room: bytes of state on the device at a time; a single parameter may have more.

    Raises:
        UnsupportedError: an optimizer whose step cannot be taken by portions.
    """
    _check(optimizer)
    groups = optimizer.param_groups
    try:
        for group in groups:
            optimizer.param_groups = [group]
            _step_group(optimizer, group, device, room)
    finally:
        optimizer.param_groups = groups
    finish_stream(device)  # from now on host memory may be read


def _check(optimizer: torch.optim.Optimizer) -> None:
    kind = type(optimizer)
    if kind not in OURS and (not kind.__module__.startswith("torch.optim.") or kind.__name__ in COUPLED):
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


def _step_group(optimizer: torch.optim.Optimizer, group: dict[str, Any], device: torch.device, room: int) -> None:
    every = group["params"]
    try:
        for portion in portions([p for p in every if p.grad is not None], room):
            group["params"] = portion
            rested = {p: _fetch(optimizer.state[p], device) for p in portion if p in optimizer.state}
            optimizer.step()
            for parameter in portion:
                _put_back(optimizer.state.get(parameter, {}), rested.get(parameter, {}), device)
    finally:
        group["params"] = every


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


def _fetch(state: dict[str, Any], device: torch.device) -> dict[str, Tensor]:
    """Fetch a parameter's state to the device, and return its tensors in host memory."""
    rested = {key: value for key, value in state.items() if _moves(value) and value.device.type == "cpu"}
    for key, host in rested.items():
        state[key] = in_memory(host, [_copied(plain, device) for plain in memory_of(host)])
    return rested


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


def _moves(value: Any) -> bool:
    """Return whether a value moves: tensors like the parameter do, step counts stay where the optimizer wants them."""
    return isinstance(value, Tensor) and value.dim() > 0


def _copied(plain: Tensor, device: torch.device) -> Tensor:
    here = torch.empty_like(plain, device=device)
    here.copy_(plain, non_blocking=True)
    return here


def at_rest(state: Tensor, device: torch.device) -> Tensor:
    """Copy state to host memory, pinned where it will travel to an accelerator."""
    return in_memory(state, [_to_host(plain, pinned=is_accelerator(device)) for plain in memory_of(state)])


def _to_host(plain: Tensor, *, pinned: bool) -> Tensor:
    host = torch.empty_like(plain, device="cpu", pin_memory=pinned)
    host.copy_(plain, non_blocking=True)
    return host
