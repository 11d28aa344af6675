"""OneTokenWatch the outputs of a model's modules while one token of a row changes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.torch_private import tensors_by_path, tree_map

MOVED = 1e-5
"""Relative change of an output that is no rounding, for models that compute in fp32 inside too."""


@dataclass
class WatchedCall:
    """One call of a module: copies of what it was given and returned."""

    args: tuple
    kwargs: dict[str, Any]
    output: Any = None

    @property
    def given(self) -> dict[str, Tensor]:
        """The tensors among the arguments, by their paths."""
        return tensors_by_path((self.args, self.kwargs))


@dataclass
class OneTokenWatch:
    """Hooks on all modules of a model, and what they see in two forwards that differ in one token.

    Attributes:
        token: the place of the token that is changed in the second forward.
        calls: of each module in the first forward.
        mixing: modules whose inputs of other tokens were as before, and whose outputs were not, with the places that
            moved, in the order in which they returned.
        followed: of each module, the arguments that changed with the token.
        cut: outputs of mixers, of which ranks have their own tokens along ``dim_of_output``, and all that is beside.
    """

    batch: dict[str, Tensor]
    token: int
    calls: dict[str, list[WatchedCall]] = field(default_factory=dict)
    mixing: dict[str, Tensor] = field(default_factory=dict)
    followed: dict[str, set[str]] = field(default_factory=dict)
    cut: list[Tensor] = field(default_factory=list)
    _begun: list[tuple[WatchedCall | None, bool]] = field(default_factory=list)
    _seen: dict[str, int] | None = None

    @property
    def rows(self) -> int:
        return len(self.batch["tokens"])

    @property
    def length(self) -> int:
        return self.batch["tokens"].shape[1]

    def change(self) -> None:
        """Compare the next forward with the one before."""
        self._seen = {}

    def begin(self, path: str, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if self._seen is None:
            call = WatchedCall(*tree_map(_copied, (args, kwargs)))
            self.calls.setdefault(path, []).append(call)
            self._begun.append((call, True))
            return
        number = self._seen[path] = self._seen.get(path, -1) + 1
        calls = self.calls.get(path, [])
        before, given = calls[number] if number < len(calls) else None, tensors_by_path((args, kwargs))
        is_judged = before is not None and not bool((self._moved(given, before.given) > MOVED).any())
        self._begun.append((before, is_judged))
        if before is not None:
            was = before.given
            self.followed.setdefault(path, set()).update(
                key for key, leaf in given.items() if key in was and not torch.equal(leaf, was[key])
            )

    def end(self, path: str, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        """Note a call's output; of a mixer, return the output with the former values of the other tokens."""
        before, is_judged = self._begun.pop()
        if self._seen is None and before is not None:
            before.output = tree_map(_copied, output)
        if self._seen is None or before is None or not is_judged:
            return None
        found, old = tensors_by_path(output), tensors_by_path(before.output)
        moved = self._moved(found, old)
        if not bool((moved > MOVED).any()):
            return None
        self.mixing.setdefault(path, moved)
        given = iter(self._restored(leaf, old.get(key)) for key, leaf in found.items())
        return tree_map(lambda leaf: next(given) if isinstance(leaf, Tensor) else leaf, output)

    def token_dim(self, tensor: Tensor) -> int | None:
        """Return the dim of the tokens of (rows or 1, …, tokens, …); None of a tensor without one."""
        if tensor.dim() < 2 or tensor.shape[0] not in (1, self.rows):
            return None
        return next((dim for dim, size in enumerate(tensor.shape) if dim and size == self.length), None)

    def dim_of_output(self, tensor: Tensor) -> int | None:
        """Return the same for outputs, which may be a table of (tokens, features) for all rows."""
        return 0 if tensor.dim() == 2 and len(tensor) == self.length else self.token_dim(tensor)

    def _moved(self, found: dict[str, Tensor], before: dict[str, Tensor]) -> Tensor:
        """Return how far each token but the changed one moved, (length,), relative to the largest number."""
        moved = torch.zeros(self.length, dtype=torch.float64)
        for key, leaf in found.items():
            old, dim = before.get(key), self.token_dim(leaf)
            if old is None or dim is None or leaf.shape != old.shape or not leaf.numel():
                continue
            wide, was = leaf.double(), old.double()
            apart = (wide - was).abs().movedim(dim, 0).flatten(1).amax(1) / was.abs().amax().clamp(min=1e-300)
            moved = moved.maximum(apart.nan_to_num(0.0))
        moved[self.token] = 0
        return moved

    def _restored(self, leaf: Tensor, old: Tensor | None) -> Tensor:
        dim = self.token_dim(leaf)
        if old is None or dim is None or leaf.shape != old.shape:
            return leaf
        shape = [1] * leaf.dim()
        shape[dim] = self.length
        is_changed = torch.arange(self.length) == self.token
        return torch.where(is_changed.view(shape), leaf, old)


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf
