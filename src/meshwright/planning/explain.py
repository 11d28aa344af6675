"""Format a plan as text for people, with the notes that it carries about a model and a layout."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshwright.core.axes import WORLD_AXES, Axis
from meshwright.core.devices import is_accelerator
from meshwright.core.dtypes import bytes_text, count_text
from meshwright.core.names import is_within, owner, pattern
from meshwright.introspection.constructor import STREAM_ELEMENTS
from meshwright.introspection.facts import ModelFacts
from meshwright.introspection.module_kinds import brings_initialiser
from meshwright.introspection.source import builder_of
from meshwright.introspection.structure.experts import find_stacks
from meshwright.planning.memory.states import MemoryEstimate, MemoryUse

from .collectives import resolved, step_traffic
from .context.kernels import kernel_of
from .data import stage_of
from .layout import Layout, shares_of
from .memory.states import plan_memory
from .plan import Plan
from .step.host_waits import described
from .techniques import Techniques
from .tensor.plan import TensorPlan
from .values import Batch, ParameterPlan

if TYPE_CHECKING:
    from meshwright.planning.context.plan import Method

# --- write the notes that a plan carries about a model and a layout


def _uncompiled(requested: Techniques, tensor: TensorPlan | None):
    if tensor is not None and requested.compile and requested.activation_checkpointing != "none":
        what = {"selective": "attentions", "modules": "modules"}.get(requested.activation_checkpointing, "blocks")
        yield f"{what} that are recomputed run uncompiled on the tensor axis: torch finds no graph for them"


def of(
    facts: ModelFacts,
    layout: Layout,
    requested: Techniques,
    technique: str,
    parameters: tuple[ParameterPlan, ...],
    tensor: TensorPlan | None,
) -> Iterator[str]:
    """Yield notes on decisions that a plan's reader may not expect."""
    yield from _uncompiled(requested, tensor)
    yield from _unrehearsed(facts, layout)
    yield from _whole_on_tensor_ranks(facts, layout, parameters)
    yield from _initial_weights(facts)
    for p in facts.parameters:
        if p.aliases:
            yield f"{p.name} is tied to {', '.join(p.aliases)}: one parameter, counted once"
    if technique == "fully_shard" and shares_of(layout, technique).shards == 1:
        yield "dp_shard = 1: nothing is sharded; fully_shard acts for its precision or offload only"
    if technique == "fully_shard" and not facts.blocks:
        yield f"no repeated block was found in {facts.kind}: all parameters are gathered at once"


def _unrehearsed(facts: ModelFacts, layout: Layout):
    if layout.world > 1 and (why := facts.measurements.premises().unknown):
        unseen = "whether rows depend on each other, or calls leave state, is not known"
        yield f"the forward of {facts.kind} could not be rehearsed ({why}): {unseen}"


def _initial_weights(facts: ModelFacts):
    """Note whether initial weights differ in the last bits from those of the constructor in one process."""
    if not facts.on_meta or facts.module is None or hasattr(facts.module, "weight_law"):
        return
    if builder_of(facts.module) is None and not brings_initialiser(facts.module):
        note = f"initial weights: by the reset_parameters of {facts.kind}'s modules, since it was built on meta"
        yield (
            f"{note}; what its constructor did besides is not known. Give {facts.kind} itself, or a function that"
            f" builds it"
        )
    elif facts.numel > STREAM_ELEMENTS:
        note = "initial weights: by the constructor's distributions, drawn by (seed, name, position)"
        yield f"{note}; up to {STREAM_ELEMENTS:,} elements they are the constructor's own numbers"


def _whole_on_tensor_ranks(facts: ModelFacts, layout: Layout, parameters: tuple[ParameterPlan, ...]):
    """Note the matrices that the tensor axis does not cut."""
    whole = [p for p in parameters if dict(p.placements).get(Axis.TP.value) == "Replicate()" and len(p.shape) > 1]
    stacks = {pattern(path) for path in find_stacks(facts.module)} if whole and facts.module is not None else set()
    sizes: dict[str, int] = {}
    towers = facts.measurements.image_modules() if whole else ()
    of_towers: dict[str, int] = {}
    for p in whole:
        size = p.bytes
        if (tower := next((path for path in towers if is_within(p.pattern, path)), "")) != "":
            of_towers[tower] = of_towers.get(tower, 0) + size
        elif owner(p.pattern) in stacks:
            sizes[owner(p.pattern)] = sizes.get(owner(p.pattern), 0) + size
        else:
            yield f"{p.pattern} stays whole on every rank of the tensor axis: {bytes_text(size)} ({p.count} of them)"
    for path, size in of_towers.items():
        yield f"{path}, which computes images, stays whole on every rank of the tensor axis: {bytes_text(size)}"
    for path, size in sizes.items():
        note = (
            f"the experts of {path} are not tensor-sharded: every rank of the tensor axis has all of them,"
            f" {bytes_text(size)}"
        )
        yield f"{note}. layout.ep = {layout.tp} would share them out over its ranks"


