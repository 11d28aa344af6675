"""A decoder in this process under a mode of activation checkpointing: its gradients, what it computes, and what it
keeps.
"""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from meshwright.distributed import order
from meshwright.distributed.memory.live import LiveStorages
from meshwright.distributed.process.absent_peers import WireCounter
from meshwright.distributed.recompute import recompute
from meshwright.introspection.facts import model_facts
from meshwright.models.decoder import Decoder
from meshwright.models.decoder_config import DecoderConfig
from meshwright.planning.build import plan
from meshwright.planning.layout import Layout


def built(config: DecoderConfig, techniques: dict[str, Any], dtype: torch.dtype = torch.float64) -> nn.Module:
    model = Decoder(config).to(dtype)
    for number, parameter in enumerate(model.parameters()):
        nn.init.normal_(parameter, 0, 0.3, generator=torch.Generator().manual_seed(number))
    facts = model_facts(model)
    made = plan(facts, Layout(dp_shard=1), techniques=techniques)
    return order.apply(model, made, order.Site(None, facts), only=("freeze", "activation_checkpoint", "compile"))


def tokens_of(model: nn.Module, rows: int, seq: int) -> Tensor:
    vocabulary = next(model.parameters()).shape[0]
    return torch.randint(0, vocabulary, (rows, seq), generator=torch.Generator().manual_seed(5))


def backward(model: nn.Module, rows: int = 4, seq: int = 9) -> list[Tensor]:
    model(tokens_of(model, rows, seq)).logsumexp(-1).mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def gradients(config: DecoderConfig, techniques: dict[str, Any]) -> list[Tensor]:
    return backward(built(config, techniques))


def operations(config: DecoderConfig, techniques: dict[str, Any]) -> Counter[str]:
    """How often each of torch's operators runs in a forward and backward."""
    model = built(config, techniques)
    with WireCounter() as wire:
        backward(model)
    return wire.operations


def kept_bytes(config: DecoderConfig, techniques: dict[str, Any], rows: int, seq: int) -> int:
    """What the graph of a forward keeps, not counting host memory."""
    model, tokens = built(config, techniques, torch.float32), None
    tokens = tokens_of(model, rows, seq)
    leave = recompute.Copies.leave

    def unseen(self: Any, tensor: Tensor) -> Tensor:
        with _disable_current_modes():
            return leave(self, tensor)

    with patch.object(recompute.Copies, "leave", unseen), LiveStorages() as live:
        loss = model(tokens).logsumexp(-1).mean()
    found = live.bytes()
    assert loss.requires_grad
    return found
