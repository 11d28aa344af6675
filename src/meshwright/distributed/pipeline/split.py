"""Cut a model into the stages of one rank, a module for each."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from meshwright.core.dtypes import torch_dtype
from meshwright.core.names import clean, is_within, owner
from meshwright.core.record import remember
from meshwright.distributed.step.part import ModelPart
from meshwright.introspection.facts import ModelFacts
from meshwright.introspection.images.arguments import OF_TOWER
from meshwright.introspection.module_kinds import children_of
from meshwright.planning.pipeline.plan import PipelinePlan
from meshwright.planning.pipeline.stages import facts_of_stage, plan_of_stage
from meshwright.planning.plan import Plan

from .absent import AbsentBlock, AbsentModule, StageIO


@dataclass(frozen=True)
class SharedEnds:
    """Names of the parameters that the first stage shares with the last, remembered by the last."""

    names: tuple[str, ...]


@dataclass
class StagePart(ModelPart):
    """A part of the model that is a pipeline stage.

    Attributes:
        passage: its place for the received and the sent activations.
    """

    passage: StageIO = field(default_factory=StageIO)


_HOLDERS = (nn.ParameterDict, nn.ParameterList)


def arguments_of(stage: int, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a stage's forward: images themselves go to the first alone, which has their modules."""
    return inputs if not stage else {key: value for key, value in inputs.items() if key not in OF_TOWER}


def split(model: nn.Module, plan: Plan, facts: ModelFacts, rank: int) -> list[StagePart]:
    """Return the parts of a rank of the pipeline axis, in forward order.

    ``model`` may be on meta; it is not changed, and the parts share its blocks.
    """
    assert plan.pipeline is not None
    parts = []
    for stage in plan.pipeline.stages_on(rank):
        passage = StageIO()
        module = stage_of(model, plan.pipeline, stage, passage)
        if stage == len(plan.pipeline.stages) - 1:
            shared = tuple(last for _, last in plan.pipeline.tied)
            remember(module, SharedEnds(shared))
            if parts and parts[0].stage == 0 and not facts.on_meta:
                _copy_parameters(module, shared)
        parts.append(
            StagePart(
                module, plan_of_stage(plan, stage), _facts_of(facts, module, plan.pipeline, stage), stage, passage
            )
        )
    return parts


def _copy_parameters(module: nn.Module, names: tuple[str, ...]) -> None:
    """Replace parameters by copies: as one tensor with another stage's, they would get both gradients twice."""
    for name in names:
        before = module.get_parameter(name)
        made = nn.Parameter(before.detach().clone(), requires_grad=before.requires_grad)
        module.get_submodule(owner(name))._parameters[name.rpartition(".")[2]] = made


def stage_of(model: nn.Module, pipeline: PipelinePlan, stage: int, passage: StageIO) -> nn.Module:
    """Return a copy of the model with the modules of one stage: new containers around the model's own modules."""
    blocks = pipeline.blocks
    own = pipeline.stages[stage].blocks
    first, last = blocks.index(own[0]), blocks.index(own[-1])
    made: dict[int, nn.Module] = {}

    def inside(path: str, name: str) -> str:
        return clean(f"{path}.{name}" if path else name)

    def cut(module: nn.Module, path: str) -> nn.Module:
        if id(module) in made:
            return made[id(module)]
        if path in blocks:
            place = blocks.index(path)
            part = "entrance" if place == first - 1 else "exit" if place == last + 1 else "bystander"
            here = path in own
            made[id(module)] = (
                module
                if here
                else AbsentBlock(
                    module, pipeline.kind_of(path), part, passage, keeps_shape=pipeline.counts_tokens_behind
                )
            )
        elif not any(is_within(block, path) for block in blocks):
            uses = _uses(module, path)
            if uses and not any(pipeline.has(stage, used) for used in uses):
                made[id(module)] = AbsentModule(module, torch_dtype(pipeline.dtype))
            else:
                made[id(module)] = _with_children(module, path)
        else:
            made[id(module)] = _with_children(module, path)
            held = made[id(module)]._parameters
            held.update({name: None for name in held if not pipeline.has(stage, inside(path, name))})
        return made[id(module)]

    def _with_children(module: nn.Module, path: str) -> nn.Module:
        shell = _shell(module)
        for name, child in children_of(module).items():
            shell.add_module(name, cut(child, inside(path, name)))
        return shell

    return cut(model, "")


def _uses(module: nn.Module, path: str) -> list[str]:
    """List the paths of a module's own parameters, in dicts or lists too, as adapters of an embedding have them."""
    inside = {name: child for name, child in children_of(module).items() if isinstance(child, _HOLDERS)}
    held = {path: module} | {clean(f"{path}.{name}"): child for name, child in inside.items()}
    return [path for path, one in held.items() if any(tensor is not None for tensor in one._parameters.values())]


def _shell(module: nn.Module) -> nn.Module:
    """Return a module of the same class and contents, with dicts of its own."""
    shell = module.__class__.__new__(module.__class__)
    shell.__dict__.update(
        {
            key: copy.copy(value) if key.startswith("_") and isinstance(value, dict | set) else value
            for key, value in vars(module).items()
        }
    )
    return shell


def _facts_of(facts: ModelFacts, module: nn.Module, pipeline: PipelinePlan, stage: int) -> ModelFacts:
    held = {clean(name) for name, _ in module.named_buffers(remove_duplicate=False)}
    buffers = tuple(fact for fact in facts.buffers if fact.name in held)
    return replace(facts_of_stage(facts, pipeline, stage), buffers=buffers, module=module)