# --- format a plan as text for people

KEPT = {
    MemoryUse.ACTIVATIONS: "activations",
    MemoryUse.LOGITS: "logits",
    MemoryUse.COMMUNICATION: "messages",
    MemoryUse.BUFFERS: "buffers",
}


def table(
    plan: Plan, batch: Batch | None = None, estimate: MemoryEstimate | None = None, *, whether_it_fits: str = ""
) -> str:
    """Format the whole plan, with a batch also the bytes sent per step, with an estimate also activation memory.

    Args:
        whether_it_fits: line to put below the memory.
    """
    parts = [_header(plan), _parameters(plan), _collectives(plan)]
    if batch is not None:
        parts.append(_traffic(plan, batch))
    microbatches = 1 if batch is None else resolved(plan, batch).microbatches(plan.data_ranks)
    parts.append("\n".join(filter(None, (_memory(plan, microbatches, estimate), whether_it_fits))))
    if is_accelerator(plan.device):
        parts.append(f"the host waits for the device in a step\n  {described(plan, microbatches)}")
    unknown = (
        (f"activations and logits are not estimated: {estimate.why_not}",)
        if estimate is not None and estimate.why_not
        else ()
    )
    assumed = () if estimate is None else (f"memory: {note}" for note in estimate.notes)
    if notes := (*plan.notes, *unknown, *assumed):
        parts.append("notes\n" + "\n".join(f"  {note}" for note in notes))
    return "\n\n".join(parts)


def columns(rows: list[tuple[str, ...]], heads: tuple[str, ...]) -> str:
    """Format rows as left-aligned text columns under a heading."""
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in [heads, *rows]
    ]
    return "\n".join("  " + line for line in lines)


def _header(plan: Plan) -> str:
    mesh = " × ".join(f"{axis}={plan.size(axis)}" for axis in WORLD_AXES if plan.size(axis) > 1) or "one rank"
    total = sum(p.count * math.prod(p.shape) for p in plan.parameters)
    p, data = plan.precision, plan.data
    lines = [
        f"{plan.model}: {count_text(total)} parameters on {plan.world} rank{'s' * (plan.world > 1)} ({plan.device}),"
        f" mesh {mesh}",
        f"  data parallel   {data.technique}, gradients: {data.reduction} over {plan.shares.batch_ranks} data ranks"
        + (f", reshard_after_forward {_reshard(plan)}" if data.technique == "fully_shard" else "")
        + (f" (ZeRO-{stage})" if (stage := stage_of(plan)) else "")
        + (", parameters and optimizer state in host memory" if data.cpu_offload else ""),
        f"  precision       at rest {p.master}, compute {p.compute}, reduce {p.reduce}"
        + (f", output {p.output}" if p.output else "")
        + (f", loss times {p.loss_scale:g} at first" if p.loss_scale else ""),
        *_optimizer(plan),
        *_float8(plan),
        *_quantize(plan),
        *_tensor(plan),
        *_context(plan),
        *_experts(plan),
        f"  recompute       {plan.activation_checkpointing}" + _where(plan.checkpointed) + _kept(plan),
        f"  compile         {dict(plan.compile_options).get('backend', 'off')}" + _where(plan.compiled),
        f"  frozen          {len(plan.frozen) or 'none'}" + _where(plan.frozen),
    ]
    if plan.tensor is not None or plan.context is not None or plan.pipeline is not None:
        rehearsed = "compares a small copy of the model, laid out like this, with one process, and refuses what differs"
        lines.append(f"  proof           before the first step parallelize {rehearsed}; a plan alone is not compared")
    return "\n".join(lines)


def _optimizer(plan: Plan) -> list[str]:
    o = plan.optimizer
    units = plan.units if plan.pipeline is None else [unit for units in plan.stage_units for unit in units]
    few, every = sum(unit.rounded_tensors for unit in units), sum(p.count for p in plan.parameters if p.trainable)
    settings = [
        *(
            [f"state in {o.state} of {few} of {every} parameters, of the others in {plan.precision.master}"]
            if o.state != "full"
            else []
        ),
        *(["new weights rounded stochastically"] if o.stochastic_rounding else []),
        *(["state in host memory"] if o.in_host_memory else []),
    ]
    return [f"  optimizer       {'; '.join(settings)}"] if settings else []


