"""Compute a model's own router loss over the tokens of all ranks that share a microbatch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.distributed.exchange.ranks import own_share
from meshwright.distributed.step.part import Batch
from meshwright.distributed.tensor.runtime import runtime_of
from meshwright.introspection.structure.router_loss import RouterLogits, RouterLoss

from .routing import routed_tokens, sum_over


class SharedRouterLoss:
    """Computes a model's own router loss over the tokens of several ranks.

    Attributes:
        loss_share: weight of one token's router loss in the loss of the step, 0 dims.
    """

    def __init__(self, loss: RouterLoss, model: nn.Module, groups: Sequence[dist.ProcessGroup]):
        """Record the router logits of ``model``. ``groups``: of the axes along which ranks hold other tokens."""
        self.loss_share: Tensor | None = None
        self._loss, self._groups, self._logits = loss, groups, RouterLogits(model, loss)
        runtime = runtime_of(model)
        self._sequence = runtime.sequence if runtime is not None and runtime.sequence.cut else None

    def __call__(self, batch: Batch) -> Tensor:
        """Return this rank's partial sum of the router loss of the last forward's microbatch, 0-dim.

        It combines the choices of all ranks' tokens with the probabilities of this rank's tokens.
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
        """Prepare for a microbatch's forward."""
        self._logits.begin()

    def forget(self) -> None:
        """Discard the recorded logits after a failed forward or backward."""
        self._logits.take()

    def _own(self, real: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
        """Return a mask of this rank's routed tokens, False for padding of rows or of the sequence shard; None: all."""
        if self._sequence is None:
            return real
        if real is None and not self._sequence.filled:
            return None
        whole = torch.ones(shape, dtype=torch.bool) if real is None else real
        return own_share(whole, self._sequence.group.rank, self._sequence.group.size)
