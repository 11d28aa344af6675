"""Define what to apply besides the mesh: the typed requests about precision, memory and compilation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, cast

from meshwright.core.config import from_dict, unset
from meshwright.core.config.ranges import (
    ABOVE_0,
    BETWEEN_0_AND_1,
    FROM_0,
    FROM_1,
    PATTERN,
    DtypeName,
    check_ranges,
)
from meshwright.introspection.adapter_request import Adapters


@dataclass(frozen=True)
class Precision:
    """dtypes by name: float32/fp32, bfloat16/bf16, float16/fp16/half (to compute in), float64/double."""

    master: Annotated[str, DtypeName(("auto",))] = "auto"
    """dtype of parameters at rest, of gradients after reduction and of optimizer state; "auto": the model's own."""
    compute: Annotated[str, DtypeName(("auto",))] = "auto"
    """dtype of parameters and activations in forward and backward; "auto": bfloat16 on CUDA, the master dtype on CPU.
    """
    reduce: Annotated[str, DtypeName(("auto",))] = "auto"
    """dtype in which gradients are summed over ranks; "auto": float32, or the master dtype where it is wider."""
    output: Annotated[str | None, DtypeName()] = None
    """dtype of the model's output; none: as computed."""
    loss_scale: Annotated[float, ABOVE_0] = 65536.0
    """float16: factor of the loss at first, a power of two; halved when gradients overflow, doubled after 2000 finite
    steps.
    """


@dataclass(frozen=True)
class TensorStyleRequest:
    """How some modules are cut for tensor parallelism: one row of a plan."""

    pattern: str
    """Path of a module; * stands for an index: model.layers.*.mlp.up_proj."""
    style: str
    """In the words of transformers: colwise, rowwise, embedding_rowwise, colwise_gather_output, replicate, ..."""


