"""Hand modules that compute whole rows the masks and biases of whole rows, where a rank makes those of its part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.errors import UnsupportedError
from meshwright.core.names import clean
from meshwright.core.torch_private import by_values, has_no_values
from meshwright.introspection.mixing.masks import TokenMask
from meshwright.introspection.mixing.whole import META, whole_arguments
from meshwright.introspection.signature import TARGETS, Signature
from meshwright.planning.context.plan import ContextPlan

from .rows import DECIDING, MASK, CutRows

Known = dict[str, dict[str, Any]]
MOST_IN_DRY_RUNS = 2**27
"""Pairs of tokens up to which a dry run makes them with values, where code looks at these."""


@dataclass
class PairArguments:
    """What modules are given for pairs of tokens, of the whole rows that are computed now.

    Attributes:
        copy: of the model, on meta, before anything was changed.
    """

    copy: nn.Module
    plan: ContextPlan
    known: Known | None = None
    _of: tuple[Any, ...] = ()
    _held: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)

    def refuse_other_keys(self, batch: Mapping[str, Tensor], signature: Signature) -> None:
        """Refuse tensors of a batch that may have a say in the arguments, which are computed without them.

        Raises:
            UnsupportedError: the model takes such a tensor.
        """
        known = {*DECIDING, *TARGETS}
        other = next((key for key in batch if key not in known and signature.argument_of(key) is not None), None)
        if other is not None:
            path = next(planned.mixer.path for planned in self.plan.mixers if planned.mixer.pairs)
            raise UnsupportedError(
                f"{path} computes whole rows, and what it is given for pairs of tokens is made of positions, documents"
                f" and padding alone, while the batch has '{other}' too. Leave it out, or set layout.cp = 1."
            )

    @by_values
    def enter(self, model: nn.Module, rows: CutRows, device: torch.device) -> None:
        """Compute the arguments for these rows, unless the last ones were alike."""
        wanted = {mixer.path: mixer.pairs for mixer in (each.mixer for each in self.plan.mixers) if mixer.pairs}
        brought = {"positions": rows.positions, "document_ids": rows.documents, MASK: rows.padding}
        batch = {key: value for key, value in brought.items() if value is not None}
        shape = (rows.count, rows.length)
        of = (model.training, shape, device, *brought.values())
        if self.known is not None and len(of) == len(self._of) and all(map(_alike, of, self._of)):
            return
        names = {clean(name): buffer for name, buffer in model.named_buffers()}
        buffers = {name: names[clean(name)] for name, _ in self.copy.named_buffers() if clean(name) in names}
        tokens = torch.zeros(shape, dtype=torch.int64)
        self.copy.train(model.training)
        compute = partial(whole_arguments, self.copy, buffers, batch | {"tokens": tokens}, wanted)
        try:
            self.known = compute(device)
        except Exception:
            if device != META or tokens.numel() * rows.length > MOST_IN_DRY_RUNS:
                raise
            self.known = compute(torch.device("cpu"))  # the model's code looks at values of positions or masks
        self._of = of
        self._held.clear()

    def given(self, path: str, key: str, instead: Tensor | TokenMask) -> Any:
        """Return an argument of whole rows.

        Args:
            instead: what the module is given of this rank's part.

        Raises:
            UnsupportedError: the argument depends on weights, or on a buffer of another pipeline stage.
        """
        known = {} if self.known is None else self.known.get(path, {})
        whole = known.get(key)
        if isinstance(instead, Tensor) and isinstance(whole, Tensor):
            if (id(whole), instead.dtype) not in self._held and has_no_values(instead):
                self._held[id(whole), instead.dtype] = instead.new_empty(whole.shape)
            elif (id(whole), instead.dtype) not in self._held and not whole.is_meta:
                self._held[id(whole), instead.dtype] = _as_dtype(whole, instead.dtype)
            if (found := self._held.get((id(whole), instead.dtype))) is not None:
                return found
        elif key in known and (whole is None or not whole.is_meta):
            return whole
        raise UnsupportedError(
            f"{path} computes whole rows, and what it is given for pairs of tokens ({key}) depends on weights, or on"
            f" buffers that are not at hand. Set layout.cp = 1, or layout.pp = 1."
        )


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return one is other or (not isinstance(one, Tensor) and not isinstance(other, Tensor) and one == other)


def _as_dtype(whole: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values in another dtype; the smallest number of a dtype, by which masks block, is that of the other."""
    if whole.dtype == dtype or not whole.is_floating_point() or not dtype.is_floating_point:
        return whole.to(dtype)
    most = min(torch.finfo(dtype).max, torch.finfo(whole.dtype).max)
    return torch.where(whole.isinf(), whole, whole.clamp(-most, most)).to(dtype)
