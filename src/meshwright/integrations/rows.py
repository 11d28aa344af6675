"""Find which rows a rank trains, and turn a tool's batch into one of ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from meshwright.core.errors import ConfigError
from meshwright.core.losses import IGNORED
from meshwright.distributed.mesh import data_position
from meshwright.distributed.process import agree

OF_KERNELS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Keys that collators without padding add for some kernels: restarting positions say the same."""


@dataclass(frozen=True)
class RowsOfRank:
    """The place of this process among those that train different rows.

    Attributes:
        rank, ranks: place and number, over dp_replicate × dp_shard. Ranks of pp, cp and tp share a place.
        first: the first process of each place.
        world: number of processes.
    """

    rank: int = 0
    ranks: int = 1
    first: tuple[int, ...] = (0,)
    world: int = 1

    @classmethod
    def of(cls, mesh: Any) -> RowsOfRank:
        """Ask all ranks of a mesh for their places (collective); None: one process."""
        rank, ranks = data_position(mesh)
        places = agree.everybody_says(rank)
        return cls(rank, ranks, tuple(places.index(place) for place in range(ranks)), len(places))

    @property
    def copies(self) -> int:
        """How many processes train the same rows."""
        return self.world // self.ranks

    def once(self, gathered: Tensor) -> Tensor:
        """Return what one process of each place brought, of a tensor that was gathered along dim 0 over all."""
        if self.world == 1:
            return gathered
        parts = gathered.chunk(self.world)
        return torch.cat([parts[process] for process in self.first])


def shifted(labels: Tensor) -> Tensor:
    """Return the labels of (rows, seq) tokens that a model of transformers would shift: each token's is the next."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def step_batch(inputs: Mapping[str, Any], *, shift: bool = True) -> dict[str, Tensor]:
    """Return a batch of ``forward_backward`` from one of transformers.

    Args:
        inputs: ``input_ids``, ``labels`` and other arguments of the model's forward, rows first. ``shift_labels``
            are taken as they are.
        shift: whether the model's own loss shifts labels, as causal ones do.

    Raises:
        ConfigError: labels of another shape than the tokens.
    """
    batch = {key: value for key, value in inputs.items() if key not in OF_KERNELS and value is not None}
    labels = batch.get("labels")
    if "shift_labels" in batch:
        batch["labels"] = batch.pop("shift_labels")
    elif shift and labels is not None:
        tokens = batch.get("input_ids")
        if labels.dim() != 2 or (tokens is not None and labels.shape != tokens.shape):
            raise ConfigError(
                f"the batch's labels have shape {tuple(labels.shape)}, and a causal model's are one for each of the"
                f" {tuple(tokens.shape) if tokens is not None else '(rows, seq)'} input_ids"
            )
        batch["labels"] = shifted(labels)
    if "position_ids" in batch and "attention_mask" not in batch and bool((batch["position_ids"][:, 1:] == 0).any()):
        batch["positions"] = batch.pop("position_ids")
        batch["document_ids"] = (batch["positions"] == 0).cumsum(1)
    return batch


def one_batch(pieces: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Join the microbatches of a step, for a pipeline to cut: shorter rows are filled up with tokens without a loss.

    Raises:
        ConfigError: rows of several documents, whose positions cannot be filled up; microbatches with other keys.
    """
    if lacking := sorted(set().union(*pieces) - set.intersection(*map(set, pieces)) | {"input_ids"} - set(pieces[0])):
        raise ConfigError(
            f"some microbatches of the step lack {lacking[0]!r}, and layout.pp cuts them as one batch: let the collator"
            f" return the same keys always, input_ids among them, or set layout.pp = 1"
        )
    longest = max(piece["input_ids"].shape[1] for piece in pieces)
    if len({piece["input_ids"].shape[1] for piece in pieces}) > 1:
        if any("document_ids" in piece for piece in pieces):
            raise ConfigError(
                "the microbatches of a step pack documents into rows of different lengths, and layout.pp cuts them"
                " alike: pack into rows of one length, or set layout.pp = 1"
            )
        for number, piece in enumerate(pieces):
            shape = piece["input_ids"].shape
            fills = {key: IGNORED if key == "labels" else 0 for key, value in piece.items() if value.shape == shape}
            missing = (0, longest - shape[1])
            pieces[number] = piece | {key: F.pad(piece[key], missing, value=fill) for key, fill in fills.items()}
    return {key: torch.cat([piece[key] for piece in pieces]) for key in pieces[0]}
