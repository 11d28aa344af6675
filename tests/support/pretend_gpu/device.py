"""The module ``torch.pretend``: the functions that torch and its users ask a device's module for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from . import streams, timeline
from .memory import USAGE


@dataclass(frozen=True)
class Properties:
    """The device's name, and its memory in bytes."""

    name: str = "a pretend GPU"
    total_memory: int = 8 << 30
    major: int = 0
    minor: int = 0


class PretendModule:
    """``torch.pretend``; a name that is missing here is missing on the device."""

    Stream, Event = streams.DeviceStream, streams.DeviceEvent
    stream = staticmethod(streams.stream)
    StreamContext = staticmethod(streams.stream)
    current_stream = staticmethod(streams.current_stream)
    default_stream = staticmethod(streams.default_stream)
    set_stream = staticmethod(streams.set_stream)

    def __init__(self) -> None:
        self.present = True

    def is_available(self) -> bool:
        return self.present

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def _lazy_init(self) -> None:
        return None

    def device_count(self) -> int:
        return 1 if self.present else 0

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        return None

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        yield

    def synchronize(self, device: Any = None) -> None:
        if (watch := timeline.current()) is not None:
            for clock in list(watch.clocks.values()):
                timeline.join(watch.clocks[timeline.HOST], clock)
            timeline.host_waits({}, "synchronize()")

    def get_device_name(self, device: Any = None) -> str:
        return Properties.name

    def get_device_properties(self, device: Any = None) -> Properties:
        return Properties()

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        return Properties.major, Properties.minor

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def is_bf16_supported(self) -> bool:
        return True

    # --- random numbers are drawn from the host's stream

    def manual_seed(self, seed: int) -> None:
        return None

    def manual_seed_all(self, seed: int) -> None:
        return None

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    # --- memory

    def memory_allocated(self, device: Any = None) -> int:
        return USAGE.now

    def max_memory_allocated(self, device: Any = None) -> int:
        return USAGE.peak

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        USAGE.peak = USAGE.now

    def memory_reserved(self, device: Any = None) -> int:
        return USAGE.now

    def max_memory_reserved(self, device: Any = None) -> int:
        return USAGE.peak

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return Properties().total_memory - USAGE.now, Properties().total_memory

    def empty_cache(self) -> None:
        return None
