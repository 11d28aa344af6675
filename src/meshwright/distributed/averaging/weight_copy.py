"""Copy the weights of a laid-out model, for averages and references."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from meshwright.distributed.weights import whole_state

if TYPE_CHECKING:
    from meshwright.distributed.step.module import IncompatibleKeys, PartsAsModule


class WeightCopy(nn.Module):
    """A copy of the weights of a laid-out model, in the same shards, such as an average of them.

    Calls go through the model, which is lent the copied weights meanwhile. ``lent()`` lends them to a block of code:
    inside, the model's ``evaluate``, ``generate`` and ``state_dict`` are those of the copy.
    """

    def __init__(self, model: PartsAsModule):
        super().__init__()
        self._model = (model,)  # no child: the weights of this module are the copies
        for name, parameter in model.named_parameters():
            made = nn.Parameter(parameter.detach().clone(), requires_grad=False)
            self._parameters.setdefault(name, made)
        for name, buffer in model.named_buffers():
            self._buffers.setdefault(name, buffer.detach().clone())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the outputs of this rank's rows by the copied weights, without gradients (collective)."""
        with self.lent(), torch.no_grad():
            return self._model[0](*args, **kwargs)

    @contextmanager
    def lent(self) -> Iterator[PartsAsModule]:
        """Lend the copied weights to the model: inside, it evaluates, generates and is saved by them."""
        model = self._model[0]
        with model.averaged():  # so that an optimizer's average is not taken of the copy
            self._swap()
            model.is_lent = True
            try:
                yield model
            finally:
                model.is_lent = False
                self._swap()

    def state_dict(self, **options: Any) -> dict[str, Tensor]:  # type: ignore[override]
        """Return the whole copies under global names (collective; see ``ParallelModel.state_dict``)."""
        with self.lent() as model:
            return model.state_dict(**options)

    def load_state_dict(  # type: ignore[override]
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> IncompatibleKeys:
        """Copy whole tensors into the copies (see ``ParallelModel.load_state_dict``)."""
        with self.lent() as model:
            return model.load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *options: Any) -> None:  # type: ignore[override]
        """Load a part of the state dict of a module around this one, such as an ``AveragedModel``."""
        load_within(self, state_dict, prefix, *options)

    @torch.no_grad()
    def _swap(self) -> None:
        # a mean of codes is none of weights: those in 4 bits are frozen, and the model's own serve
        tensors = [(name, tensor) for name, tensor in self._model[0]._tensors() if not _in_4_bits(tensor)]
        whole_state.swap(tensors, {**self._parameters, **self._buffers})


def _in_4_bits(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.dtype == torch.uint8


def load_within(
    module: nn.Module,
    state_dict: Mapping[str, Any],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    own = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
    found = module.load_state_dict(own, strict=False)
    missing += [f"{prefix}{name}" for name in found.missing_keys if strict]
    unexpected += [f"{prefix}{name}" for name in found.unexpected_keys if strict]
