"""Every rule refuses what it is there for, and its words name the key, the numbers and the way out."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support import pictures
from support.premises import MODELS
from torch import nn

from meshwright import ConfigError, Layout, Plan, Precision, Techniques, UnsupportedError, plan
from meshwright.introspection.cluster import Cluster
from meshwright.introspection.facts import model_facts
from meshwright.models.decoder_config import SIZES, MoEConfig
from meshwright.planning import rules
from meshwright.planning.values import Batch

DEBUG = SIZES["debug"]
BUDGET = {"activation_checkpointing": "memory_budget", "compile": True}
BY_OPERATOR = {"activation_checkpointing": "selective_op"}
NF4 = {"quantize_frozen": "nf4", "freeze": ["layers"]}


def modules(*patterns: str) -> dict:
    return {"activation_checkpointing": "modules", "checkpoint_modules": list(patterns)}


class Attention(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.q = nn.Linear(4, 4, dtype=dtype)


class Block(nn.Module):
    def __init__(self, attention: str = "attention", norm_dtype=torch.float32):
        super().__init__()
        self.add_module(attention, Attention() if attention == "attention" else nn.Linear(4, 4))
        self.norm = nn.LayerNorm(4, dtype=norm_dtype)


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module, **others: nn.Module | nn.Parameter):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        for name, other in others.items():
            setattr(self, name, other)


LANGUAGE = "model.language_model"


def of_images() -> nn.Module:
    return pictures.plain("llava")


def plain() -> nn.Module:
    return nn.Linear(4, 4)


def scalar() -> nn.Module:
    return Model(Block(), scale=nn.Parameter(torch.ones(())))


def turning() -> nn.Module:
    return Model(Block(), turns=nn.Parameter(torch.ones(4, dtype=torch.complex64)))


def mixed_block() -> nn.Module:
    mixed = Block()
    mixed.norm.bias.data = mixed.norm.bias.data.bfloat16()
    return Model(Block(), mixed)


def mixed_rest() -> nn.Module:
    mixed = nn.Linear(2, 2)
    mixed.bias.data = mixed.bias.data.double()
    return Model(Block(), a=nn.Linear(2, 2), b=mixed)


def drops() -> nn.Module:
    block = Block()
    block.drop = nn.Dropout(0.1)
    return Model(block, Block())


def batch_norm() -> nn.Module:
    return Model(Block(), norm=nn.BatchNorm1d(4))


def no_attention() -> nn.Module:
    return Model(Block("mixer"))


def frozen() -> nn.Module:
    return plain().requires_grad_(False)


def with_own_loss() -> nn.Module:
    made = Model(Block(), Block())
    made.config = SimpleNamespace(output_router_logits=True)  # type: ignore[assignment]
    return made


CAPPED = replace(DEBUG, moe=MoEConfig(capacity_factor=1.0))
STACKED = replace(DEBUG, moe=MoEConfig())
FSDP2, FSDP4, DDP2, ONE = Layout(dp_shard=2), Layout(dp_shard=4), Layout(dp_replicate=2, dp_shard=1), Layout(dp_shard=1)


def tensor(ranks: int, words: str) -> tuple:
    return "tensor_fits", DEBUG, Layout(dp_shard=1, tp=ranks), {}, ConfigError, f"layout.tp = {ranks}: {words}"


def half(key: str, name: str) -> tuple:
    words = (
        f"techniques.precision.{key} = float16 would lose small gradients and overflow in sums. Set"
        f" techniques.precision.{key} = float32"
    )
    return "half_precision", DEBUG, FSDP2, {"precision": {key: name}}, UnsupportedError, words


def scaling(scale: float, words: str) -> tuple:
    return "half_precision", DEBUG, FSDP2, {"precision": {"compute": "fp16", "loss_scale": scale}}, ConfigError, words


def reshard(shards: int, request: int, legal: str) -> tuple:
    words = (
        f"techniques.reshard_after_forward = {request}: as a number it must divide layout.dp_shard = {shards} and be"
        f" neither 1 nor"
        f" {shards}; legal here: {legal}."
    )
    return "resharding", DEBUG, Layout(dp_shard=shards), {"reshard_after_forward": request}, ConfigError, words


def zero(stage: int, key: str, value: bool, words: str) -> tuple:
    asked = {"zero_stage": stage, key: value}
    return "zero_fits", DEBUG, FSDP2, asked, ConfigError, f"techniques.zero_stage = {stage} {words}"


def kept(word: str, kind: type, words: str) -> tuple:
    return "checkpointing_keys", DEBUG, ONE, {**BY_OPERATOR, "checkpoint_keep": [word]}, kind, words


def refuse(rule: str, model, layout: Layout, techniques, kind: type, *words: str) -> tuple:
    return rule, model, layout, techniques, kind, " ".join(words)


PP2, TP2, CP2 = (Layout(dp_shard=1, **{axis: 2}) for axis in ("pp", "tp", "cp"))
HSDP4 = Layout(dp_replicate=2, dp_shard=2)
PP2_DP2 = Layout(pp=2, dp_shard=2)
FOUR = replace(DEBUG, n_layers=4)
PIPELINES = [
    (
        {"pipeline_cuts": (2,)},
        "techniques.pipeline_cuts is about pipeline stages, but layout.pp = 1. Leave it out, or set",
    ),
    ({"pipeline_schedule": "gpipe"}, "techniques.pipeline_schedule is about pipeline stages, but layout.pp = 1."),
    ({"pipeline_schedule": "2f2b"}, "legal are gpipe, 1f1b"),
    ({"layers_per_stage": 2}, "techniques.layers_per_stage is about pipeline stages, but layout.pp = 1."),
]

GATHERED = "keeps gathered parameters through all microbatches of a step, and techniques.reshard_aft"
WITH_EVERY = "shards gradients with every microbatch, and techniques.sync_grad_accum = false says otherwise"
ZERO = [
    (1, "reshard_after_forward", True, GATHERED),
    (2, "reshard_after_forward", True, GATHERED),
    (3, "reshard_after_forward", False,
        "frees gathered parameters after each use, and techniques.reshard_after_forward = false"),
    (1, "sync_grad_accum", True,
        "keeps whole gradients until the last microbatch, and techniques.sync_grad_accum = true"),
    (2, "sync_grad_accum", False, WITH_EVERY),
    (3, "sync_grad_accum", False, WITH_EVERY),
]  # fmt: skip
KEPT = [
    (
        "matmul",
        ConfigError,
        "'matmul' is neither a word nor an operator. Did you mean 'matmuls'? Legal: attention, matmuls,",
    ),
    ("aten.mm.defoult", ConfigError, "'aten.mm.defoult' is neither a word nor an operator."),
    ("aten.add_.Tensor", UnsupportedError, "'aten.add_.Tensor' writes into its inputs or gives a view of them"),
    ("c10d.allreduce_.default", UnsupportedError, "sends into a buffer that it is given. Say collectives,"),
    ("support.odd:nobody", ConfigError, "cannot import 'support.odd:nobody'"),
    ("math:pi", ConfigError, "'math:pi' is a float, and not a function of (context, operator, *args, **kwargs)"),
]

CASES = [
    refuse("context_companions", CAPPED, CP2, {}, UnsupportedError,
        "model.moe.capacity_factor = 1.0 with layout.cp = 2: who is over an expert's capacity depends on the whole"
        " sequence, of which a rank has a part."),
    refuse("context_companions", of_images, CP2, {}, UnsupportedError,
        "layout.cp = 2: LlavaForConditionalGeneration puts the features of a row's images in the places of its image"
        " tokens, one after the other, before its blocks, and a rank has a part of these places. Set layout.cp = 1"),
    refuse("experts_companions", STACKED, Layout(dp_shard=1, cp=2, ep=2), {"data_parallel": "ddp"}, UnsupportedError,
        "techniques.data_parallel = ddp does not go with layout.ep = 2: its buckets would sum the gradients of"
        " different experts."),
    refuse("experts_fit", DEBUG, Layout(dp_shard=2, ep=2), {}, ConfigError,
        "layout.ep = 2 shares experts out, and Decoder has no module"),
    refuse("experts_companions", CAPPED, TP2, {}, UnsupportedError,
        "model.moe.capacity_factor = 1.0 with layout.tp = 2: who is over an expert's capacity depends on the whole"
        " sequence"),
    refuse("own_loss_of_experts", with_own_loss, PP2, {}, UnsupportedError,
        "the config of Model has output_router_logits = true"),
    *(refuse("pipeline_requested", DEBUG, ONE, requested, ConfigError, words) for requested, words in PIPELINES),
    refuse("pipeline_requested", DEBUG, Layout(pp=8, dp_shard=1), {}, ConfigError,
        "layout.pp = 8 with 1f1b makes 8 stages, but Decoder has 2 blocks, and each stage needs one. Legal here:"
        " layout.pp = 1 to 2."),
    refuse("pipeline_requested", plain, PP2, {}, ConfigError,
        "layout.pp = 2 acts on repeated blocks, and none was found in Linear"),
    refuse(
        "pipeline_companions",
        DEBUG,
        Layout(pp=2, dp_replicate=2, dp_shard=1),
        {"data_parallel": "ddp"},
        UnsupportedError,
        "techniques.data_parallel = ddp does not go with layout.pp = 2: it reduces its buckets in the first backward"
        " that it sees.",
        "Set techniques.data_parallel = fully_shard",
    ),
    refuse(
        "pipeline_companions",
        FOUR,
        PP2,
        {"sync_grad_accum": True, "pipeline_schedule": "zbv_zero_bubble"},
        UnsupportedError,
        "techniques.sync_grad_accum = true does not go with techniques.pipeline_schedule = zbv_zero_bubble, which"
        " computes input",
    ),
    refuse("pipeline_companions", FOUR, PP2_DP2, {"zero_stage": 2, "pipeline_schedule": "dualpipe_v"}, UnsupportedError,
        "techniques.zero_stage = 2 does not go with techniques.pipeline_schedule = dualpipe_v, which computes input"
        " and weight"),
    refuse("zero_fits", DEBUG, FSDP2, {"zero_stage": 0}, ConfigError,
        "techniques.zero_stage = 0 keeps everything whole on every rank, but layout.dp_shard = 2 cuts it.",
        "Set layout.dp_shard = 1 and layout.dp_replicate = 2, or another stage."),
    refuse("zero_fits", DEBUG, FSDP2, {"zero_stage": 1, "data_parallel": "ddp"}, ConfigError,
        "techniques.zero_stage = 1 shards optimizer state, and techniques.data_parallel = ddp keeps all of it whole"),
    refuse("zero_fits", DEBUG, DDP2, {"zero_stage": 2}, ConfigError,
        "techniques.zero_stage = 2 shards optimizer state and gradients over layout.dp_shard, which is 1 here beside",
        "layout.dp_replicate = 2. Set layout.dp_shard = 2 and layout.dp_replicate = 1"),
    *(zero(*request) for request in ZERO),
    refuse(
        "pipeline_companions",
        FOUR,
        PP2,
        {"compile": True, "pipeline_schedule": "zbv_zero_bubble"},
        UnsupportedError,
        "techniques.compile does not go with techniques.pipeline_schedule = zbv_zero_bubble, which computes input and"
        " weight",
        "gradients apart",
    ),
    tensor(3, "layers.*.attention has 4 heads (and 2 of keys and values), which 3 ranks cannot share. Legal: 1, 2, 4."),
    tensor(8, "layers.*.attention has 4 heads (and 2 of keys and values), which 8 ranks cannot share. Legal: 1, 2, 4."),
    ("tensor_fits", plain, TP2, {}, ConfigError,
        "layout.tp = 2 acts on repeated blocks, and none was found in Linear"),
    refuse("tensor_words", DEBUG, ONE, {"tensor_plan": ({"pattern": "head", "style": "rowise"},)}, ConfigError,
        "techniques.tensor_plan[0].style = 'rowise' is no style. Did you mean 'rowwise'? Legal: colwise, rowwise, "),
    refuse(
        "tensor_companions",
        DEBUG,
        Layout(dp_shard=1, dp_replicate=2, tp=2),
        {"data_parallel": "ddp"},
        UnsupportedError,
        "techniques.data_parallel = ddp does not go with layout.tp = 2: its buckets know no tensor-parallel"
        " parameters.",
        "Set techniques.data_parallel = fully_shard, which replicates over layout.dp_replicate too.",
    ),
    *(half(*request) for request in (("master", "float16"), ("reduce", "half"))),
    refuse("half_precision", DEBUG, FSDP2, {"precision": {"output": "fp16"}}, UnsupportedError,
        "techniques.precision.output = float16 with techniques.precision.compute = float32 would lose small gradients"),
    *(
        scaling(scale, f"techniques.precision.loss_scale = {scale:g}: it is a power of two from 1 on")
        for scale in (1000.0, 0.5)
    ),
    refuse("half_precision", DEBUG, FSDP2, {"precision": {"loss_scale": 8.0}}, ConfigError,
        "techniques.precision.loss_scale is about float16, and techniques.precision.compute = float32 needs no"
        " scaling"),
    *(
        reshard(*request)
        for request in (
            (12, 5, "2, 3, 4, 6, or true / false"),
            *((4, other, "2, or true / false") for other in (4, 1, 0, -2)),
            (2, 2, "true or false"),
        )
    ),
    refuse("resharding", DEBUG, DDP2, {"reshard_after_forward": 2}, ConfigError,
        "techniques.reshard_after_forward = 2 is about sharded parameters, and ddp has none"),
    refuse("units_fit", DEBUG, DDP2, {"blocks_per_unit": 2}, ConfigError,
        "techniques.blocks_per_unit = 2 is about sharded parameters, and ddp has none"),
    refuse("units_fit", DEBUG, FSDP2, {"blocks_per_unit": 99}, ConfigError,
        "techniques.blocks_per_unit = 99: Decoder has 2 blocks. Legal are 0 (by their bytes) to 2."),
    refuse("ddp_fits", DEBUG, Layout(dp_replicate=3, dp_shard=2), {"data_parallel": "ddp"}, ConfigError,
        "techniques.data_parallel = ddp keeps whole parameters on every rank, but layout.dp_shard = 2 cuts them.",
        "Set layout.dp_shard = 1 and layout.dp_replicate = 6, or techniques.data_parallel = fully_shard."),
    refuse("ddp_fits", of_images, DDP2, {"data_parallel": "ddp", "freeze": (LANGUAGE, "lm_head")}, UnsupportedError,
        "techniques.data_parallel = ddp with LlavaForConditionalGeneration, of which modules for images alone are"),
    refuse("ddp_fits", DEBUG, DDP2, {"data_parallel": "ddp", "precision": {"compute": "bf16"}}, UnsupportedError,
        "techniques.precision (mixed) does not go with techniques.data_parallel = ddp; fully_shard does it for",
        "layout.dp_shard = 1 too. Set techniques.data_parallel = fully_shard."),
    refuse("ddp_fits", DEBUG, ONE, {"data_parallel": "ddp", "cpu_offload": True}, UnsupportedError,
        "techniques.cpu_offload does not go with techniques.data_parallel = ddp"),
    refuse("async_tensor_fits", DEBUG, TP2, {"async_tensor_parallel": True}, UnsupportedError,
        "techniques.async_tensor_parallel = true needs CUDA with symmetric memory (GPUs joined by NVLink), and this"
        " plan is for cpu.", "Set techniques.async_tensor_parallel = false: the numbers are the same."),
    refuse("async_tensor_fits", DEBUG, FSDP2, {"async_tensor_parallel": True}, ConfigError,
        "techniques.async_tensor_parallel = true acts on the tensor axis, and layout.tp = 1. Set it false, or"
        " layout.tp = 2 or more."),
    refuse("async_tensor_fits", DEBUG, TP2,
        {"async_tensor_parallel": True, "sequence_parallel": False}, ConfigError,
        "techniques.async_tensor_parallel = true needs cut sequences. Set techniques.sequence_parallel = true"),
    refuse("postponed_all_reduce", DEBUG, FSDP2, {"sync_grad_accum": "shard"}, ConfigError,
        "techniques.sync_grad_accum = 'shard' postpones the all-reduce over replicas, so it needs layout.dp_replicate"
        " > 1 with", "fully_shard; here layout.dp_replicate = 1, fully_shard. Use true or false."),
    refuse("postponed_all_reduce", DEBUG, DDP2, {"sync_grad_accum": "shard"}, ConfigError,
        "here layout.dp_replicate = 2, ddp. Use true or false."),
    refuse("real_parameters", turning, DDP2, {}, UnsupportedError,
        "parameter 'turns' is complex64 (1 such): weights are cast, reduced and stepped as real numbers."),
    refuse("shardable_parameters", scalar, FSDP2, {}, UnsupportedError,
        "parameter 'scale' has no dims and cannot be sharded; give it the shape (1,)"),
    refuse(
        "one_dtype",
        mixed_block,
        FSDP2,
        {},
        UnsupportedError,
        "parameters 'blocks.1.norm.bias' (bfloat16) and 'blocks.1.norm.weight' (float32) are trained in one module,"
        " blocks.1.norm, and fully_shard gathers a module and reduces its gradients in one dtype. Set"
        " techniques.precision.master = float32 (all weights and",
    ),
    refuse("one_dtype", mixed_rest, FSDP2, {}, UnsupportedError,
        "parameters 'b.bias' (float64) and 'b.weight' (float32) are trained in one module, b, and fully_shard gathers"
        " a module and reduces its gradients in one dtype. Set techniques.precision.master = float64"),
    refuse("rows_stand_alone", MODELS["BatchNorm"], Layout(dp_replicate=2, dp_shard=3), {}, UnsupportedError,
        "rows of a batch depend on each other in BatchNorm: batch_norm (BatchNorm1d). The 6 data ranks have other rows"
        " each, so the result", "would be another one than that of one process."),
    refuse("rows_stand_alone", batch_norm, FSDP2, {}, UnsupportedError,
        "rows of a batch depend on each other in Model: norm (BatchNorm1d)."),
    refuse("rows_stand_alone", MODELS["ByFrequency"], TP2, {}, UnsupportedError,
        "the gradient of embedding.weight is no sum over tokens (scale_grad_by_freq divides it by how often an id"
        " stands in the batch)"),
    refuse(
        "rows_stand_alone",
        MODELS["Centred"],
        CP2,
        {},
        UnsupportedError,
        "Centred itself. The 2 ranks of layout.cp have other tokens of each row, so the result would be another one",
        "than that of one process. Compute over the features or the tokens of one row (such as LayerNorm, RMSNorm,",
        "GroupNorm), or set layout.cp = 1.",
    ),
    refuse("decisions_are_of_a_row", MODELS["DecidesByLargest"], Layout(dp_shard=2, pp=2), {}, UnsupportedError,
        "The 2 data ranks have other rows each, and may decide otherwise than one process. Decide row by row or token"
        " by token (torch.where), or set layout.dp_shard = 1 and layout.pp = 1."),
    refuse("state_stays", MODELS["CountsIds"], FSDP2, {}, UnsupportedError,
        "a forward of CountsIds keeps state that depends on its rows: seen. The 2 data ranks have other rows each"),
    refuse("state_stays", MODELS["WarmBlocks"], ONE, {"activation_checkpointing": "full"}, UnsupportedError,
        "techniques.activation_checkpointing = full calls forwards of WarmBlocks a second time, and they keep state:"
        " layers.0.calls,", "layers.1.calls, which would be written twice."),
    refuse("state_stays", MODELS["OwnGenerator"], ONE, {"activation_checkpointing": "every_n"}, UnsupportedError,
        "techniques.activation_checkpointing = every_n calls forwards of OwnGenerator a second time, and they keep",
        "state: the torch.Generator that layers.0 draws from, the torch.Generator that layers.1 draws from, which",
        "would be written twice. Set it to none"),
    refuse("weights_are_read_only", MODELS["Clipped"], DDP2, {}, UnsupportedError,
        "a forward of Clipped writes its parameters: embedding.weight."),
    refuse("parameters_are_reached", MODELS["ForOneToken"], TP2, {}, UnsupportedError,
        "only some rows use adapter.weight, adapter.bias of ForOneToken, by a condition on the data, which ranks of"
        " the tensor axis would", "see on parts of the sequence. Set techniques.sequence_parallel = false."),
    refuse("gradients_are_dense", MODELS["SparseGradient"], FSDP2, {}, UnsupportedError,
        "the gradient of embedding.weight is a sparse tensor (Embedding(sparse=True)), which no layout can reduce or"
        " clip."),
    refuse("hooks_are_called", MODELS["ClippedByHook"], DDP2, {}, UnsupportedError,
        "head.weight has a hook on its gradient (register_hook), and it does not add up over ranks."),
    refuse("hooks_are_called", MODELS["StepsByHook"], FSDP2, {}, UnsupportedError,
        "head.weight has a hook that is called once its gradient is there (register_post_accumulate_grad_hook)"),
    refuse("checkpointing_matches", plain, ONE, {"activation_checkpointing": "full"}, ConfigError,
        "techniques.activation_checkpointing = full acts on repeated blocks, and none was found in Linear: put them"
        " into an", "nn.ModuleList or nn.ModuleDict, each with parameters of its own"),
    refuse("checkpointing_matches", no_attention, ONE, {"activation_checkpointing": "selective"}, ConfigError,
        "techniques.activation_checkpointing = selective recomputes attention, but no module of Model inside a"
        " repeated block", "is called attention. Use full, or name the module *attention*."),
    refuse("checkpointing_matches", no_attention, ONE, {"activation_checkpointing": "every_n", "checkpoint_every": 5},
        ConfigError, "techniques.checkpoint_every = 5 is more than the 1 blocks of Model: none would be recomputed"),
    refuse("checkpointing_matches", DEBUG, ONE, {"activation_checkpointing": "modules"}, ConfigError,
        "recomputes the modules of techniques.checkpoint_modules, and none is named. Name some, such as layers.*."),
    refuse("checkpointing_matches", DEBUG, ONE, modules("layers.*.feed_foward"), ConfigError,
        "techniques.checkpoint_modules: 'layers.*.feed_foward' matches no module in the repeated blocks of Decoder."
        " Did you mean"),
    refuse("checkpointing_matches", DEBUG, ONE, modules("layers.*", "layers.1.attention"), ConfigError,
        "'layers.1.attention' matches layers.1.attention, which lies in layers.1 ('layers.*'): it would be recomputed"
        " twice"),
    refuse(
        "checkpointing_matches",
        DEBUG,
        TP2,
        modules("layers.*.feed_forward.w_up"),
        UnsupportedError,
        "layers.0.feed_forward.w_up is a part of what computes together with layout.tp = 2, and cannot be recomputed"
        " alone.",
    ),
    refuse("checkpointing_keys", FOUR, ONE, {"activation_checkpointing": "full", "checkpoint_every": 3}, ConfigError,
        "techniques.checkpoint_every acts only with techniques.activation_checkpointing = every_n, and here that is"
        " full."),
    refuse("checkpointing_keys", DEBUG, ONE, {"checkpoint_keep": ["topk"]}, ConfigError,
        "techniques.checkpoint_keep acts only with techniques.activation_checkpointing = selective_op, and here that"
        " is none."),
    *(kept(*request) for request in KEPT),
    refuse(
        "checkpointing_keys",
        DEBUG,
        ONE,
        {"activation_checkpointing": "selective_op", "checkpoint_keep": []},
        ConfigError,
        "techniques.checkpoint_keep is empty: nothing would be kept, which is techniques.activation_checkpointing ="
        " full",
    ),
    refuse("checkpointing_companions", DEBUG, ONE, {"activation_checkpointing": "memory_budget"}, ConfigError,
        "compiled blocks are needed. Set techniques.compile = true, or use selective_op."),
    refuse("checkpointing_companions", drops, ONE, BUDGET, UnsupportedError,
        "techniques.activation_checkpointing = memory_budget: 'blocks.0.drop' drops at random"),
    refuse("checkpointing_companions", DEBUG, TP2, BUDGET, UnsupportedError,
        "techniques.activation_checkpointing = memory_budget does not go with layout.tp = 2"),
    refuse("checkpointing_companions", DEBUG, ONE, {"activation_checkpointing": "offload", "compile": True},
        UnsupportedError, "techniques.activation_checkpointing = offload does not go with techniques.compile = true"),
    refuse("checkpointing_companions", DEBUG, TP2, {**BY_OPERATOR, "async_tensor_parallel": True},
        UnsupportedError, "Leave collectives out of techniques.checkpoint_keep, or set async_tensor_parallel = false."),
    refuse("compile_matches", plain, ONE, {"compile": True}, ConfigError,
        "techniques.compile = true acts on repeated blocks, and none was found in Linear"),
    refuse("something_trains", frozen, ONE, {}, ConfigError,
        "all 2 parameters of Linear are frozen: nothing would be trained (see techniques.freeze)"),
    refuse("something_trains", plain, ONE, {"freeze": ["weight", "^bias$"]}, ConfigError,
        "all 2 parameters of Linear are frozen"),
    refuse("float8_requested", DEBUG, ONE, {"float8_filter": ["w_down"]}, ConfigError,
        "techniques.float8_filter leaves layers out of float8, but techniques.float8 = none: leave it out, or set"
        " that"),
    refuse("float8_requested", DEBUG, ONE, {"float8": "rowwise", "precision": {"master": "float64"}}, ConfigError,
        "Set techniques.precision.compute = bfloat16 (or float32, float16), or techniques.float8 = none."),
    refuse("float8_requested", plain(), ONE, {"float8": "rowwise"}, ConfigError,
        "techniques.float8 = rowwise acts on repeated blocks, and none was found in Linear"),
    refuse(
        "float8_companions",
        DEBUG,
        TP2,
        {"float8": "rowwise", "async_tensor_parallel": True},
        UnsupportedError,
        "techniques.float8 = rowwise does not go with techniques.async_tensor_parallel = true, whose products are in"
        " float32.",
    ),
    refuse("stacked_adapters", STACKED, ONE, {"adapters": {"targets": ["experts.w_gate"]}, "compile": True},
        UnsupportedError, "techniques.compile = true: adapters beside stacked experts"),
    refuse("lengths_of_whole_rows", DEBUG, TP2,
        {"adapters": {"kind": "dora", "targets": ["head", "wq"]}}, UnsupportedError,
        "layout.tp = 2 cuts head, and adapters.kind = dora trains the lengths of its whole rows."),
    refuse("quantize_companions", DEBUG, ONE, NF4 | {"float8": "rowwise"}, UnsupportedError,
        "techniques.quantize_frozen = nf4 does not go with techniques.float8 = rowwise, which rounds the weights of"
        " the same layers. Set one of them to none."),
    refuse("quantize_companions", replace(DEBUG, dim=128, hidden_dim=256), TP2,
        NF4 | {"async_tensor_parallel": True}, UnsupportedError,
        "techniques.quantize_frozen = nf4 does not go with techniques.async_tensor_parallel = true"),
    refuse("quantize_companions", plain(), ONE, {"quantize_frozen": "nf4"}, ConfigError,
        "techniques.quantize_frozen = nf4 acts on repeated blocks, and none was found in Linear"),
    refuse("float8_requested", DEBUG, ONE, {"float8_all_gather": True}, ConfigError,
        "techniques.float8_all_gather = true gathers the weights of layers in float8, but techniques.float8 = none."
        " Set"),
    refuse(
        "float8_gathering",
        DEBUG,
        Layout(dp_shard=2),
        {"float8": "rowwise", "float8_all_gather": True},
        UnsupportedError,
        "and techniques.float8 = rowwise has one for each row, another in forward than in backward. Set"
        " techniques.float8 = tensorwise",
    ),
    refuse(
        "float8_gathering",
        DEBUG,
        Layout(dp_replicate=2, dp_shard=1),
        {"float8": "tensorwise", "float8_all_gather": True},
        ConfigError,
        "is about weights that FSDP gathers, and here none are: layout.dp_shard = 1, ddp. Set"
        " techniques.float8_all_gather = false",
    ),
    refuse("float8_gathering", DEBUG, Layout(dp_shard=4),
        {"float8": "tensorwise", "float8_all_gather": True, "reshard_after_forward": 2}, UnsupportedError,
        "techniques.float8_all_gather = true does not go with techniques.reshard_after_forward = 2"),
    refuse("optimizer_fits", DEBUG, ONE, {"optimizer_state": "8bit", "precision": {"master": "fp64"}}, UnsupportedError,
        "techniques.optimizer_state = 8bit is computed in float32, and trained parameters rest in float64. Set",
        "techniques.precision.master = float32 (or bfloat16), or optimizer_state = full."),
    refuse("optimizer_fits", DEBUG, FSDP2, {"stochastic_rounding": True}, ConfigError,
        "techniques.stochastic_rounding = true is about weights that rest in bfloat16, and trained ones rest in",
        "float32. Set", "techniques.precision.master = bfloat16, or leave it out."),
]  # fmt: skip


def attempt(model, layout: Layout, techniques) -> Plan:
    return plan(model, layout, cluster=Cluster(layout.world), techniques=techniques)


@pytest.mark.first
@pytest.mark.parametrize(("rule", "model", "layout", "techniques", "kind", "words"), CASES)
def test_a_rule_refuses_in_the_words_of_the_config(rule, model, layout, techniques, kind, words, monkeypatch):
    with pytest.raises(kind, match=re.escape(words)):
        attempt(model, layout, techniques)
    monkeypatch.setattr(rules, "RULES", tuple(r for r in rules.RULES if r.__name__ != rule))
    try:
        attempt(model, layout, techniques)
    except (ConfigError, UnsupportedError, LookupError) as error:
        assert words not in str(error), f"{rule} is not the rule that says this"


def test_every_rule_is_tried_above():
    assert {case[0] for case in CASES} == {rule.__name__ for rule in rules.RULES}


LEGAL = [
    (DEBUG, Layout(dp_shard=12), {"reshard_after_forward": 6}),
    (DEBUG, FSDP2, {"reshard_after_forward": False}),
    (DEBUG, HSDP4, {"sync_grad_accum": "shard"}),
    (DEBUG, DDP2, {"precision": {"compute": "bf16"}}),
    (DEBUG, DDP2, {"zero_stage": 0, "data_parallel": "fully_shard"}),
    (DEBUG, ONE, {"zero_stage": 2}),
    (DEBUG, HSDP4, {"zero_stage": 2, "sync_grad_accum": True}),
    (DEBUG, Layout(dp_shard=12), {"zero_stage": 3, "reshard_after_forward": 6}),
    (DEBUG, ONE, {"cpu_offload": True}),
    (DEBUG, DDP2, {"data_parallel": "fully_shard", "cpu_offload": True}),
    (DEBUG, DDP2, {"cpu_offload": "optimizer", "optimizer_state": "4bit"}),
    (DEBUG, FSDP2, {"cpu_offload": True, "optimizer_state": "8bit"}),
    (DEBUG, ONE, {"stochastic_rounding": True, "precision": {"master": "bf16"}}),
    (scalar, DDP2, {}),
    (batch_norm, ONE, {}),
    (no_attention, FSDP2, {"activation_checkpointing": "full", "compile": True}),
    (DEBUG, TP2, modules("layers.0", "layers.1.feed_forward")),
    (DEBUG, ONE, {**BY_OPERATOR, "checkpoint_keep": ["topk", "aten.mm", "torch.ops.aten.bmm.default", "copy:copy"]}),
    (DEBUG, FSDP2, BUDGET),
    (MODELS["FrozenBatchNorm"], DDP2, {}),
    (MODELS["Spare"], DDP2, {}),
    (MODELS["ExpertList"], FSDP2, {}),
    (plain, FSDP2, {"freeze": ["bias"]}),
]


@pytest.mark.first
@pytest.mark.parametrize(("model", "layout", "techniques"), LEGAL)
def test_what_is_legal_is_planned(model, layout, techniques):
    assert attempt(model, layout, techniques).world == layout.world


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(ConfigError) as caught:
        attempt(DEBUG, Layout(dp_shard=2, ep=2), {"precision": {"reduce": "float16"}, "sync_grad_accum": "shard"})
    keys = ("layout.ep = 2", "reduce = float16", "sync_grad_accum = 'shard'")
    assert [key for key in keys if key in str(caught.value)] == list(keys)


@pytest.mark.parametrize(
    ("techniques", "words"),
    [
        (
            {"precision": {"compute": "bf17"}},
            "techniques.precision.compute = 'bf17' is not a dtype that meshwright knows. Did you mean",
        ),
        ({"precision": {"master": "int8"}}, "techniques.precision.master = 'int8' is not a dtype"),
        ({"precision": {"reduce": "x"}}, "techniques.precision.reduce = 'x' is not a dtype"),
        ({"precision": {"output": "x"}}, "techniques.precision.output = 'x' is not a dtype"),
        ({"freeze": ["layers.7."]}, "techniques.freeze: 'layers.7.' matches no parameter of the model"),
        ({"freeze": ["("]}, "techniques.freeze[0] = '(' is no regular expression"),
        ({"compiles": True}, "techniques: unknown key 'compiles'. Did you mean 'compile'?"),
        ({"compile": 1}, "techniques: compile = 1 is a whole number; expected true or false"),
        ({"data_parallel": "fsdp"}, 'data_parallel = "fsdp" is text; expected one of "auto", "ddp", "fully_shard"'),
    ],
)
def test_requests_that_cannot_be_read_are_refused(techniques, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        attempt(DEBUG, FSDP2, techniques)


def test_auto_precision_follows_device_and_model():
    resolved = {
        (dtype, device): rules.resolve_precision(Techniques(), {dtype: 1}, device)
        for dtype in ("float32", "bfloat16", "float64")
        for device in ("cpu", "cuda")
    }
    assert {key: (p.master, p.compute, p.reduce) for key, p in resolved.items()} == {
        ("float32", "cpu"): ("float32", "float32", "float32"),
        ("float32", "cuda"): ("float32", "bfloat16", "float32"),
        ("bfloat16", "cpu"): ("bfloat16", "bfloat16", "float32"),
        ("bfloat16", "cuda"): ("bfloat16", "bfloat16", "float32"),
        ("float64", "cpu"): ("float64", "float64", "float64"),
        ("float64", "cuda"): ("float64", "float64", "float64"),
    }
    given = rules.resolve_precision(
        Techniques(precision=Precision("fp32", "double", "bf16", "half")), {"float64": 1}, "cuda"
    )
    assert (given.master, given.compute, given.reduce, given.output) == ("float32", "float64", "bfloat16", "float16")


def test_several_dtypes_compute_each_in_its_own_unless_one_is_asked_for():
    def resolved(device="cuda", **asked):
        held = {"float64": 1, "float32": 3, "bfloat16": 2}
        return rules.resolve_precision(Techniques(precision=Precision(**asked)), held, device)

    kept = resolved()
    assert kept.is_kept and not kept.casts and not kept.is_mixed
    assert [kept.computed_in(dtype) for dtype in ("float64", "bfloat16")] == ["float64", "bfloat16"]
    assert [kept.reduced_in(dtype) for dtype in ("float64", "bfloat16")] == ["float64", "float32"]
    cast = resolved(compute="bfloat16", reduce="float32")
    assert cast.is_kept and cast.is_mixed and cast.computed_in("float64") == "bfloat16"
    assert cast.reduced_in("float64") == "float32", "asked for"
    one = resolved(master="float64")
    assert not one.is_kept and (one.master, one.compute, one.reduce) == ("float64", "float64", "float64")
    assert resolved(master="float32").compute == "bfloat16", "as of a model in float32"


# --- batches

HSDP = Layout(dp_replicate=2, dp_shard=3)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (Batch(8, 16), "batch.global_batch = 8 rows do not divide over 6 data ranks (dp_replicate = 2 × dp_shard = 3)"),
        (Batch(8, 16), "Use a multiple of 6, such as 6 or 12."),
        (Batch(1, 16), "Use a multiple of 6, such as 6 or 12."),
        (Batch(0, 16), "batch: 0 rows of 16 tokens, 0 rows per forward: sizes start at 1"),
        (Batch(6, 0), "batch: 6 rows of 0 tokens"),
        (Batch(6, 16, -1), "-1 rows per forward"),
        (Batch(6, 257),
            "data.seq_len = 257 is longer than the model's maximum, model.max_seq_len = 256. Lower data.seq_len"),
        (Batch(6, 16, vocab_size=300),
            "the tokenizer has 300 token ids, the model only model.vocab_size = 256: ids from 256 up"),
        (Batch(6, 16, vocab_size=300), "Set model.vocab_size = 300"),
    ],
)  # fmt: skip
def test_a_batch_that_does_not_fit_is_refused(batch, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        plan(DEBUG, HSDP, batch=batch, cluster=Cluster(6))


def test_a_batch_that_fits_is_accepted_and_leaves_the_plan_alone():
    batch = Batch(12, 256, 1, vocab_size=256)
    assert plan(DEBUG, HSDP, batch=batch, cluster=Cluster(6)) == plan(DEBUG, HSDP, cluster=Cluster(6))
    assert batch.microbatches(6) == 2 and replace(batch, microbatch_rows=0).microbatches(6) == 1


def test_facts_of_the_models_above_are_what_the_rules_are_tried_on():
    with torch.device("meta"):
        facts = model_facts(Model(Block(), Block()))
    assert facts.blocks == ("blocks.0", "blocks.1") and facts.attentions == ("blocks.0.attention", "blocks.1.attention")
