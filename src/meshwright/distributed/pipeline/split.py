"""Cut a model into the stages of one rank, a module for each, and rehearse the cut on a small copy.

The model's own forward runs on every stage. So its own code computes masks, positions, rotary tables and other
arguments of its blocks, and no family needs special code. Absent blocks pass their input on; the last one before the
stage's own blocks returns the received tensor, and the first one after them takes the tensor to send. Other absent
modules run on meta to find the shape of their output, and return a tensor of that shape without values.

The code that makes the stages of the real model makes them here too; only the transport of messages differs.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn

from meshwright.core.dtypes import torch_dtype
from meshwright.core.errors import UnsupportedError
from meshwright.core.names import clean, is_within, owner
from meshwright.core.record import remember
from meshwright.core.torch_private import parameters_in, tree_leaves, tree_map
from meshwright.distributed.rehearsal import Errors, errors_of, gradients_of, loss_of, wrong
from meshwright.distributed.step.deferred import DeferredGradients, defer_linear
from meshwright.distributed.step.part import ModelPart
from meshwright.introspection.facts import ModelFacts
from meshwright.introspection.images import OF_TOWER
from meshwright.introspection.logits_tape import line_that_raised, shown
from meshwright.introspection.module_kinds import children_of
from meshwright.introspection.signature import logits_of
from meshwright.introspection.small.copies import meta_copy_of
from meshwright.introspection.small.sample import Sample
from meshwright.introspection.stages import BlockFlow, Branch, branches_of, read_outside
from meshwright.planning.pipeline.plan import PipelinePlan, StagePlan
from meshwright.planning.pipeline.stages import facts_of_stages, plan_of_stage
from meshwright.planning.plan import Plan

Part = Literal["entrance", "exit", "bystander"]


@dataclass
class StageIO:
    """The activations that enter and leave a stage in the current forward.

    Attributes:
        shape: (rows, seq) of the token ids.
        entering: (rows, seq, features), received; None on the first stage.
        leaving: (rows, seq, features), to be sent; None on the last stage.
    """

    shape: tuple[int, ...] = ()
    entering: Tensor | None = None
    leaving: Tensor | None = None


class Absent(nn.Module):
    """A module without parameters in place of one that another stage has.

    Its other attributes are those of the original, such as a block's type of attention.

    Attributes:
        begins_part: whether its output comes from another stage, so that modules before it compute nothing.
        ends_part: whether the modules after it, and around it, return nothing.
    """

    is_absent = True
    begins_part = False
    ends_part = False

    def __init__(self, original: nn.Module):
        super().__init__()
        self.__dict__["_original"] = original  # not a submodule: its parameters are on another stage

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_original"], name)


class AbsentBlock(Absent):
    """Takes the place of a repeated block that another stage has.

    Args:
        keeps_shape: whether modules after the exit get a tensor of the full shape; else one of no tokens, which costs
            nothing.
    """

    def __init__(self, original: nn.Module, flow: BlockFlow, part: Part, passage: StageIO, *, keeps_shape: bool):
        super().__init__(original)
        self._flow, self._part, self._passage, self._keeps_shape = flow, part, passage, keeps_shape
        self.begins_part, self.ends_part = part == "entrance", part == "exit"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        key = self._flow.hidden
        hidden = args[key] if isinstance(key, int) else kwargs[key]
        if self._part == "entrance":
            assert self._passage.entering is not None
            hidden = self._passage.entering
        elif self._part == "exit":
            self._passage.leaving = hidden
            hidden = hidden.detach()[:, :0]
            if self._keeps_shape:
                hidden = _stand_in(hidden, hidden.device, (*self._passage.shape, *hidden.shape[2:]))
        return (hidden,) if self._flow.returns_tuple else hidden


class AbsentModule(Absent):
    """Takes the place of a module outside the blocks, such as an embedding or a head, that another stage has.

    Args:
        dtype: dtype of the module's output, since tables and masks take the dtype of the activations.
    """

    def __init__(self, original: nn.Module, dtype: torch.dtype):
        super().__init__(meta_copy_of(original).to(dtype))
        self._last: tuple[Any, Any] = None, None  # what a tensor given alone was like, and what came of it

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        one = args[0] if len(args) == 1 and not kwargs and isinstance(args[0], Tensor) else None
        like = None if one is None else (one.shape, one.dtype, one.device)
        if one is not None and like == self._last[0]:
            return _stand_in(self._last[1], one.device)
        device = next((leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
        given = tree_map(lambda leaf: leaf.detach().to("meta") if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        with torch.no_grad():
            output = self.__dict__["_original"](*given[0], **given[1])
        self._last = (like, output) if isinstance(output, Tensor) else (None, None)
        return tree_map(lambda leaf: _stand_in(leaf, device) if isinstance(leaf, Tensor) else leaf, output)


def _stand_in(like: Tensor, device: torch.device | None, shape: tuple[int, ...] | None = None) -> Tensor:
    """Return a NaN without memory in the shape of ``like`` (or ``shape``), so that code which reads it shows."""
    blank = torch.nan if like.is_floating_point() else 0
    return torch.full((1,), blank, dtype=like.dtype, device=device).expand(like.shape if shape is None else shape)


@dataclass(frozen=True)
class SharedEnds:
    """Names of the parameters that the first stage shares with the last, remembered by the last."""

    names: tuple[str, ...]


def counted_once(models: Sequence[nn.Module], plan: Plan) -> list[nn.Parameter]:
    """List this rank's parameters without the last stage's copies of the first stage's in a pipeline."""
    copies = {last for _, last in plan.pipeline.tied} if plan.pipeline else set()
    if not copies:  # a step asks: no name is worth making
        return list(chain.from_iterable(map(parameters_in, models)))
    return [p for model in models for name, p in model.named_parameters() if clean(name) not in copies]


