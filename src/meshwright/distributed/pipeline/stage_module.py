"""Make one stage of meshwright's decoder a module, for users with their own loop and torch's pipeline classes."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.distributed.weights.constructed import write_by_law
from meshwright.introspection.constructor import on_meta
from meshwright.introspection.facts import ModelFacts, model_facts
from meshwright.models.decoder import Block, Decoder, document_mask, refuse_longer, rotary_tables, weight_law_of
from meshwright.models.decoder_config import DecoderConfig
from meshwright.models.layers import RMSNorm
from meshwright.planning.float8 import Float8Plan
from meshwright.planning.pipeline.plan import compute_layer_assignment
from meshwright.planning.plan import Plan

SAME = ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "max_seq_len", "norm_eps", "rope_theta", "qk_norm")
ONE_VALUE = {
    "norm_type": "rmsnorm",
    "activation": "silu",
    "init_std": 0.02,
    "num_experts": 0,
    "vision_config": None,
    "vlm_config": None,
}
"""Fields for which meshwright's decoder supports only one value."""
INSTEAD = {
    "num_experts": "write a DecoderConfig with moe=MoEConfig(n_experts=..., top_k=...)",
    "vision_config": "lay your own model with a vision tower out by apply_fsdp2",
    "vlm_config": "lay your own model with a vision tower out by apply_fsdp2",
}


def decoder_config(config: Any) -> Any:
    """Convert KempnerForge's config (with ``ffn_hidden_dim``, ``tie_embeddings``) to a DecoderConfig; return others.

    Raises:
        UnsupportedError: a field requests a feature that the decoder lacks; the text names it and the legal value.
        ConfigError: the width of the feed-forward is not given.
    """
    if isinstance(config, DecoderConfig) or not all(
        hasattr(config, name) for name in ("ffn_hidden_dim", "tie_embeddings", "dim")
    ):
        return config
    for name, only in ONE_VALUE.items():
        if (found := getattr(config, name, only)) != only:
            hint = INSTEAD.get(name, "lay your own nn.Module out")
            has = f"has {name} = {only} alone" if only is not None else "has no vision tower"
            raise UnsupportedError(
                f"{type(config).__name__}.{name} is {found}: meshwright's decoder {has}. Use that, or {hint}."
            )
    width = config.ffn_hidden_dim or getattr(config, "computed_ffn_hidden_dim", None)
    if width is None:
        raise ConfigError(
            f"{type(config).__name__}.ffn_hidden_dim = None: give it a number; it is hidden_dim of a DecoderConfig"
        )
    same = {name: value for name in SAME if (value := getattr(config, name, None)) is not None}
    same.setdefault("n_kv_heads", config.n_heads)
    return DecoderConfig(**same, hidden_dim=width, tied_embeddings=config.tie_embeddings)


log = logging.getLogger("meshwright")


