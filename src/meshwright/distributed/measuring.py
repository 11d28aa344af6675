"""Measure the speeds of this machine: products, attention, memory, the host, messages between its ranks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle, product
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.core.devices import CPU, finish_stream, is_accelerator
from meshwright.core.dtypes import torch_dtype

# --- time small pieces of work on a device that others may share

Work = Callable[[], Any]
Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Effort:
    """The sizes to measure, and for how long.

    Attributes:
        dims: dims of products.
        dtypes: names of the dtypes of products and attention.
        seqs: tokens of attention.
        head_dims: dims of a head.
        sizes: bytes of what memory-bound operators read and write.
        elements: elements of a parameter.
        messages: bytes of messages.
        window_s: shortest time over which calls are averaged.
        windows: such times of each point.
    """

    dims: tuple[int, ...]
    dtypes: tuple[str, ...]
    seqs: tuple[int, ...]
    head_dims: tuple[int, ...]
    sizes: tuple[int, ...]
    elements: tuple[int, ...]
    messages: tuple[int, ...]
    window_s: float
    windows: int


KIB, MIB = 2**10, 2**20
FULL = Effort(
    dims=(16, 64, 256, 1024),
    dtypes=("float32", "bfloat16"),
    seqs=(32, 128, 512, 1024),
    head_dims=(16, 32, 64, 128),
    sizes=(KIB, 16 * KIB, 128 * KIB, 512 * KIB, 2 * MIB, 8 * MIB, 32 * MIB),
    elements=(64, 4096, 65_536, 1_048_576),
    messages=(64, 4 * KIB, 32 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB),
    window_s=0.003,
    windows=5,
)
"""The effort on a CPU."""
ACCELERATED = Effort(
    dims=(64, 256, 1024, 4096, 8192),
    dtypes=("float32", "bfloat16"),
    seqs=(128, 512, 2048, 8192),
    head_dims=(64, 128),
    sizes=(4 * KIB, 256 * KIB, 4 * MIB, 32 * MIB, 256 * MIB),
    elements=(1024, 65_536, 1_048_576, 16_777_216),
    messages=(64, 16 * KIB, 256 * KIB, 4 * MIB, 64 * MIB, 256 * MIB),
    window_s=0.005,
    windows=5,
)
SHORTEST = Effort(
    dims=(16, 64),
    dtypes=("float32",),
    seqs=(16, 64),
    head_dims=(16,),
    sizes=(KIB, 64 * KIB),
    elements=(64, 4096),
    messages=(64, 64 * KIB),
    window_s=0.0002,
    windows=2,
)
"""Enough to see that everything is measured; the figures are coarse."""


def seconds_of(work: Work, device: torch.device, effort: Effort) -> float:
    """Return the seconds of a call, averaged over windows of calls, of which the median counts.

    On an accelerator a window ends when the device has done its work: what counts is the slower of host and device.
    """
    work()
    # one thread's own time leaves out when the host runs other programs
    now = time.perf_counter if is_accelerator(device) or torch.get_num_threads() > 1 else time.thread_time
    calls = 1
    while (spent := _spent(work, calls, device, now)) < effort.window_s:
        calls = max(calls + 1, min(10 * calls, int(1.3 * calls * effort.window_s / max(spent, 1e-9))))
    found = [spent, *(_spent(work, calls, device, now) for _ in range(effort.windows - 1))]
    return max(median(found) / calls, 1e-9)


def _spent(work: Work, calls: int, device: torch.device, now: Callable[[], float] = time.perf_counter) -> float:
    finish_stream(device)
    began = now()
    for _ in range(calls):
        work()
    finish_stream(device)
    return now() - began


# --- measure matrix products by shape and layout, and attention by tokens and head dim

LAYOUTS = ("nt", "nn", "tn")
"""Forward (rows, depth) x (columns, depth)ᵀ, gradient of the input, and gradient of the weight (depth, rows)ᵀ."""
PRODUCT_SPREAD = 16 * MIB
"""Bytes over which the operands of successive products lie: those of a model are in no cache either."""
ROWS = 8
"""Rows times heads of attention."""


def products(device: torch.device, effort: Effort) -> dict[str, tuple[tuple[int, ...], tuple[float, ...]]]:
    """Return "dtype layout" -> dims, and the seconds by rows, columns, depth."""
    found = {}
    for name, layout in product(effort.dtypes, LAYOUTS):
        seconds, dtype = [], torch_dtype(name)
        for rows, columns, depth in product(effort.dims, effort.dims, effort.dims):
            number = max(1, min(16, PRODUCT_SPREAD // ((rows + columns) * depth * dtype.itemsize)))
            pairs = []
            for _ in range(number):
                left = torch.full((depth, rows) if layout == "tn" else (rows, depth), 0.01, dtype=dtype, device=device)
                shape = (columns, depth) if layout == "nt" else (depth, columns)
                right = torch.full(shape, 0.01, dtype=dtype, device=device)
                pairs.append((left.t() if layout == "tn" else left, right.t() if layout == "nt" else right))
            turns = cycle(pairs)
            seconds.append(seconds_of(lambda turns=turns: torch.mm(*next(turns)), device, effort))
        found[f"{name} {layout}"] = (effort.dims, tuple(seconds))
    return found


def attention(device: torch.device, effort: Effort) -> Iterator[tuple[str, Points]]:
    """Yield "dtype direction head_dim", and (tokens, seconds of one head and row) of causal attention."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    for dtype, head_dim in product(effort.dtypes, effort.head_dims):
        forward, backward = [], []
        for seq in effort.seqs:
            heads = [
                torch.full((1, ROWS, seq, head_dim), 0.01, dtype=torch_dtype(dtype), device=device, requires_grad=True)
                for _ in range(3)
            ]
            with torch.no_grad():
                forward.append((float(seq), seconds_of(partial(attend, *heads), device, effort) / ROWS))
            output = attend(*heads)
            gradient = torch.full_like(output, 0.01)
            work = partial(torch.autograd.grad, output, heads, gradient, retain_graph=True)
            backward.append((float(seq), seconds_of(work, device, effort) / ROWS))
        yield f"{dtype} forward {head_dim}", forward
        yield f"{dtype} backward {head_dim}", backward