@dataclass(frozen=True)
class RunTechniques:
    """How the model is laid onto the mesh; every switch is done or refused by name."""

    data_parallel: Literal["auto", "ddp", "fully_shard"] = "auto"
    """auto: fully_shard where dp_shard > 1 or a switch needs it (mixed precision, offload), else ddp."""
    zero_stage: Literal["auto", 0, 1, 2, 3] = "auto"
    """The model states that are sharded over dp_shard × cp: 0 nothing; 1 optimizer state; 2 gradients too; 3 parameters
    too. auto: as the next two keys say."""
    reshard_after_forward: bool | int | Literal["auto"] = "auto"
    """fully_shard: free a block's gathered parameters after its forward; false keeps them; a number reshards to that
    many ranks; auto: as zero_stage has it, else true, but false in a pipeline, which would gather for every
    microbatch."""
    blocks_per_unit: Annotated[int, FROM_0] = 0
    """fully_shard: most blocks of which parameters are gathered, and gradients reduced, in one message; 0: as many as
    their bytes suggest.
    """
    sync_grad_accum: bool | Literal["shard", "auto"] = "auto"
    """false: gradients are reduced once per step; true: with every microbatch; "shard": reduce-scatter each, all-reduce
    over replicas once; auto: as zero_stage has it, else false.
    """
    cpu_offload: bool | Literal["optimizer"] = False
    """true (fully_shard): parameters, gradients and optimizer state live in host memory; optimizer: only its state
    rests there, and comes to the device by portions for the step.
    """
    optimizer_state: Literal["full", "8bit", "4bit"] = "full"
    """AdamW's moments: in the master dtype (full), or by torchao as codes of 8 or 4 bits with a scale for each block
    of elements.
    """
    stochastic_rounding: bool = False
    """precision.master = bfloat16: round new weights up or down at random, so that updates too small for bfloat16 are
    not lost.
    """
    activation_checkpointing: Literal[
        "none", "full", "selective", "every_n", "modules", "selective_op", "offload", "memory_budget"
    ] = cast(Any, unset("none"))
    """Recompute in backward: every block (full), attention (selective), each n-th block (every_n), modules that are
    named (modules), every block but for results of some operators (selective_op), what the compiler chooses
    (memory_budget). offload: recompute nothing, but keep what blocks save in host memory.
    """
    checkpoint_every: Annotated[int, FROM_1] = 2
    """every_n: recompute each block of so many, the last of them; 1: every block."""
    checkpoint_modules: tuple[str, ...] = ()
    """modules: paths of the modules to recompute; * stands for one part of a path: layers.*.feed_forward."""
    checkpoint_keep: tuple[str, ...] = ("attention", "matmuls", "collectives", "topk")
    """selective_op: results that are saved, not recomputed: attention, matmuls, collectives, topk; operators
    (aten.mm.default); or module:function, a policy (context, operator, *args, **kwargs) that returns a
    torch.utils.checkpoint.CheckpointPolicy.
    """
    checkpoint_keep_every: Annotated[int, FROM_1] = 2
    """selective_op: save each one of so many matrix products of a block, the last of them; 1: every one."""
    activation_memory_budget: Annotated[float, BETWEEN_0_AND_1] = 0.5
    """memory_budget: the fraction of a compiled block's activations that it may save."""
    sequence_parallel: bool = True
    """tensor parallelism: between blocks each rank holds its part of the sequence; false: all of it."""
    regather: bool = True
    """sequence parallelism: gathered activations are not kept for backward but gathered again; false: kept."""
    async_tensor_parallel: bool = False
    """sequence parallelism on CUDA: matrix products overlap with the messages before and after them, through symmetric
    memory.
    """
    context_parallel_method: Literal["auto", "all_gather", "ring", "ulysses", "ulysses_ring", "halo"] = "auto"
    """context parallelism: how attention reaches other ranks' tokens: keys and values of whole rows on each rank
    (all_gather), or passed round (ring); tokens traded for heads (ulysses), among neighbours whose parts are passed
    round (ulysses_ring); only what queries reach (halo). auto: chosen for each attention.
    """
    tensor_plan: tuple[TensorStyleRequest, ...] = ()
    """tensor parallelism: the modules to cut, and how; others stay whole. Empty: every cut that measurement finds."""
    loss_chunks: Annotated[int, FROM_1] = unset(1)
    """Compute head and loss in so many chunks of a microbatch's tokens, so that whole logits never exist; 1: at
    once."""
    pipeline_schedule: str = unset("1f1b")
    """pipeline parallelism: gpipe, 1f1b, interleaved_1f1b, looped_bfs, interleaved_zero_bubble, zbv_zero_bubble,
    dualpipe_v, or the path of a .csv file with a row of actions for each rank.
    """
    layers_per_stage: Annotated[int, FROM_0] = 0
    """pipeline parallelism: blocks of a stage, so that a rank has several stages; 0: as the schedule and the depth
    suggest."""
    pipeline_cuts: tuple[int, ...] = ()
    """pipeline parallelism: the first block of each stage but the first; empty: balanced by cost, head and embedding
    counted."""
    compile: bool = False
    """Compile each repeated block."""
    compile_backend: str = "inductor"
    """The torch.compile back end."""
    freeze: tuple[Annotated[str, PATTERN], ...] = ()
    """Regular expressions on parameter names; matching parameters are not trained."""
    quantize_frozen: Literal["none", "nf4"] = "none"
    """nf4: frozen linear layers of the blocks hold their weights in 4 bits, with a scale for each 64 of a row (QLoRA).
    """
    precision: Precision = field(default_factory=Precision)
    float8: Literal["none", "tensorwise", "rowwise", "rowwise_with_gw_hp"] = "none"
    """The linear layers of the blocks multiply in float8, by this recipe of torchao; on a CPU emulated."""
    float8_filter: tuple[Annotated[str, PATTERN], ...] = ()
    """Regular expressions on paths of linear layers; matching layers are not converted to float8."""
    float8_all_gather: bool = False
    """FSDP gathers the converted layers' weights in float8, with one scale for each; tensorwise."""


@dataclass(frozen=True)
class Techniques(RunTechniques):
    """All techniques of a call; those of a run have adapters and optimizer in tables of their own."""

    adapters: Adapters | None = None
    """Adapters that are put beside the model's layers before anything else, and trained instead of the model."""
    optimizer: str = "adamw"
    """The optimizer that plans and memory estimates count: adamw, adam, lion, schedule_free_adamw, muon (hidden
    matrices by Muon, the rest by AdamW), sgd, or adafactor."""


def as_techniques(techniques: RunTechniques | dict | None) -> Techniques:
    """Return typed techniques; ConfigError for unknown keys, wrong types and values out of range, in objects too."""
    if isinstance(techniques, RunTechniques) and not isinstance(techniques, Techniques):
        techniques = Techniques(**vars(techniques))
    typed = from_dict(Techniques, techniques or {}, where="techniques")
    if typed != Techniques():
        check_ranges(typed, "techniques")
    return typed
