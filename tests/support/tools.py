"""Other tools' training in the pool's ranks: their own FSDP2 on a CPU, and no state that outlives a job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from support.from_pages import losses_of


@contextmanager
def fresh_accelerate(*, fsdp: bool) -> Iterator[None]:
    """Forget what accelerate keeps for the process, before and behind.

    Args:
        fsdp: let accelerate take these processes for those of accelerators: on a CPU it passes FSDP over in silence.
    """
    import os

    import torch
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DistributedType

    kept = dict(os.environ)
    os.environ["CI"] = "1"  # TRL then sends no telemetry
    prepare, set_device = PartialState._prepare_backend, PartialState.set_device

    def forget() -> None:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()

    forget()
    if fsdp:
        PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
        PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))
    try:
        yield
    finally:
        PartialState._prepare_backend, PartialState.set_device = prepare, set_device
        forget()
        for name in set(os.environ) - set(kept):
            del os.environ[name]
        os.environ.update(kept)


def with_accelerate(name: str, options: dict[str, Any] | None = None, *, fsdp: bool = False) -> list[float]:
    """``losses_of`` a script that uses accelerate."""
    with fresh_accelerate(fsdp=fsdp):
        return losses_of(name, options)


def with_its_fsdp(name: str, options: dict[str, Any] | None = None, pretend: bool = True) -> list[float]:
    """The same, with accelerate's own FSDP2 on the CPU; unless ``pretend``, the script itself sees to that."""
    import torch.distributed.fsdp as fsdp

    calls, fully_shard = [], fsdp.fully_shard

    def counted(*args: Any, **given: Any) -> Any:
        calls.append(1)
        return fully_shard(*args, **given)

    fsdp.fully_shard = counted
    try:
        losses = with_accelerate(name, options, fsdp=pretend)
    finally:
        fsdp.fully_shard = fully_shard
    assert calls, "the tool sharded nothing"
    return losses
