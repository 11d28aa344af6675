"""List every legality check in one table; each rule judges a Case and yields errors worded for the user."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from meshwright.core.axes import Axis
from meshwright.core.devices import is_accelerator
from meshwright.core.dtypes import canonical_dtype
from meshwright.core.errors import ConfigError, MeshwrightError, UnsupportedError
from meshwright.core.names import is_within, owner, pattern
from meshwright.introspection.facts import ModelFacts, ParameterFact
from meshwright.planning.context.plan import context_companions, refuse_shorter
from meshwright.planning.data import Holding, apart, units_fit, without_skipped, zero_fits
from meshwright.planning.experts import experts_companions, experts_fit, own_loss_of_experts, stacked_adapters
from meshwright.planning.float8 import float8_companions, float8_gathering, float8_requested
from meshwright.planning.layout import SHARDS, shares_of
from meshwright.planning.optimizer import optimizer_fits
from meshwright.planning.pipeline.plan import check_microbatches, pipeline_companions, pipeline_requested
from meshwright.planning.plan import Plan
from meshwright.planning.premise_rules import (
    decisions_are_of_a_row,
    gradients_are_dense,
    hooks_are_called,
    parameters_are_reached,
    rows_stand_alone,
    state_stays,
    weights_are_read_only,
)
from meshwright.planning.quantize import quantize_companions
from meshwright.planning.recompute import checkpointing_companions, checkpointing_keys, checkpointing_matches
from meshwright.planning.techniques import Precision, RunTechniques
from meshwright.planning.tensor.make import (
    async_tensor_fits,
    lengths_of_whole_rows,
    tensor_companions,
    tensor_fits,
    tensor_words,
)
from meshwright.planning.values import Batch, Case, Found, PrecisionPlan, no_blocks


def half_precision(case: Case) -> Found:
    p, request = case.precision, case.techniques.precision
    for key, dtypes in (("master", case.trained_dtypes), ("reduce", (p.reduce,))):
        if "float16" in dtypes:
            yield UnsupportedError(
                f"techniques.precision.{key} = float16 would lose small gradients and overflow in sums. Set"
                f" techniques.precision.{key} = float32, and techniques.precision.compute = float16 to compute in it."
            )
    if p.output == "float16" and p.compute != "float16":
        yield UnsupportedError(
            f"techniques.precision.output = float16 with techniques.precision.compute = {p.compute} would lose small"
            f" gradients of the"
            f" logits: the loss is scaled where compute is float16. Set output = {p.compute}, or compute = float16."
        )
    if p.compute != "float16" and request.loss_scale != Precision.loss_scale:
        yield ConfigError(
            f"techniques.precision.loss_scale is about float16, and techniques.precision.compute = {p.compute} needs no"
            f" scaling of the loss. Leave it out."
        )
    elif request.loss_scale < 1 or math.frexp(request.loss_scale)[0] != 0.5:
        yield ConfigError(
            f"techniques.precision.loss_scale = {request.loss_scale:g}: it is a power of two from 1 on, such as 65536"
        )


def ddp_fits(case: Case) -> Found:
    if "ddp" not in (case.technique, case.techniques.data_parallel):
        return
    if case.layout.dp_shard > 1:
        yield ConfigError(
            f"techniques.data_parallel = ddp keeps whole parameters on every rank, but layout.dp_shard ="
            f" {case.layout.dp_shard} cuts them. Set layout.dp_shard = 1 and layout.dp_replicate = {case.data_ranks},"
            f" or techniques.data_parallel = fully_shard."
        )
    for key, wanted in (
        ("precision (mixed)", case.precision.is_mixed),
        ("cpu_offload", case.techniques.cpu_offload is True),
    ):
        if wanted:
            yield UnsupportedError(
                f"techniques.{key} does not go with techniques.data_parallel = ddp; fully_shard does it for"
                f" layout.dp_shard = 1 too. Set techniques.data_parallel = fully_shard."
            )
    trained = [p.name for p in case.trained]
    if trained and case.facts.images is not None and all(case.facts.is_of_images(name) for name in trained):
        yield UnsupportedError(
            f"techniques.data_parallel = ddp with {case.facts.kind}, of which modules for images alone are trained"
            f" ({trained[0]}, …): torch's DDP fails in a microbatch without images, which gives no parameter a"
            f" gradient. Set techniques.data_parallel = fully_shard, which gives zeros."
        )


def resharding(case: Case) -> Found:
    value, shards = case.techniques.reshard_after_forward, shares_of(case.layout).size(*SHARDS)
    if isinstance(value, bool):
        return
    if case.technique != "fully_shard":
        yield ConfigError(
            f"techniques.reshard_after_forward = {value} is about sharded parameters, and {case.technique} has none."
            f" Leave it true."
        )
        return
    legal = [n for n in range(2, shards) if shards % n == 0]
    if value not in legal:
        yield ConfigError(
            f"techniques.reshard_after_forward = {value}: as a number it must divide layout.dp_shard"
            f"{' × cp' if case.layout.cp > 1 else ''} = {shards} and be neither 1 nor {shards}; legal here:"
            f" {''.join(f'{n}, ' for n in legal)}{'or true / false' if legal else 'true or false'}."
        )


def postponed_all_reduce(case: Case) -> Found:
    if case.techniques.sync_grad_accum == "shard" and not (
        case.technique == "fully_shard" and case.layout.dp_replicate > 1
    ):
        yield ConfigError(
            f"techniques.sync_grad_accum = 'shard' postpones the all-reduce over replicas, so it needs"
            f" layout.dp_replicate > 1 with"
            f" fully_shard; here layout.dp_replicate = {case.layout.dp_replicate}, {case.technique}. Use true or false."
        )


def shardable_parameters(case: Case) -> Found:
    if case.technique != "fully_shard":
        return
    for p in case.facts.parameters:
        if not p.shape:
            yield UnsupportedError(f"parameter '{p.name}' has no dims and cannot be sharded; give it the shape (1,)")


def real_parameters(case: Case) -> Found:
    found = [p for p in case.facts.parameters if p.dtype.startswith("complex")]
    if found:
        yield UnsupportedError(
            f"parameter '{found[0].name}' is {found[0].dtype} ({len(found)} such): weights are cast, reduced and"
            f" stepped as real numbers. Keep nn.Parameter(torch.view_as_real(weight)), and compute with"
            f" torch.view_as_complex(self.weight)"
        )


def one_dtype(case: Case) -> Found:
    """Refuse to keep several dtypes in a module whose gradients are reduced together, or where activations travel."""
    if not case.precision.is_kept:
        return
    facts, most = case.facts, case.precision.master
    wide = "float64" if "float64" in facts.floating else "float32"
    advice = (
        f"Set techniques.precision.master = {wide} (all weights and their optimizer state are converted to it;"
        f" precision.compute may stay {most}), or convert the model."
    )
    if case.technique == "fully_shard":
        gathered = without_skipped(facts, case.layout)
        holding = Holding(shares_of(case.layout).shards, case.precision)
        for unit in ("", *gathered.blocks):
            trained: dict[str, ParameterFact] = {}
            for path, parameters in apart(gathered, unit, holding):
                p = next((p for p in parameters if p.trainable), None)
                if p is not None and trained.setdefault(path, p).dtype != p.dtype:
                    yield UnsupportedError(
                        f"parameters '{trained[path].name}' ({trained[path].dtype}) and '{p.name}' ({p.dtype}) are"
                        f" trained in one module, {path or facts.kind}, and fully_shard gathers a module and reduces"
                        f" its gradients in one dtype. {advice}"
                    )
    layout, compute, odd = case.layout, case.precision.compute, list[ParameterFact]()
    if not case.precision.casts and max(layout.tp, layout.cp, layout.pp, layout.ep) > 1:
        held = (*facts.parameters, *facts.buffers)
        calls = facts.measurements.dtypes_of_calls(tuple({pattern(each.name): each.dtype for each in held}.items()))

        def shows(p: ParameterFact) -> bool:
            """Return whether no module that takes and returns ``compute`` hides a dtype from what travels."""
            path = owner(p.name)
            while path and path not in facts.blocks:
                attends = any(is_within(attention, path) for attention in facts.attentions)
                if calls.get(pattern(path)) == {compute} and not attends:
                    return False
                path = owner(path)
            return True

        odd = [p for p in facts.parameters if p.dtype in facts.floating and p.dtype != compute]
        if all(calls.get(pattern(block)) == {compute} for block in facts.blocks):
            odd = [p for p in odd if max(layout.tp, layout.cp, layout.ep) > 1 and shows(p)]
    if odd:
        yield UnsupportedError(
            f"parameter '{odd[0].name}' is {odd[0].dtype}, and most elements of {facts.kind} are {most} ({len(odd)}"
            f" of {len(facts.parameters)} parameters are in others, outside of modules that take and return {most}):"
            f" activations that travel between ranks have one dtype. {advice}"
        )


def compile_matches(case: Case) -> Found:
    if case.techniques.compile and not case.facts.blocks:
        yield ConfigError(no_blocks("techniques.compile = true", case.facts))


def something_trains(case: Case) -> Found:
    if not case.trained:
        yield ConfigError(
            f"all {len(case.facts.parameters)} parameters of {case.facts.kind} are frozen: nothing would be trained"
            f" (see techniques.freeze)"
        )


RULES: tuple[Callable[[Case], Found], ...] = (
    real_parameters,
    one_dtype,
    tensor_words,
    context_companions,
    tensor_fits,
    tensor_companions,
    lengths_of_whole_rows,
    async_tensor_fits,
    pipeline_requested,
    pipeline_companions,
    stacked_adapters,
    experts_fit,
    experts_companions,
    own_loss_of_experts,
    half_precision,
    float8_requested,
    float8_companions,
    float8_gathering,
    quantize_companions,
    optimizer_fits,
    ddp_fits,
    zero_fits,
    units_fit,
    resharding,
    postponed_all_reduce,
    shardable_parameters,
    rows_stand_alone,
    decisions_are_of_a_row,
    state_stays,
    weights_are_read_only,
    parameters_are_reached,
    gradients_are_dense,
    hooks_are_called,
    checkpointing_keys,
    checkpointing_matches,
    checkpointing_companions,
    compile_matches,
    something_trains,
)


def check(case: Case) -> None:
    """Apply every rule; raise the first error found, with the messages of all."""
    raise_all([error for rule in RULES for error in rule(case)])


def raise_all(errors: list[MeshwrightError]) -> None:
    if errors:
        raise type(errors[0])("\n".join(str(error) for error in errors))


def check_batch(plan: Plan, batch: Batch) -> None:
    """Check one step's data against a plan's mesh; raises ConfigError."""
    ranks, rows = plan.data_ranks, batch.global_rows
    if rows < 1 or batch.seq_len < 1 or batch.microbatch_rows < 0:
        raise ConfigError(
            f"batch: {rows} rows of {batch.seq_len} tokens, {batch.microbatch_rows} rows per forward: sizes start at"
            f" 1 (0 per forward: all)"
        )
    if plan.tensor is not None and plan.tensor.async_tensor_parallel and batch.seq_len % (tp := plan.tensor.ranks):
        raise ConfigError(
            f"techniques.async_tensor_parallel: data.seq_len = {batch.seq_len} must be a multiple of layout.tp = {tp}"
        )
    if rows % ranks:
        near = max(ranks, rows // ranks * ranks)
        raise ConfigError(
            f"batch.global_batch = {rows} rows do not divide over {ranks} data ranks (dp_replicate ="
            f" {plan.size(Axis.DP_REPLICATE)} ×"
            f" dp_shard = {plan.size(Axis.DP_SHARD)}). Use a multiple of {ranks}, such as {near} or {near + ranks}."
        )
    if plan.context is not None:
        refuse_shorter(batch.seq_len, plan.context.ranks)
    if batch.pairs:
        check_pairs(plan, batch.microbatch_rows)
        if (own := rows // ranks) % 2:
            step = 2 * ranks
            near = max(rows // step, 1) * step
            raise ConfigError(
                f"batch.global_batch = {rows} rows are {own} for each of {ranks} data ranks, and each pair of answers"
                f" takes 2. Legal: a multiple of {step}, like {near} or {near + step}"
            )
    if plan.pipeline is not None:
        check_microbatches(plan.pipeline, rows // ranks, batch.microbatch_rows, batch.rows_together)


def check_pairs(plan: Plan, microbatch_rows: int) -> None:
    """Check that a plan computes the loss of pairs of answers, with so many rows of a forward (0: any).

    Raises:
        UnsupportedError: nobody has the sum over an answer before its gradients.
        ConfigError: a forward has half a pair.
    """
    if plan.loss is not None:
        raise UnsupportedError(
            f"techniques.loss_chunks = {plan.loss.chunks} computes a loss with its gradients in chunks of tokens, and"
            f" the loss of pairs needs whole answers before any gradient. Set techniques.loss_chunks = 1."
        )
    if microbatch_rows % 2:
        raise ConfigError(f"batch.microbatch = {microbatch_rows} rows would part the two rows of a pair: make it even")


def check_data(facts: ModelFacts, batch: Batch) -> None:
    """Check that the model can take the data; raises ConfigError."""
    if facts.max_seq_len and batch.seq_len > facts.max_seq_len:
        raise ConfigError(
            f"data.seq_len = {batch.seq_len} is longer than the model's maximum, model.max_seq_len ="
            f" {facts.max_seq_len}. Lower data.seq_len (of meshwright's own decoder model.max_seq_len can be raised)."
        )
    if facts.vocab_size and batch.vocab_size > facts.vocab_size:
        raise ConfigError(
            f"the tokenizer has {batch.vocab_size} token ids, the model only model.vocab_size = {facts.vocab_size}: ids"
            f" from {facts.vocab_size} up would have no embedding. Set model.vocab_size = {batch.vocab_size} (of"
            f" meshwright's own decoder), save transformers' model anew after"
            f" resize_token_embeddings({batch.vocab_size}), or use a smaller tokenizer."
        )


def resolve_precision(techniques: RunTechniques, held: Mapping[str, int], device: str) -> PrecisionPlan:
    """Resolve the dtypes that "auto" stands for; ConfigError for names that are no dtype.

    Args:
        held: the dtypes of the model's parameters, with the elements of each.
    """
    model_dtype = max(held, key=lambda dtype: held[dtype], default="float32")
    request = techniques.precision
    is_kept = request.master == "auto" and len(held) > 1
    master = (
        canonical_dtype(request.master, where="techniques.precision.master")
        if request.master != "auto"
        else model_dtype
    )
    compute = (
        canonical_dtype(request.compute, where="techniques.precision.compute")
        if request.compute != "auto"
        else ("bfloat16" if is_accelerator(device) and master == "float32" and not is_kept else master)
    )
    reduce = (
        canonical_dtype(request.reduce, where="techniques.precision.reduce")
        if request.reduce != "auto"
        else ("float32" if master != "float64" or is_kept else master)
    )
    output = canonical_dtype(request.output, where="techniques.precision.output") if request.output else None
    return PrecisionPlan(
        master,
        compute,
        reduce,
        output,
        loss_scale=request.loss_scale if compute == "float16" else 0.0,
        is_kept=is_kept,
        casts=not is_kept or request.compute != "auto",
        widens=is_kept and request.reduce == "auto",
    )