def _float8(plan: Plan) -> list[str]:
    if plan.float8 is None:
        return []
    how = "emulated, " if plan.float8.emulated else ""
    names = ", ".join(dict.fromkeys(pattern(path) for path in plan.float8.modules))
    how += "gathered in float8, " if plan.float8.all_gather and plan.shares.shards > 1 else ""
    return [f"  float8          {plan.float8.recipe}, {how}{len(plan.float8.modules)} linear layers: {names}"]


def _quantize(plan: Plan) -> list[str]:
    if plan.quantize is None:
        return []
    names = ", ".join(dict.fromkeys(pattern(path) for path in plan.quantize.modules))
    return [f"  4-bit weights   nf4, 4.5 bits each, {len(plan.quantize.modules)} frozen linear layers: {names}"]


def _tensor(plan: Plan) -> list[str]:
    tensor, loss = plan.tensor, plan.loss
    lines = []
    if tensor is not None:
        way = "sequences cut between blocks" if tensor.sequence_parallel else "whole sequences between blocks"
        again = ", gathered again in backward" if tensor.sequence_parallel and tensor.regather else ""
        beside = ", products overlap with messages" if tensor.async_tensor_parallel else ""
        lines.append(f"  tensor parallel {tensor.ranks} ranks, {way}{again}{beside}; the plan is {tensor.source}")
    if loss is not None:
        lines.append(f"  loss            by {loss.head}, in {loss.chunks} chunks of a microbatch's tokens")
    return lines


def _context(plan: Plan) -> list[str]:
    if plan.context is None:
        return []
    context = plan.context
    cut = "at head and tail" if context.cut == "head_tail" else "in runs"
    lines = [f"  context parallel {context.ranks} ranks, rows cut {cut}"]
    alike: dict[tuple[Method, str, str], list[str]] = {}
    for caller, method in zip(context.mixing.callers, context.methods, strict=True):
        kernel = kernel_of(caller, plan.device, plan.precision.compute)
        alike.setdefault((method, pattern(caller.path), kernel), []).append(caller.path)
    for (method, paths, kernel), found in alike.items():
        neighbours = f" among {method.neighbours}" if method.kind == "ulysses_ring" else ""
        lines.append(f"    {method.kind}{neighbours} for {len(found)} attentions {paths}: {method.why}")
        lines.append(f"      computed by {kernel}")
    mixers = Counter((m.kind, pattern(m.mixer.path), m.mixer.why, m.reason) for m in context.mixers)
    for (kind, paths, why, reason), count in mixers.items():
        work = f" on each rank, {context.ranks} times its work," if kind == "whole" else ""
        lines.append(f"    {kind}{work} for {count} modules {paths} ({why}): {reason}")
    return lines


def _experts(plan: Plan) -> list[str]:
    if plan.experts is None:
        return []
    e = plan.experts
    numbers = " and ".join(str(n) for n in sorted({stack.experts for stack in e.stacks}))
    what = f"{e.ranks} ranks share {numbers} experts of {len(e.stacks)} layers out"
    return [f"  expert parallel {what}; each share is sharded over efsdp={e.shards}"]


def _reshard(plan: Plan) -> str:
    values = [str(unit.reshard_after_forward) for unit in plan.units if unit.name]
    return (
        values[0].lower() + (" (root and last block stay gathered)" if values[0] != "False" else "")
        if values
        else "false"
    )


def _kept(plan: Plan) -> str:
    if plan.activation_memory_budget is not None:
        return f": {plan.activation_memory_budget} of what the compiled blocks would keep"
    every = "" if plan.checkpoint_keep_every == 1 else f", one of {plan.checkpoint_keep_every} matrix products"
    return f"; kept: {', '.join(plan.checkpoint_keep)}{every}" if plan.checkpoint_keep else ""


def _where(names: tuple[str, ...]) -> str:
    patterns = list(dict.fromkeys(pattern(name) for name in names))
    return f": {', '.join(patterns[:4])}{' …' * (len(patterns) > 4)} ({len(names)})" if names else ""


def _parameters(plan: Plan) -> str:
    rows = [
        (
            p.pattern + ("" if p.trainable else " (frozen)"),
            str(p.count),
            "×".join(map(str, p.shape)) or "scalar",
            p.dtype,
            bytes_text(p.bytes),
            ", ".join(f"{axis}: {where}" for axis, where in p.placements) or "whole",
        )
        for p in plan.parameters
    ]
    return "parameters\n" + columns(rows, ("name", "count", "shape", "dtype", "bytes", "placement"))