# --- measure operators that memory bounds, small operators' host time, and optimizers

WIDTH = 64
"""Features of the rows of a memory-bound operator's tensors; (tokens, WIDTH)."""
SPREAD, LIVE = 48 * MIB, 24 * MIB
"""Bytes over which the operands of successive calls lie, since in a step others come between, and bytes of results that
are held while the next are made."""
MOST = 64
"""Operands of successive calls at most."""
TENSORS = 8
"""Parameters of an optimizer."""


KINDS: dict[str, tuple[Callable[[Tensor], Work], float]] = {
    "pointwise": (lambda x: partial(torch.add, x, x.clone()), 3),
    "inplace": (lambda x: partial(x.mul_, x.clone()), 3),
    "function": (lambda x: partial(F.silu, x), 2),
    "softmax": (
        lambda x: partial(
            torch.log_softmax, x.view(-1)[: max(1, x.numel() // 4096) * 4096].view(max(1, x.numel() // 4096), -1), -1
        ),
        2,
    ),
    "strided": (lambda x: x.view(-1, 4, WIDTH // 4).transpose(0, 1).contiguous, 2),
    "reduction": (lambda x: partial(torch.mean, x, -1), 1 + 1 / WIDTH),
    "columns": (lambda x: partial(torch.sum, x, 0), 1),
    "gather": (lambda x: partial(F.embedding, torch.randperm(len(x), device=x.device), x), 2),
    "scatter": (lambda x: partial(torch.zeros_like(x).index_add_, 0, torch.randperm(len(x), device=x.device), x), 3),
    "sort": (lambda x: torch.rand_like(x).view(-1).sort, 4),
    "cast": (lambda x: partial(x.to, torch.bfloat16), 1.5),
}
"""Kind -> how it is made of a tensor, and the tensors of that size that it reads and writes."""


def traffic(device: torch.device, effort: Effort) -> Iterator[tuple[str, Points]]:
    """Yield kinds of operators, with (bytes read and written, seconds)."""
    torch.empty(2 * effort.sizes[-1], dtype=torch.uint8, device=device).fill_(0)  # memory that is freed is used again
    for kind, (make, times) in KINDS.items():
        points = []
        for size in effort.sizes:
            rows = max(1, round(size / times / 4 / WIDTH))
            number = max(2, min(MOST, SPREAD // (rows * WIDTH * 4)))
            turns = cycle([make(torch.full((rows, WIDTH), 0.01, device=device)) for _ in range(number)])
            held: deque[Any] = deque(maxlen=max(1, min(8, LIVE // (rows * WIDTH * 4))))
            work = lambda turns=turns, held=held: held.append(next(turns)())  # noqa: E731
            points.append((float(rows * WIDTH * 4 * times), seconds_of(work, device, effort)))
        yield kind, points


def host(device: torch.device, effort: Effort) -> dict[str, float]:
    """Return the seconds of the host for a small operator by kind, and of what stands around one in a model.

    "autograd" is what an operator costs more while it is recorded, "backward" what the engine adds to a gradient's
    operators, "module" the call of a module.
    """
    x, weight = torch.zeros(1, 8, device=device), torch.zeros(8, device=device, requires_grad=True)
    module = nn.Identity()

    def silent() -> Tensor:
        with torch.no_grad():
            return x * weight

    time = partial(seconds_of, device=device, effort=effort)
    found = {
        "view": time(lambda: x.view(8)),
        "empty": time(lambda: torch.empty(8, device=device)),
        "elementwise": time(lambda: x + x),
        "reduction": time(lambda: x.sum()),
        "index": time(lambda: x[:, 0]),
        "module": time(lambda: module(x)),
    }
    alone, with_record = time(silent), time(lambda: x * weight)
    both = time(lambda: torch.autograd.backward((x * weight * weight * weight * weight).sum()))
    operators = 4 * found["elementwise"] + 2 * found["reduction"]
    found["autograd"] = max(1e-9, with_record - alone)
    found["backward"] = max(1e-9, (both - operators - 4 * with_record) / 8)
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


# --- measure messages between this job's ranks, and how much slower ranks are that share a host's cores

gather_tensor = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
scatter_tensor = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
WARM, PIECES = 2, 2
LONG_S = 0.15
"""Seconds in which ranks are compared that share cores: several turns of the operating system's scheduler."""


def _part(whole: Tensor, size: int) -> Tensor:
    return torch.zeros(whole.numel() // size, device=whole.device)


COLLECTIVES: dict[str, Callable[[Tensor, dist.ProcessGroup, int], Work]] = {
    "all_gather": lambda whole, group, size: partial(gather_tensor, whole, _part(whole, size), group=group),
    "reduce_scatter": lambda whole, group, size: partial(scatter_tensor, _part(whole, size), whole, group=group),
    "all_reduce": lambda whole, group, size: partial(dist.all_reduce, whole, group=group),
    "all_to_all": lambda whole, group, size: partial(
        dist.all_to_all_single, torch.zeros_like(whole), whole, group=group
    ),
    "send": lambda whole, group, size: (
        partial(dist.send, whole, group=group, group_dst=1)
        if dist.get_rank(group) == 0
        else partial(dist.recv, whole, group=group, group_src=0)
    ),
}


def messages(device: torch.device, effort: Effort, at_ease: int) -> Iterator[tuple[str, Points]]:
    """Yield "kind ranks", and (bytes of the larger side, seconds). Collective; one rank yields nothing.

    All groups of a size send at once, as the groups of a mesh do. Sizes are powers of two below the world, and that.
    Ranks of a run come to a message from work, not at once, and with other data in caches: so each has work before it,
    except on an accelerator, where messages travel beside it.

    Args:
        at_ease: ranks of a host that have cores of their own.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    between, of_work = None, 0.0
    if world > 1 and not is_accelerator(device):
        between = work_between()
        of_work = seconds_of(between, device, effort) * max(1.0, world / at_ease)
    for size in [n for n in (2**power for power in range(1, 12)) if n < world] + ([world] if world > 1 else []):
        groups = [dist.new_group(list(range(start, start + size))) for start in range(0, world - size + 1, size)]
        place = dist.get_rank() // size
        mine = groups[place] if place < len(groups) else None
        group = mine if isinstance(mine, dist.ProcessGroup) else None
        for kind, make in COLLECTIVES.items():
            if kind == "send" and size > 2:
                continue
            points = []
            for sent in effort.messages:
                seconds = 0.0
                if group is None:
                    dist.barrier()
                else:
                    whole = torch.zeros(max(size, sent // 4 // size * size), device=device)
                    spent = _message_s(make(whole, group, size), between, group, device, effort)
                    seconds = max(spent - of_work, 1e-6)
                slowest = torch.tensor([seconds], dtype=torch.float64, device=device)
                dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
                points.append((float(sent), float(slowest)))
            yield f"{kind} {size}", points
        if group is not None:
            dist.destroy_process_group(group)


def _message_s(
    message: Work, between: Work | None, group: dist.ProcessGroup, device: torch.device, effort: Effort
) -> float:
    """Return the seconds of one of several messages and the work before it; all ranks of the group send as many."""

    def both() -> None:
        if between is not None:
            between()
        message()

    for _ in range(WARM):
        both()
    guess = torch.tensor([_spent(both, 3, device) / 3], dtype=torch.float64, device=device)
    dist.all_reduce(guess, op=dist.ReduceOp.MAX, group=group)
    calls = max(2, min(200, int(4 * effort.window_s / float(guess))))
    dist.barrier()
    return min(_spent(both, calls, device) / calls for _ in range(effort.windows))


def work_between() -> Work:
    """Return small products and passes over other data at each call."""
    a, weights = torch.full((128, 256), 0.01), cycle([torch.full((256, 256), 0.01) for _ in range(16)])
    longer = cycle([torch.full((64 * 1024,), 0.01) for _ in range(16)])

    def work() -> None:
        for _ in range(PIECES):
            torch.mm(a, next(weights))
            torch.mul(next(longer), 2.0)

    return work


def crowding(device: torch.device, effort: Effort, at_ease: int) -> list[float]:
    """Return the speed of a rank while 1, 2, … ranks of a host compute, over that of ``at_ease`` ranks. Collective.

    Accelerators do not share their units: 1 for each. Ranks that do not compute wait in a message. What other programs
    take of the cores is left out, and so is what ranks take of each other's: that is ``at_ease``.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if is_accelerator(device) or world == 1:
        return [1.0] * world
    seconds, speeds = LONG_S if effort.window_s >= 0.001 else 0.02, []
    for working in range(1, world + 1):
        work, rounds, own = work_between(), 0, 1.0
        seconds_of(work, torch.device(CPU), SHORTEST)
        dist.barrier()
        if dist.get_rank() < working:
            own, began = time.thread_time(), time.perf_counter()
            while time.perf_counter() - began < seconds:
                work()
                rounds += 1
            own = time.thread_time() - own
        speed = torch.tensor([rounds / own], dtype=torch.float64)  # rounds in a second of its own
        dist.all_reduce(speed)
        speeds.append(float(speed) / working)
    ease = speeds[min(at_ease, world) - 1]
    return [min(1.0, at_ease / working) * speed / ease for working, speed in enumerate(speeds, 1)]
