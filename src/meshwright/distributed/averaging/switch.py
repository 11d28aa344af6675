"""Let a model hold the averages that its optimizer has of its parameters, where it is evaluated, gathered or saved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn

from meshwright.distributed.data import fully_sharded

from .schedule_free import optimizers_of


@contextmanager
def averaged(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Let the parameters of a model's local modules hold their averages inside; no messages are sent.

    Parameters without an average, those of all other optimizers, stay as they are.
    """
    found = optimizers_of(_parameters(parts))
    if not found:
        yield
        return
    _free_gathered(parts)
    with ExitStack() as held:
        for optimizer in found:
            held.enter_context(optimizer.averaged())
        try:
            yield
        finally:
            _free_gathered(parts)


def begin_anew(parts: Sequence[nn.Module]) -> None:
    """Let optimizers that have averages of a model begin anew, since other weights were loaded without their state."""
    for optimizer in optimizers_of(_parameters(parts)):
        optimizer.begin_anew()


def _parameters(parts: Sequence[nn.Module]) -> Iterable[Tensor]:
    return (parameter for part in parts for parameter in part.parameters())


def _free_gathered(parts: Sequence[nn.Module]) -> None:
    """Free gathered copies, which hold the other point."""
    for part in parts:
        fully_sharded.reshard(part)
