"""Hold outputs of a block's modules at recorded values, while features of one of them are pushed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from .probe import Probe

PUSHED = 1
"""The token that is pushed: not the first, which attends to nothing but itself, whatever its query."""
ROUNDING = 1e-9
"""Relative tolerance, in fp64; smaller changes are no influence: a rerouted token reorders the sums of experts."""


class HeldOutputs:
    """The modules of a block whose outputs are held; features of one of them may be pushed."""

    def __init__(self, probe: Probe):
        self.probe = probe
        self.rest: dict[str, Tensor] = {}
        self._pushed: tuple[str, tuple[int, ...], float] | None = None
        self._seen: dict[str, Tensor] = {}
        self._least: dict[str, Tensor] = {}
        self.watched: set[str] | None = None
        """Modules whose inputs are compared; None: all."""

    @property
    def pairs(self) -> int:
        """The number of pairs of rows."""
        assert self.probe.call.entered is not None
        return len(self.probe.call.entered) // 2

    def push(self, path: str, *features: int, times: float = 1.0) -> None:
        """Push features until the next push, each in a pair of rows of its own; a single feature in all rows."""
        self._pushed = (path, features if len(features) > 1 else features * self.pairs, times)

    def keeps_pairs_apart(self, path: str) -> bool:
        """Return whether a push in the first pair of rows moves no other row."""
        if self.pairs == 1:
            return False
        self._pushed = (path, (0,), 1.0)
        return not any(places[2:].any() for places in self.moved().values())

    def inputs(self) -> dict[str, Tensor]:
        """Run the block, and return the input of each module."""
        self._seen.clear()
        self.probe.rerun()
        return dict(self._seen)

    def moved(self) -> dict[str, Tensor]:
        """Run the block, and return where inputs of modules differ from those at rest: (rows, seq, features) bool."""
        found: dict[str, Tensor] = {}
        for path, value in self.inputs().items():
            rest = self.rest[path]
            if value.shape == rest.shape:
                if (least := self._least.get(path)) is None:
                    least = self._least[path] = ROUNDING * rest.abs().flatten(0, -2).amax(0)
                found[path] = self.probe._by_token((value.sub_(rest).abs_() <= least).logical_not_())  # NaN has moved
        return found

    def hook(self, path: str) -> Callable[..., Tensor]:
        recorded = self.probe.output_of(path)
        amount = 2 * recorded.abs().max() + 0.37  # past every kink, up in one row and down in the next
        up_and_down = torch.stack([amount, -amount])

        def hold(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Tensor:
            entered = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
            if entered is not None and (self.watched is None or path in self.watched):
                self._seen[path] = entered.clone()
            kept = recorded.clone()
            if self._pushed is not None and self._pushed[0] == path:
                _, features, times = self._pushed
                by_token = self.probe._by_token(kept)
                for pair, feature in enumerate(features):
                    by_token[2 * pair : 2 * pair + 2, PUSHED, feature] += times * up_and_down
            return kept

        return hold