@dataclass
class StagePart(ModelPart):
    """A part of the model that is a pipeline stage; ``passage``: its place for received and sent activations."""

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
            # as one tensor with another stage's on this rank, parameters would get both gradients twice
            for name in shared if parts and parts[0].stage == 0 and not facts.on_meta else ():
                before = module.get_parameter(name)
                made = nn.Parameter(before.detach().clone(), requires_grad=before.requires_grad)
                module.get_submodule(owner(name))._parameters[name.rpartition(".")[2]] = made
        held = {clean(name) for name, _ in module.named_buffers(remove_duplicate=False)}
        buffers = tuple(fact for fact in facts.buffers if fact.name in held)
        own = replace(facts_of_stages(facts, plan.pipeline)[stage], buffers=buffers, module=module)
        parts.append(StagePart(module, plan_of_stage(plan, stage), own, stage, passage))
    return parts


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
            kept = pipeline.counts_tokens_behind
            made[id(module)] = (
                module if here else AbsentBlock(module, pipeline.kind_of(path), part, passage, keeps_shape=kept)
            )
        elif not any(is_within(block, path) for block in blocks):
            # its own parameters, in dicts or lists too, as adapters of an embedding have them
            lists = {inside(path, n): child for n, child in children_of(module).items() if isinstance(child, _HOLDERS)}
            uses = [
                used
                for used, one in {path: module, **lists}.items()
                if any(tensor is not None for tensor in one._parameters.values())
            ]
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
        shell = module.__class__.__new__(module.__class__)  # with dicts of its own
        is_own = lambda key, value: key.startswith("_") and isinstance(value, dict | set)  # noqa: E731
        shell.__dict__.update({k: copy.copy(v) if is_own(k, v) else v for k, v in vars(module).items()})
        for name, child in children_of(module).items():
            shell.add_module(name, cut(child, inside(path, name)))
        return shell

    return cut(model, "")


# --- rehearse a cut into stages before its first use, on a small copy of the model with one block for each stage


def prove(facts: ModelFacts, plan: PipelinePlan, ranks: int) -> None:
    """Rehearse the plan on a small copy, without communication, once for each; raise where results differ."""
    sample = facts.measurements.structure(ranks).sample
    stages = tuple(StagePlan(0, (block,)) for block in sample.blocks)
    small = replace(plan, stages=stages, dtype="float64")
    if small in facts.measurements.proven:
        return
    for branch in branches_of(sample):
        where = "in training mode, on rows of many ids, " * branch.training
        where += f"where {shown(*branch.inverted)} reads another value, " if branch.inverted else ""
        try:
            what = wrong(rehearse(sample, small, branch))
        except Exception as error:
            line = line_that_raised(error)
            failed = f"its forward or backward fails{line and f' at {line}'}: {type(error).__name__}: {error}"
            why = read_outside(sample, branch) or failed
            raise UnsupportedError(_refused(facts, plan, where + why)) from error
        if what:
            outside = read_outside(sample, branch)
            raise UnsupportedError(_refused(facts, plan, where + (f"{what}: {outside}" if outside else what)))
    facts.measurements.proven.add(small)


def _refused(facts: ModelFacts, plan: PipelinePlan, why: str) -> str:
    return (
        f"layout.pp = {plan.ranks}: {facts.kind}, cut between its blocks, was rehearsed on a small copy of it, and"
        f" {why}. Only what one block gives to the next may go from stage to stage. Set layout.pp = 1."
    )


def rehearse(sample: Sample, plan: PipelinePlan, branch: Branch) -> Errors:
    """Compare stages with the whole of a small model that has weights, in one branch."""
    reference, way = branch.copied(sample)
    with way:
        expected_loss = loss_of(logits_of(reference(**branch.inputs)))
        expected_loss.backward()
    model, way = branch.copied(sample)
    with way:  # the stages share the parameters here, so that gradients of tied ones add up
        inputs = dict(branch.inputs)
        passages = [StageIO() for _ in plan.stages]
        stages = [stage_of(model, plan, number, passage) for number, passage in enumerate(passages)]
        deferred = DeferredGradients()
        for stage, module in zip(plan.stages, stages, strict=True):
            for path, transposed in plan.kind_of(stage.blocks[0]).linears if plan.splits_backward else ():
                defer_linear(module.get_submodule(f"{stage.blocks[0]}.{path}"), transposed, deferred)
        left: list[Tensor] = []
        entered: list[Tensor | None] = []
        for number, (module, passage) in enumerate(zip(stages, passages, strict=True)):
            passage.shape = tuple(next(iter(inputs.values())).shape)
            passage.entering = left[-1].detach().requires_grad_() if left else None
            entered.append(passage.entering)
            output = module(**arguments_of(number, inputs))
            passed = loss_of(logits_of(output)) if module is stages[-1] else passage.leaving
            assert passed is not None
            left.append(passed)
        gradient: Tensor | None = None
        for number in reversed(range(len(stages))):
            deferred.begin(number)
            torch.autograd.backward(left[number], gradient)
            deferred.end()
            gradient = None if (given := entered[number]) is None else given.grad
            deferred.do(number)
        found = gradients_of(model)
    loss = left[-1].item()
    return errors_of(
        [loss], expected_loss.item(), reference, lambda name, one: [found.get(name, torch.zeros_like(one))]
    )
