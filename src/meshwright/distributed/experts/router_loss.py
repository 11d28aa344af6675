"""Compute a model's own router loss over the tokens of all ranks that share a microbatch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.distributed.step.part import Batch
from meshwright.distributed.tensor.group import own_share
from meshwright.distributed.tensor.runtime import runtime_of
from meshwright.introspection.structure.router_loss import RouterLogits, RouterLoss

from .routing import routed_tokens, sum_over


class SharedRouterLoss:
    """Attributes:
    loss_share: what the loss of one token's routing counts for in that of the step: 0 dims.
    """

    def __init__(self, loss: RouterLoss, model: nn.Module, groups: Sequence[dist.ProcessGroup]):
        """Args:
        groups: of the axes along which ranks have other tokens.
        """
        self.loss_share: Tensor | None = None
        self._loss, self._groups, self._logits = loss, groups, RouterLogits(model, loss)
        runtime = runtime_of(model)
        self._sequence = runtime.sequence if runtime is not None and runtime.sequence.cut else None

    def __call__(self, batch: Batch) -> Tensor:
        """Return this rank's summand of the loss of a microbatch whose forward was the last one, 0 dims: of the
        choices of all ranks' tokens and the probabilities of its own.
        """
        logits = self._logits.take()
        real = self._own(routed_tokens(batch), batch["tokens"].shape)
        real = None if real is None else real.flatten().to(logits[0].device)
        chosen, probabilities = self._loss.terms(logits, real)
        tokens = chosen.new_tensor([logits[0].flatten(0, -2).shape[0]]) if real is None else real.sum().view(1)
        chosen, tokens = sum_over(self._groups, torch.cat([chosen, tokens])).split([self._loss.experts, 1])
        shares = chosen.double() / (tokens.clamp(min=1) * len(logits))
        assert self.loss_share is not None
        return (
            self._loss.coefficient * self._loss.experts * self.loss_share * (shares * probabilities).sum() / len(logits)
        )

    def begin(self) -> None:
        """A microbatch's forward begins."""
        self._logits.begin()

    def forget(self) -> None:
        """A forward and backward failed."""
        self._logits.take()

    def _own(self, real: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
        """Tell which of the tokens that this rank routes are real: no padding, and no filling of its part."""
        if self._sequence is None:
            return real
        if real is None and not self._sequence.filled:
            return None
        whole = torch.ones(shape, dtype=torch.bool) if real is None else real
        return own_share(whole, self._sequence.group.rank, self._sequence.group.size)
