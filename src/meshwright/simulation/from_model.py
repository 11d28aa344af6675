"""Read a model's architecture off its facts, and the way this library runs it off its plan."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from torch import nn

from meshwright.core.dtypes import dtype_bytes
from meshwright.core.errors import ConfigError
from meshwright.core.names import EXPERTS, HEADS, KEY_HEADS, TOP_K, WIDTH, is_within
from meshwright.distributed.memory.dry_run import SavedByBlock
from meshwright.introspection.facts import ModelFacts, ParameterFact
from meshwright.introspection.measurements import stated
from meshwright.introspection.small.configs import text_config
from meshwright.introspection.structure.experts import find_stacks
from meshwright.planning.data import JOINS_BLOCKS
from meshwright.planning.layout import Layout
from meshwright.planning.plan import Plan
from meshwright.planning.techniques import Techniques
from meshwright.planning.values import NF4_BLOCK, NF4_BLOCK_BYTES, Batch, Unit
from meshwright.simulation.cards import Machines
from meshwright.simulation.job import (
    PARTS,
    Architecture,
    AttentionShape,
    BlockShape,
    Execution,
    ExpertsShape,
    Job,
    Product,
)
from meshwright.simulation.step_memory import block_activations

LOGITS_COPIES, CUT_LOGITS_COPIES, CHUNK_COPIES = 3.0, 2.0, 1.0
"""fp32 copies of the logits at this library's loss; of a cut vocabulary's, beside the head's own where they are no such
copy; and further ones of a chunk: found by the dry run."""
WHOLE = ("full", "every_n", "selective_op", "memory_budget", "modules")


def architecture_of(facts: ModelFacts, recomputed: Sequence[str] = ()) -> Architecture:
    """Describe a model by its parameters and config; blocks are alike where the same modules are ``recomputed``."""
    dims = [dim for p in facts.parameters if len(p.shape) == 2 for dim in p.shape]
    # the width of the residual stream: as stated, else the commonest dim of the blocks' weights
    hidden = stated(facts.module, *WIDTH) or (max(set(dims), key=dims.count) if dims else 1)
    core, windows = None, getattr(text_config(facts.module), "layer_types", None) or ()
    if facts.attentions and (heads := stated(facts.module, *HEADS)):
        size = stated(facts.module, "qk_head_dim", "head_dim") or hidden // heads
        values, window = stated(facts.module, "v_head_dim") or size, stated(facts.module, "sliding_window") or 0
        core = AttentionShape(heads, stated(facts.module, *KEY_HEADS) or heads, size, values, window)
    stacks = {path: stack.experts for path, stack in find_stacks(facts.module).items()}
    kinds: dict[tuple, BlockShape] = {}
    inside = (p.name for path in facts.blocks[:1] for p in facts.of_unit(path))
    first = next(inside, None)
    before = 0 if first is None else [p.name for p in facts.parameters].index(first)
    blocks, flows = [], any(p.trainable for p in facts.parameters[:before])  # gradients flow into the first block
    for number, path in enumerate(facts.blocks):
        parameters, own = facts.of_unit(path), core
        if core is not None and len(windows) == len(facts.blocks) and windows[number] == "full_attention":
            own = replace(core, window=0)
        again = tuple(name.removeprefix(path) for name in recomputed if is_within(name, path))
        key = own, flows, again, *((p.name.removeprefix(path), p.shape, p.trainable) for p in parameters)
        flows = flows or any(p.trainable for p in parameters)
        if key not in kinds:
            kinds[key] = _block(facts, path, parameters, hidden, own, stacks)
        blocks.append(kinds[key])
    outside = facts.of_unit("") if facts.blocks else facts.parameters
    tables = [p for p in outside if len(p.shape) == 2]
    vocab = facts.vocab_size or max((p.shape[0] for p in tables), default=0)
    heads = [p for p in tables if p.shape[0] == vocab]
    if not blocks:  # nothing repeats: all products are one block
        blocks = [_block(facts, "", facts.parameters, hidden, None, stacks)]
    return Architecture(facts.kind, tuple(blocks), vocab, tied=len(heads) < 2)


def _block(
    facts: ModelFacts,
    path: str,
    parameters: Iterable[ParameterFact],
    hidden: int,
    core: AttentionShape | None,
    stacks: dict[str, int],
) -> BlockShape:
    products, stacked, experts, other, whole = [], [], 0, 0, False
    attends = [a for a in facts.attentions if is_within(a, path)]
    width, entering = 0, 0
    for p in parameters:
        stack = next((s for s in stacks if is_within(p.name, s)), None)
        if stack is not None and len(p.shape) == 3:
            experts, whole = stacks[stack], True
            stacked.append(Product(p.shape[2], p.shape[1], "column"))
        elif (held := _among_experts(facts, p, path)) is not None:
            (experts, first), whole = held, whole or len(p.shape) == 3
            stacked += [first] if first.columns else []
        elif len(p.shape) == 2 and min(p.shape) > 1:
            columns, depth = p.shape
            if columns in {*stacks.values(), stated(facts.module, *EXPERTS)} and depth == hidden:
                continue  # the router, which counts with its experts
            inside = any(is_within(p.name, a) for a in attends)
            cut = "row" if columns == hidden and depth != hidden else "column"
            products.append(Product(depth, columns, cut, attends=inside))
            if not inside:
                width = max(width, depth if columns == hidden else 0)
                entering += columns if depth == hidden else 0
        else:
            other += p.numel
    mixture = None
    if stacked:
        inner = min((dim for p in stacked for dim in (p.depth, p.columns) if dim != hidden), default=hidden)
        top_k = stated(facts.module, *TOP_K)
        if top_k is None:
            raise ConfigError(
                f"a forecast of {facts.kind} needs the number of experts that a token goes to, and its config states"
                f" none (looked for {', '.join(TOP_K)}): state it in model.config, which may be"
                f" types.SimpleNamespace({TOP_K[0]}=2)"
            )
        mixture = ExpertsShape(experts, min(experts, top_k), inner, tuple(stacked), whole=whole)
    module = facts.module.get_submodule(attends[0]) if attends else None
    if core is None and isinstance(module, nn.MultiheadAttention):  # torch's own states its heads
        size = module.embed_dim // module.num_heads
        core = AttentionShape(module.num_heads, module.num_heads, size, size, causal=False)
    return BlockShape(
        hidden,
        tuple(products),
        core if attends else None,
        width=width,
        gated=entering >= 2 * width > 0,
        experts=mixture,
        other=other,
    )


def _among_experts(facts: ModelFacts, p: ParameterFact, block: str) -> tuple[int, Product] | None:
    """Return the number of experts that a weight is of and one expert's product, for experts that no stack holds: rows
    of all in two dims, a third dim, or a list of modules, which has columns for its first expert alone; else None.
    """
    number, parts = stated(facts.module, *EXPERTS) or 1, p.name.split(".")
    if number < 2 or not block or len(p.shape) < 2:
        return None
    if len(p.shape) == 3 and p.shape[0] == number:
        return number, Product(p.shape[2], p.shape[1])
    inside = range(len(block.split(".")) + 1, len(parts))
    for place in (i for i in inside if parts[i].isdecimal()):
        if len(list(facts.module.get_submodule(".".join(parts[:place])).children())) == number:
            return number, Product(p.shape[1], p.shape[0] * (parts[place] == "0"))
    counts = vars(facts.module.get_submodule(".".join(parts[:-1]))).items()
    counts = [value for key, value in counts if "expert" in key and value == number]
    if counts and p.shape[0] % number == 0 and p.shape[0] > number:
        return number, Product(p.shape[1], p.shape[0] // number)
    return None


def left_out(facts: ModelFacts, architecture: Architecture, techniques: Techniques) -> Iterator[str]:
    """Yield a sentence for each part of the work that a forecast leaves out."""
    if techniques.cpu_offload:
        moved = "its state's transfers" if techniques.cpu_offload == "optimizer" else "all transfers"
        rest = "" if techniques.cpu_offload == "optimizer" else ", and the update on the CPU"
        key = json.dumps(techniques.cpu_offload)
        yield f"techniques.cpu_offload = {key}: the seconds leave out {moved} to and from host memory{rest}."
    if techniques.activation_checkpointing == "offload":
        yield "techniques.activation_checkpointing = offload: the seconds leave out transfers to and from host memory."
    if (mode := techniques.activation_checkpointing) in PARTS:
        yield f"techniques.activation_checkpointing = {mode}: the seconds are those of full, and it is faster."
    if techniques.optimizer == "muon":
        yield "optimizer.kind = muon: the seconds leave out the products that orthogonalise its updates."
    shapes, order = architecture.kinds
    silent = [place for place, kind in enumerate(order) if shapes[kind].attention is None]
    if silent:
        first = f" (first: {facts.blocks[silent[0]]})" if facts.blocks else ""
        yield (
            f"{len(silent)} of {len(order)} blocks{first} have no attention whose heads are known: what they compute"
            " across tokens beside their weights' products, such as attention's or a state-space layer's scan, is left"
            f" out. Heads are read from model.config, which may be types.SimpleNamespace({HEADS[0]}=8)."
        )
    number = stated(facts.module, *EXPERTS) or 1
    if number > 1 and not any(shape.experts for shape in shapes):
        yield f"the config states {number} experts, and none were found: every token is counted through all parameters."


def execution_of(plan: Plan) -> Execution:
    """Describe how this library runs a plan."""
    precision, data = plan.precision, plan.data
    compute = dtype_bytes(precision.compute)
    units = plan.units if plan.pipeline is None else [unit for stage in plan.stage_units for unit in stage]
    trained = [(unit.trainable_elements, unit.dtype) for unit in units] or [(1, precision.master)]
    elements = max(1, sum(size for size, _ in trained))
    master = sum(size * dtype_bytes(dtype) for size, dtype in trained) / elements
    reduce = sum(size * dtype_bytes(precision.reduced_in(dtype)) for size, dtype in trained) / elements
    gathered = _for_each_element(plan, lambda unit: unit.bytes_gathered, blocks=True)
    blocks = max(1, sum(len(unit.blocks) for unit in plan.units))
    reshards = [unit.reshard_after_forward for unit in plan.units if unit.name]
    keeps_gathered = blocks > 1 and not any(reshards)
    fully = data.technique == "fully_shard"
    recompute, budget = plan.activation_checkpointing, plan.activation_memory_budget or 0.0
    schedule = plan.pipeline
    ends = [] if schedule is None else list(accumulate(len(stage.blocks) for stage in schedule.stages))
    return Execution(
        products="float8" if plan.float8 is not None and not plan.float8.emulated else precision.compute,
        compute_bytes=compute,
        master_bytes=master,
        gradient_bytes=reduce if fully else master,
        frees_gradients=data.technique != "ddp",
        buckets=data.technique == "ddp",
        gathers_ends=True,
        reduce_bytes=reduce,
        optimizer_bytes=_optimizer_bytes(plan, master),
        zero=3 if fully else 0,
        blocks_per_unit=data.blocks_per_unit if JOINS_BLOCKS else 1,
        fused=bool(plan.compiled),
        recompute="full" if recompute in WHOLE else "selective" if recompute == "selective" else "none",
        named="" if recompute in ("none", "selective", "full") else recompute,
        offloads=recompute == "offload",
        recomputed=min(1.0, len(plan.checkpointed) / blocks) if recompute == "every_n" else 1 - budget,
        rests_on_host=data.cpu_offload is True,
        loss_chunks=1 if plan.loss is None else plan.loss.chunks,
        logits_copies=CUT_LOGITS_COPIES + (compute < 4) / 2 if plan.tensor and plan.tensor.head else LOGITS_COPIES,
        chunk_copies=CHUNK_COPIES,
        keeps_gathered=plan.tensor is not None and (not plan.tensor.regather or "collectives" in plan.checkpoint_keep),
        hides_tensor=0.7 if plan.tensor is not None and plan.tensor.async_tensor_parallel else 0.0,
        sequence_parallel=plan.tensor is None or plan.tensor.sequence_parallel,
        stages_per_rank=1 if schedule is None else len(schedule.stages) // schedule.ranks,
        schedule="" if schedule is None else schedule.schedule,
        cuts=tuple(zip([0, *ends], ends, strict=False)),
        reduces_each=data.sync_grad_accum is not False,
        sums_replicas_once=data.sync_grad_accum == "shard",
        gathers_each=not (data.gathers_per_step or keeps_gathered),
        reshards_to=max((int(n) for n in reshards if not isinstance(n, bool)), default=0),
        trained=_for_each_element(plan, lambda unit: unit.trainable_elements) if plan.units else 1.0,
        weight_bytes=_for_each_element(plan, lambda unit: unit.bytes_at_rest),
        gather_bytes=gathered,
        unpacked=0.0 if plan.quantize is None else (compute - gathered) / (compute - NF4_BLOCK_BYTES / NF4_BLOCK),
    )


def techniques_of(job: Job, techniques: Techniques) -> Techniques:
    """Return the techniques with a candidate's switches, which ``execution_of`` reads back off their plan."""
    run, layout = job.execution, job.layout
    changed: dict[str, Any] = {"loss_chunks": run.loss_chunks}
    if not run.named:
        changed["activation_checkpointing"] = run.recompute
    if layout.dp_shard * layout.cp > 1:
        changed["reshard_after_forward"] = run.gathers_each and (run.reshards_to or True)
        if run.reduces_each and not run.sums_replicas_once:
            changed["sync_grad_accum"] = True
    if layout.pp > 1:
        changed["pipeline_schedule"] = job.schedule
    if layout.pp > 1 and not run.cuts:
        several = run.stages_per_rank > 1 and not run.schedule
        changed["layers_per_stage"] = -(-len(job.architecture.blocks) // job.stages) if several else 0
    return replace(techniques, **changed)


def _optimizer_bytes(plan: Plan, master: float) -> float:
    """Return the bytes of optimizer state for each element on the device."""
    optimizer = plan.optimizer
    if optimizer.in_host_memory:
        return 0.0
    tensors = float(len(optimizer.row.state))
    if optimizer.row.by_role or optimizer.row.sums_parts:
        held = sum(
            unit.trainable_elements // (plan.experts if unit.experts and plan.experts else plan.shares).shards
            for unit in plan.units
        )
        tensors = sum(unit.state_elements for unit in plan.units) / max(held, 1)
    return tensors * {"full": float(master), "8bit": 1.02, "4bit": 0.53}[optimizer.state]


def _for_each_element(plan: Plan, count: Callable[[Unit], int], *, blocks: bool = False) -> float:
    """Return the sum of ``count`` over the units, or those of ``blocks``, for each of their elements; 0 without any."""
    units = plan.units if plan.pipeline is None else [unit for stage in plan.stage_units for unit in stage]
    counted = [(count(unit), unit.elements) for unit in units if unit.name or not blocks]
    elements = sum(size for _, size in counted)
    return sum(found for found, _ in counted) / elements if elements else 0.0


def with_saved(
    architecture: Architecture, saved: Sequence[SavedByBlock], stated: Sequence[SavedByBlock], job: Job
) -> Architecture:
    """Return an architecture whose blocks save as much as was measured.

    Args:
        saved: bytes of the first block of each kind in ``job``; empty: the architecture stays.
        stated: the same with the recomputation that a request states; empty: blocks keep their input of it.
        job: the job of one rank in which they were measured, with nothing recomputed.
    """
    kinds, order = architecture.kinds
    if len(saved) != len(kinds):
        return architecture
    again = job.with_execution(recompute="selective")
    entering = job.tokens * architecture.hidden * job.execution.compute_bytes
    made: list[BlockShape] = []
    for number, (block, held) in enumerate(zip(kinds, saved, strict=True)):
        outside = held.all - held.in_attention + (entering if held.in_attention else 0.0)
        hidden = max(0.0, held.hidden - 4 * entering)  # arithmetic has two inputs of norms and of products each
        made.append(
            replace(
                block,
                pairs=held.pairs / job.seq_len**2,
                eager_hidden=hidden / job.tokens,
                eager=(held.all - held.pairs - hidden) / block_activations(block, job),
                eager_recomputed=(outside - hidden) / block_activations(block, again),
                kept=min(1.0, stated[number].kept / max(held.all, 1)) if stated else entering / max(held.all, entering),
            )
        )
    masks = sum(held.given for held in saved) / job.seq_len**2
    return replace(architecture, blocks=tuple(made[kind] for kind in order), masks=masks)


def job_of_plan(
    facts: ModelFacts, plan: Plan, batch: Batch, machines: Machines, architecture: Architecture | None = None
) -> Job:
    """Return the job that a plan does with a batch on these machines, of an architecture that may be known already."""
    sizes = {key: plan.size(key) for key in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
    layout = Layout(**sizes, ep=1 if plan.experts is None else plan.experts.ranks)
    rows = max(1, batch.global_rows // plan.data_ranks)
    size = rows if plan.pipeline is None else plan.pipeline.rows_per_microbatch(rows, batch.rows_together)
    microbatch = min(rows, batch.microbatch_rows or size)
    step = batch.seq_len, batch.global_rows, microbatch
    return Job(architecture or architecture_of(facts), layout, *step, execution_of(plan), machines, batch.rows_together)
