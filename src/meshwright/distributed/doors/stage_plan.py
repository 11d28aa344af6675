"""Plan a decoder's stage module over the tensor axis, cut as the whole decoder is, between whole messages."""

from __future__ import annotations

from dataclasses import replace

from meshwright.introspection.constructor.meta import on_meta
from meshwright.introspection.facts import ModelFacts, model_facts
from meshwright.models.decoder import Decoder
from meshwright.planning.float8.plan import Float8Plan
from meshwright.planning.plan import Plan

from .stage_module import PipelineStageModule


def facts_of_whole(facts: ModelFacts) -> ModelFacts | None:
    """Describe the decoder that a stage module belongs to; None for other models.

    A later stage takes hidden states, and cannot be measured by itself.
    """
    stage = facts.module
    if not isinstance(stage, PipelineStageModule) or stage.num_stages == 1:
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