def _collectives(plan: Plan) -> str:
    groups: dict[tuple, list[int]] = {}
    for c in plan.collectives:
        unit = pattern(c.unit)
        elements = c.elements // (c.calls or 1) if c.by_token or c.by_row else c.elements
        group = groups.setdefault(
            (c.op, c.axis, c.ranks, unit, c.dtype, "token" if c.by_token else "row" if c.by_row else c.per, elements),
            [0, c.calls is None],
        )
        group[0] += c.calls or 1
    rows = [
        (
            op,
            f"{axis} ({ranks})",
            unit,
            "in buckets" if bucketed else str(calls),
            f"{count_text(elements)} {dtype}",
            per,
        )
        for (op, axis, ranks, unit, dtype, per, elements), (calls, bucketed) in groups.items()
    ]
    if not rows:
        return "collectives of a step\n  none"
    return "collectives of a step\n" + columns(rows, ("op", "axis (ranks)", "what", "calls", "elements each", "per"))


def _traffic(plan: Plan, batch: Batch) -> str:
    rows = [
        (t.op, f"{t.axis} ({t.ranks})", "in buckets" if t.calls is None else str(t.calls), bytes_text(t.bytes))
        for t in step_traffic(plan, batch)
    ]
    head = (
        f"bytes sent per rank and step ({batch.global_rows} rows, {batch.microbatches(plan.data_ranks)} microbatches)"
    )
    return head + "\n" + (columns(rows, ("op", "axis (ranks)", "calls", "bytes")) if rows else "  none")


def _bits(plan: Plan) -> str:
    return "" if plan.optimizer.state == "full" else f", {plan.optimizer.state}"


def _memory(plan: Plan, microbatches: int, estimate: MemoryEstimate | None) -> str:
    if estimate is None or not estimate.ranks:
        return _states(plan, microbatches)
    fullest = estimate.fullest
    memory = estimate.of(fullest)
    m = plan_memory(plan, microbatches=microbatches, pipeline_rank=fullest)
    resting = {
        MemoryUse.PARAMETERS: ("parameters", m.parameters),
        MemoryUse.GRADIENTS: ("gradients", m.gradients),
        MemoryUse.OPTIMIZER: (f"optimizer ({plan.optimizer.row.title}{_bits(plan)})", m.optimizer),
        **{kind: (name, 0) for kind, name in KEPT.items()},
        MemoryUse.HOST: ("in host memory", 0),
    }
    rows = [
        (name, bytes_text(size), bytes_text(memory.most.get(kind, 0)), bytes_text(memory.peak.get(kind, 0)))
        for kind, (name, size) in resting.items()
        if memory.most.get(kind)
    ]
    low = f"{bytes_text(estimate.least[fullest])} to " if estimate.least else ""
    rows.append(("together", bytes_text(m.at_rest + m.gradients), "", low + bytes_text(memory.total)))
    heads = ("what", "before the optimizer steps", "most at a time", "at the peak of all")
    head = f"memory of {_whose(plan, fullest)} ({_step_words(microbatches)})"
    return "\n".join([head, columns(rows, heads), *_by_rank(estimate)])


def _states(plan: Plan, microbatches: int) -> str:
    m = plan_memory(plan, microbatches=microbatches)
    rows = [
        ("parameters", bytes_text(m.parameters), bytes_text(m.parameters + m.gathered)),
        ("gradients", bytes_text(m.gradients), bytes_text(m.gradients_at_peak + m.reducing)),
        (
            f"optimizer ({plan.optimizer.row.title}{_bits(plan)})" + ", in host memory" * bool(m.moving),
            bytes_text(m.optimizer),
            bytes_text(m.optimizer),
        ),
        *([("of it on the device, during the step", "0 B", bytes_text(m.moving))] if m.moving else []),
        (
            "together" + ", on the device" * bool(m.moving),
            bytes_text(m.at_rest + m.gradients),
            bytes_text(m.at_peak),
        ),
    ]
    host = ", at rest in host memory" if m.in_host_memory else ""
    head = f"memory of {_whose(plan, m.pipeline_rank)} without activations ({_step_words(microbatches)}{host})"
    return "\n".join([head, columns(rows, ("what", "before the optimizer steps", "at peak"))])


def _whose(plan: Plan, rank: int) -> str:
    return f"rank {rank} of the pipeline" if plan.pipeline is not None else "each rank"


def _step_words(microbatches: int) -> str:
    return f"{microbatches} microbatch{'es' * (microbatches > 1)}"


def _by_rank(estimate: MemoryEstimate) -> list[str]:
    """List the peaks of the ranks of a pipeline."""
    if len(estimate.ranks) < 2:
        return []
    sizes = (f"{rank}: {bytes_text(memory.total)}" for rank, memory in enumerate(estimate.ranks))
    return [f"  at the peak, by rank of the pipeline  {', '.join(sizes)}"]


setattr(Plan, "__str__", table)  # noqa: B010 -- the printer knows the plan, and the plan knows no printer
