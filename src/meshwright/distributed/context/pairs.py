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
from meshwright.core.torch_private import by_values, has_no_values, version_of
from meshwright.introspection.constructor.recording import seeded
from meshwright.introspection.mixing.masks import TokenMask
from meshwright.introspection.mixing.whole import META, whole_arguments
from meshwright.introspection.signature import TARGETS, Signature
from meshwright.planning.context.plan import ContextPlan

from .rows import DECIDING, MASK, CutRows

MOST_IN_DRY_RUNS = 2**27
"""Pairs of tokens up to which a dry run makes them with values, where code looks at these."""
PLAIN = (bool, int, float, str)
"""Types of attributes that a forward may read and a user may change between steps."""


@dataclass(eq=False)
class Made:
    """The arguments of some rows.

    Attributes:
        known: by module, arguments by their paths.
        of: what they follow from, to see whether the next rows are alike.
        held: tensors in the dtypes in which they were asked for, by the numbers (``id``) of those in ``known``.
    """

    known: dict[str, dict[str, Any]]
    of: tuple[Any, ...]
    held: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)


@dataclass
class PairArguments:
    """What modules are given for pairs of tokens, of the whole rows that are computed now.

    Attributes:
        copy: of the model, on meta, before anything was changed.
        last: what was made last; rows keep what is theirs, for a backward that recomputes.
    """

    copy: nn.Module
    plan: ContextPlan
    last: Made | None = None

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
        """Compute the arguments of these rows, unless the last ones were alike."""
        brought = {"positions": rows.positions, "document_ids": rows.documents, MASK: rows.padding}
        names = {clean(name): buffer for name, buffer in model.named_buffers()}
        buffers = {name: names[clean(name)] for name, _ in self.copy.named_buffers() if clean(name) in names}
        written = tuple((id(buffer), version_of(buffer)) for buffer in buffers.values())
        shape, attributes = (rows.count, rows.length), self._attributes(model)
        of = (model.training, shape, device, written, attributes, *brought.values())
        if self.last is None or not all(map(_alike, of, self.last.of)):
            batch = {key: value for key, value in brought.items() if value is not None}
            batch["tokens"] = torch.zeros(shape, dtype=torch.int64)
            self._follow(model.training, attributes)
            self.last = Made(self._computed(buffers, batch, device), of)
        rows.memo[PairArguments] = self.last

    def _computed(
        self, buffers: Mapping[str, Tensor], batch: dict[str, Tensor], device: torch.device
    ) -> dict[str, dict[str, Any]]:
        wanted = {mixer.path: mixer.pairs for mixer in (each.mixer for each in self.plan.mixers) if mixer.pairs}
        compute = partial(whole_arguments, self.copy, buffers, batch, wanted)
        with seeded(0):  # draws of the copy are none of the run's
            try:
                return compute(device)
            except Exception:
                if device != META or batch["tokens"].numel() * batch["tokens"].shape[1] > MOST_IN_DRY_RUNS:
                    raise
                return compute(torch.device("cpu"))  # the model's code looks at values of positions or masks

    def _attributes(self, model: nn.Module) -> dict[tuple[str, str], Any]:
        """Return the plain attributes of a model's modules and configs, without those that layouts set."""
        found: dict[tuple[str, str], Any] = {}
        configs: set[int] = set()
        for path, module in model.named_modules():
            config = vars(module).get("config")
            for name, value in vars(module).items():
                if type(value) in PLAIN and not name.startswith("_") and name != "training":
                    found[clean(path), name] = value
            if config is not None and id(config) not in configs and hasattr(config, "__dict__"):
                configs.add(id(config))
                named = {name: value for name, value in vars(config).items() if not name.startswith("_")}
                found |= {(clean(path), f"config.{name}"): v for name, v in named.items() if type(v) in PLAIN}
        return found

    def _follow(self, training: bool, attributes: dict[tuple[str, str], Any]) -> None:
        """Give the copy the mode and the attributes that the model has now."""
        self.copy.train(training)
        modules = {clean(path): module for path, module in self.copy.named_modules()}
        for (path, name), value in attributes.items():
            of: Any = modules.get(path)
            if name.startswith("config."):
                of, name = getattr(of, "config", None), name.removeprefix("config.")
            if of is not None and vars(of).get(name, value) != value:
                setattr(of, name, value)

    def given(self, path: str, key: str, instead: Tensor | TokenMask, rows: CutRows) -> Any:
        """Return an argument of whole rows.

        Args:
            instead: what the module is given of this rank's part.

        Raises:
            UnsupportedError: the argument depends on weights, or on a buffer of another pipeline stage.
        """
        made: Made | None = rows.memo.get(PairArguments)
        known = {} if made is None else made.known.get(path, {})
        whole = known.get(key)
        if made is not None and isinstance(instead, Tensor) and isinstance(whole, Tensor):
            place = id(whole), instead.dtype  # blocks are given one tensor
            if place not in made.held and has_no_values(instead):
                made.held[place] = instead.new_empty(whole.shape)
            elif place not in made.held and not whole.is_meta:
                made.held[place] = _as_dtype(whole, instead.dtype)
            if (found := made.held.get(place)) is not None:
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
