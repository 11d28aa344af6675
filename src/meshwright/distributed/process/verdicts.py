"""Raise errors of what an accelerator found to be wrong, without waiting for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.core.devices import is_accelerator


@dataclass(frozen=True)
class _Open:
    """A check whose outcome is on its way to the host.

    Attributes:
        holds: on the device; false once any check of the same error failed.
        word: the same on the host, which ``arrival`` is behind.
    """

    error: Exception
    holds: Tensor
    word: Tensor
    arrival: Any


class Verdicts:
    """Checks that a device computes: on the CPU an error is raised at once, else as soon as the host knows.

    An error of checks on an accelerator is raised by the first ``raise_known`` behind the arrival of its outcome. Where
    the host has waited for the device anyway, as it does for a norm before the optimizer's step, that is every check.
    """

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}

    def expect(self, holds: Tensor, error: Exception) -> None:
        """Raise the error unless a bool of no dims is true; on an accelerator, let ``raise_known`` do so."""
        if not is_accelerator(holds.device):
            if not bool(holds):
                raise error
            return
        if (before := self._open.get(str(error))) is not None:
            holds = holds & before.holds
        word = holds.to("cpu", non_blocking=True)  # torch takes pinned memory for it
        stream = torch.get_device_module(holds.device).current_stream(holds.device)
        self._open[str(error)] = _Open(error, holds, word, stream.record_event())

    def raise_known(self) -> None:
        """Raise the error of a check that is known to have failed; those that are not known stay open."""
        for text, check in list(self._open.items()):
            if check.arrival.query():
                del self._open[text]
                if not bool(check.word):
                    raise check.error
