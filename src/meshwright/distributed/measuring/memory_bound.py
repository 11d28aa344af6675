"""Measure operators that memory bounds, small operators' host time, and optimizers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .products import MIB, Effort, Points, Work, seconds_of

WIDTH = 64
"""Features of the rows of a memory-bound operator's tensors; (tokens, WIDTH)."""
SPREAD, LIVE = 48 * MIB, 24 * MIB
"""Bytes over which the operands of successive calls lie, since in a step others come between, and bytes of results that
are held while the next are made."""
MOST = 64
"""Operands of successive calls at most."""
TENSORS = 8
"""Parameters of an optimizer."""


def traffic(device: torch.device, effort: Effort) -> Iterator[tuple[str, Points]]:
    """Yield kinds of operators, with (bytes read and written, seconds)."""
    torch.empty(2 * effort.sizes[-1], dtype=torch.uint8, device=device).fill_(0)  # memory that is freed is used again
    for kind, (make, times) in KINDS.items():
        points = []
        for size in effort.sizes:
            rows = max(1, round(size / times / 4 / WIDTH))
            number = max(2, min(MOST, SPREAD // (rows * WIDTH * 4)))
            works = [make(torch.full((rows, WIDTH), 0.01, device=device)) for _ in range(number)]
            held: deque[Any] = deque(maxlen=max(1, min(8, LIVE // (rows * WIDTH * 4))))
            turns = cycle(works)
            points.append((float(rows * WIDTH * 4 * times), seconds_of(_keeping(turns, held), device, effort)))
        yield kind, points


def _keeping(turns: Iterator[Work], held: deque[Any]) -> Work:
    return lambda: held.append(next(turns)())


def _pointwise(x: Tensor) -> Work:
    other = x.clone()
    return lambda: x + other


def _inplace(x: Tensor) -> Work:
    other = x.clone()
    return lambda: x.mul_(other)


def _function(x: Tensor) -> Work:
    return lambda: F.silu(x)


def _softmax(x: Tensor) -> Work:
    wide = x.view(-1)[: x.numel() // 4096 * 4096].view(-1, 4096) if x.numel() > 4096 else x.view(1, -1)
    return lambda: torch.log_softmax(wide, -1)


def _strided(x: Tensor) -> Work:
    heads = x.view(-1, 4, WIDTH // 4).transpose(0, 1)
    return lambda: heads.contiguous()


def _reduction(x: Tensor) -> Work:
    return lambda: x.mean(-1)


def _columns(x: Tensor) -> Work:
    return lambda: x.sum(0)


def _gather(x: Tensor) -> Work:
    places = torch.randperm(len(x), device=x.device)
    return lambda: F.embedding(places, x)


def _scatter(x: Tensor) -> Work:
    places, into = torch.randperm(len(x), device=x.device), torch.zeros_like(x)
    return lambda: into.index_add_(0, places, x)


def _sort(x: Tensor) -> Work:
    values = torch.rand_like(x).view(-1)
    return lambda: values.sort()


def _cast(x: Tensor) -> Work:
    return lambda: x.to(torch.bfloat16)


KINDS: dict[str, tuple[Callable[[Tensor], Work], float]] = {
    "pointwise": (_pointwise, 3),
    "inplace": (_inplace, 3),
    "function": (_function, 2),
    "softmax": (_softmax, 2),
    "strided": (_strided, 2),
    "reduction": (_reduction, 1 + 1 / WIDTH),
    "columns": (_columns, 1),
    "gather": (_gather, 2),
    "scatter": (_scatter, 3),
    "sort": (_sort, 4),
    "cast": (_cast, 1.5),
}
"""Kind -> how it is made of a tensor, and the tensors of that size that it reads and writes."""


def host(device: torch.device, effort: Effort) -> dict[str, float]:
    """Return the seconds of the host for a small operator by kind, and of what stands around one in a model.

    "autograd" is what an operator costs more while it is recorded, "backward" what the engine adds to a gradient's
    operators, "module" the call of a module.
    """
    x, weight = torch.zeros(1, 8, device=device), torch.zeros(8, device=device, requires_grad=True)
    module = nn.Identity()

    def recorded() -> Tensor:
        return x * weight

    def silent() -> Tensor:
        with torch.no_grad():
            return x * weight

    def both() -> None:
        torch.autograd.backward((x * weight * weight * weight * weight).sum())

    time = partial(seconds_of, device=device, effort=effort)
    found = {
        "view": time(lambda: x.view(8)),
        "empty": time(lambda: torch.empty(8, device=device)),
        "elementwise": time(lambda: x + x),
        "reduction": time(lambda: x.sum()),
        "index": time(lambda: x[:, 0]),
        "module": time(lambda: module(x)),
    }
    alone, with_record = time(silent), time(recorded)
    operators = 4 * found["elementwise"] + 2 * found["reduction"]
    found["autograd"] = max(1e-9, with_record - alone)
    found["backward"] = max(1e-9, (time(both) - operators - 4 * with_record) / 8)
    return found


def optimizer(device: torch.device, effort: Effort) -> Iterator[tuple[str, Points]]:
    """Yield "fused" and "foreach", with (elements of a parameter, AdamW's seconds for it)."""
    for way in ("fused", "foreach"):
        points = []
        for elements in effort.elements:
            trained = [nn.Parameter(torch.zeros(elements, device=device)) for _ in range(TENSORS)]
            for parameter in trained:
                parameter.grad = torch.full_like(parameter, 1e-3)
            adam = torch.optim.AdamW(trained, lr=1e-3, fused=way == "fused", foreach=way == "foreach")
            points.append((float(elements), seconds_of(adam.step, device, effort) / TENSORS))
        yield way, points