class PipelineStageModule(nn.Module):
    """The layers of one stage; embedding on the first, final norm and head on the last.

    Names, and so initial weights and checkpoints, are those of the whole model (``layers.4...``). Built under
    ``torch.device("meta")``, the module has no weights until ``to_empty`` and ``init_weights_and_freqs``.

    Args:
        config: config of the whole decoder, or KempnerForge's ModelConfig without features that the decoder lacks.
        stage_id, num_stages: number of the stage, and of all stages.
        layer_range: (first, one after the last) of the stage's layers.
        seed: seed of the initial weights.

    Attributes:
        pipeline_group: the ranks with the other stages, after ``build_pipeline_stage`` was called with this one.

    Raises:
        ConfigError: such a stage or range does not exist, or the embeddings are tied, which only ``parallelize``
            keeps equal.
        UnsupportedError: a field of a foreign config requests a feature that the decoder lacks.
    """

    def __init__(
        self,
        config: DecoderConfig | Any,
        stage_id: int,
        num_stages: int,
        layer_range: tuple[int, int],
        *,
        seed: int = 0,
    ):
        super().__init__()
        config = decoder_config(config)
        self.pipeline_group: dist.ProcessGroup | None = None
        start, end = layer_range
        if not 0 <= stage_id < num_stages or not 0 <= start < end <= config.n_layers:
            raise ConfigError(
                f"stage {stage_id} of {num_stages} with the layers {start} to {end - 1} is not in a model of"
                f" {config.n_layers} layers: stages are numbered from 0, and each has one layer or more"
            )
        self.config, self.stage_id, self.num_stages, self.layer_range = config, stage_id, num_stages, (start, end)
        self.is_first, self.is_last = stage_id == 0, stage_id == num_stages - 1
        if config.tied_embeddings and num_stages > 1 and (self.is_first or self.is_last):
            raise ConfigError(
                "model.tied_embeddings: stages of their own hold two tables that nobody keeps equal. Use parallelize"
                " with layout.pp, which sums both gradients, or set tied_embeddings = false."
            )
        self.embedding = nn.Embedding(config.vocab_size, config.dim) if self.is_first else None
        self.layers = nn.ModuleDict({str(i): Block(config, i) for i in range(start, end)})
        self.norm = RMSNorm(config.dim, config.norm_eps) if self.is_last else None
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False) if self.is_last else None
        if (
            self.is_first
            and self.is_last
            and config.tied_embeddings
            and self.head is not None
            and self.embedding is not None
        ):
            self.head.weight = self.embedding.weight
        if not next(self.parameters()).is_meta:
            self.init_weights_and_freqs(seed)
        ends = "".join([", embedding" if self.is_first else "", ", norm and head" if self.is_last else ""])
        log.info("stage %d of %d: layers %d to %d%s", stage_id, num_stages, start, end - 1, ends)

    def init_weights_and_freqs(self, seed: int = 0) -> None:
        """Write the initial weights of ``parallelize(config, seed=seed)`` in place, by name, sharded or whole.

        (Rotary frequencies are computed in each forward, so there are none to initialise.)
        """
        with torch.no_grad():
            write_by_law(self, seed)

    def weight_law(self, name: str) -> tuple[str, float]:
        """Return the initialisation of a parameter, the same as in the whole model."""
        return weight_law_of(self.config, name)

    @property
    def token_embedding(self) -> nn.Embedding | None:
        """The embedding, under KempnerForge's name; None but on the first stage."""
        return self.embedding

    @property
    def output_head(self) -> nn.Linear | None:
        """The head, under KempnerForge's name; None but on the last stage."""
        return self.head

    def forward(self, x: Tensor, positions: Tensor | None = None, document_ids: Tensor | None = None) -> Tensor:
        """Compute hidden states (rows, seq, dim), or logits (rows, seq, vocab) on the last stage.

        Args:
            x: on the first stage token ids, (rows, seq) int64; else hidden states, (rows, seq, dim).
            positions, document_ids: (rows, seq) int64, as in ``Decoder``; every stage takes them.

        Raises:
            ValueError: seq is longer than the config's ``max_seq_len``.
        """
        refuse_longer(self.config, x.shape[1])
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        if self.embedding is not None:
            x = self.embedding(x)
        cos, sin = rotary_tables(self.config, positions, x.dtype)
        mask = None if document_ids is None else document_mask(document_ids, x.dtype)
        routed = () if self.config.moe is None else (None if document_ids is None else document_ids >= 0,)
        for block in self.layers.values():
            x = block(x, cos, sin, mask, *routed)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def build_stage_module(
    config: DecoderConfig | Any, pp_rank: int, pp_size: int, *, seed: int = 0
) -> PipelineStageModule:
    """Build the stage of a rank, with evenly dealt layers (see ``compute_layer_assignment``) and weights by ``seed``.

    Raises:
        ValueError: fewer layers than stages.
        ConfigError: no such rank.
    """
    config = decoder_config(config)
    layers = compute_layer_assignment(config.n_layers, pp_size)
    return PipelineStageModule(
        config, pp_rank, pp_size, layers[pp_rank] if 0 <= pp_rank < pp_size else (0, 0), seed=seed
    )


# --- plan a decoder's stage module over the tensor axis, cut as the whole decoder is, between whole messages


def stage_of(facts: ModelFacts) -> PipelineStageModule | None:
    """Return the module that facts are about, if it is one of several stages."""
    module = facts.module
    return module if isinstance(module, PipelineStageModule) and module.num_stages > 1 else None


def facts_of_whole(facts: ModelFacts) -> ModelFacts | None:
    """Describe the decoder that a stage module belongs to; None for other models.

    A later stage takes hidden states, and cannot be measured by itself.
    """
    if (stage := stage_of(facts)) is None:
        return None
    with on_meta():
        whole = model_facts(Decoder(stage.config))
    converted = facts.applied_plan(Float8Plan)
    return whole if converted is None else replace(whole, applied={Float8Plan: converted})


def plan_of_stage_module(plan: Plan, facts: ModelFacts) -> Plan:
    """Reduce the decoder's plan to one stage module, with whole sequences in and out, as torch's stages send them."""
    stage, tensor = facts.module, plan.tensor
    assert isinstance(stage, PipelineStageModule)
    if tensor is None:
        return plan
    first, last = stage.is_first, stage.is_last
    own = replace(
        tensor.only(tuple(f"layers.{number}" for number in stage.layers)),
        begins=True,
        embedding=tensor.embedding if first else "",
        embedding_is_hidden=tensor.embedding_is_hidden and first,
        before=tensor.before if first else (),
        head=tensor.head if last else "",
        alike_behind=tensor.alike_behind if last else (),
        gathers_after_blocks=tensor.gathers_after_blocks if last else tensor.sequence_parallel,
    )
    return replace(plan, tensor=own)
