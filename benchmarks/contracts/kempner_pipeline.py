"""KempnerForge's ``distributed.pipeline_parallel``: stage modules and torch's schedules around them."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from kempner_setup import forge_config
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.pipelining import PipelineStage
from tried import BFLOAT16, CLOSE, SMALL, TOKENS, Here, Items, gradients, heard, refused, rows_of, same, worst

import meshwright.distributed.pipeline_parallel as pipeline_parallel
from meshwright import parallelize
from meshwright.distributed.parallel import apply_ac, apply_fsdp2
from meshwright.distributed.pipeline_parallel import (
    PipelineStageModule,
    build_pipeline_schedule,
    build_pipeline_stage,
    build_stage_module,
    compute_layer_assignment,
    get_pp_mesh,
    get_pp_rank,
    get_pp_size,
)
from meshwright.distributed.tensor_parallel import apply_tensor_parallel
from meshwright.models.decoder import Decoder

ITEMS = Items("P", "KempnerForge distributed.pipeline_parallel")
FP32 = MixedPrecisionPolicy()
LABELS = TOKENS.roll(-1, 1)


def mean(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def whole_model() -> nn.Module:
    """With the initial weights that stages have."""
    model = Decoder(SMALL)
    model.load_state_dict(PipelineStageModule(SMALL, 0, 1, (0, SMALL.n_layers)).state_dict())
    return model


def by_stages(
    mesh: Any,
    *,
    tensor: bool = False,
    ac: str = "none",
    bf16: bool = False,
    check: bool = False,
    schedule: str = "1f1b",
    on_meta: bool = False,
) -> float:
    """A pipeline as the document composes it: build, tensor parallelism, recomputation, FSDP2 without resharding,
    stage, schedule.
    """
    with torch.device("meta" if on_meta else "cpu"):
        module = build_stage_module(SMALL, get_pp_rank(mesh), get_pp_size(mesh))
    if tensor:
        apply_tensor_parallel(module, mesh)
    apply_ac(module, ac)
    apply_fsdp2(module, mesh, None if bf16 else FP32, reshard_after_forward=False)
    if on_meta:
        module.to_empty(device="cpu")
        module.init_weights_and_freqs()
    rows = rows_of(mesh)
    count = min(4, len(rows))
    dtype = {} if bf16 else {"param_dtype": torch.float32}
    stage = build_pipeline_stage(module, mesh, torch.device("cpu"), len(rows) // count, rows.shape[1], **dtype)
    run = build_pipeline_schedule(stage, count, mean, schedule=schedule)
    labels = rows_of(mesh, LABELS)
    if module.is_first:
        run.step(rows, target=labels)
    elif module.is_last:
        run.step(target=labels)
    else:
        run.step()
    found = gradients(module)
    if check:
        shares = [s[1] for s in _between(module, rows.shape[0])]
        assert all(share < rows.shape[1] for share in shares), shares
    plain = whole_model()
    mean(plain(TOKENS), LABELS).backward()
    wanted = gradients(plain)
    return worst(found, {name: wanted[name] for name in found}, BFLOAT16 if bf16 else CLOSE)


def _between(module: Any, rows: int) -> list[torch.Size]:
    """Shapes of what the norms of a stage's blocks take."""
    seen: list[torch.Size] = []
    for block in module.layers.values():
        block.attention_norm.register_forward_pre_hook(lambda m, args: seen.append(args[0].shape))
    module(TOKENS[:rows] if module.is_first else torch.zeros(rows, TOKENS.shape[1], SMALL.dim))
    return seen


def stage_of(here: Here) -> PipelineStage:
    mesh = here.mesh(pp=2)
    return build_pipeline_stage(build_stage_module(SMALL, get_pp_rank(mesh), 2), mesh, "cpu", 2, 12, torch.float32)


@ITEMS(1, "the module and its names")
def names():
    wanted = [
        "PipelineStageModule",
        "build_pipeline_schedule",
        "build_pipeline_stage",
        "build_stage_module",
        "compute_layer_assignment",
    ]
    same(
        [
            name
            for name in [*wanted, "get_pp_mesh", "get_pp_rank", "get_pp_size"]
            if not hasattr(pipeline_parallel, name)
        ],
        [],
    )


@ITEMS(2, "get_pp_mesh, get_pp_rank, get_pp_size", world=4)
def places(here: Here):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))
    same((get_pp_mesh(mesh).mesh_dim_names, get_pp_size(mesh)), (("pp",), 2))
    same(
        (get_pp_mesh(here.mesh(dp_shard=4)), get_pp_rank(here.mesh(dp_shard=4)), get_pp_size(here.mesh(dp_shard=4))),
        (None, 0, 1),
    )


@ITEMS(3, "more stages than layers: ValueError")
def too_many():
    refused(lambda: compute_layer_assignment(0, 1), kind=ValueError)
    return refused(lambda: compute_layer_assignment(4, 5), "4 layers", "5 stages", kind=ValueError)


@ITEMS(4, "PipelineStageModule(config, stage_id, num_stages, layer_range)")
def stage_signature():
    same([*inspect.signature(PipelineStageModule).parameters][:4], ["config", "stage_id", "num_stages", "layer_range"])
    return str(tuple(PipelineStageModule(SMALL, 1, 3, (2, 3)).layers))


@ITEMS(5, "attributes config, stage_id, num_stages, is_first, is_last")
def stage_attributes():
    made = build_stage_module(SMALL, 1, 2)
    same((made.config, made.stage_id, made.num_stages, made.is_first, made.is_last), (SMALL, 1, 2, False, True))


@ITEMS(6, "layers by their numbers in the whole model")
def stage_layers():
    made = build_stage_module(SMALL, 1, 2)
    assert isinstance(made.layers, nn.ModuleDict)
    same(list(made.layers), ["2", "3"])
    same({name for name, _ in made.named_parameters()} - {name for name, _ in Decoder(SMALL).named_parameters()}, set())


def _ends(name: str, stage: int) -> list[bool]:
    made = [build_stage_module(SMALL, rank, 3) for rank in range(3)]
    found = [getattr(module, name) is not None for module in made]
    same(found, [rank == stage for rank in range(3)])
    return found


@ITEMS(7, "token_embedding on the first stage, None elsewhere")
def stage_embedding():
    _ends("token_embedding", 0)


@ITEMS(8, "output_head on the last stage, None elsewhere")
def stage_head():
    _ends("output_head", 2)


@ITEMS(9, "norm on the last stage alone")
def stage_norm():
    _ends("norm", 2)


@ITEMS(10, "built on a device: weights are there, those of the whole model")
def stage_weights():
    wanted = dict(parallelize(SMALL, None, seed=0).named_parameters())
    for rank in range(4):
        for name, p in build_stage_module(SMALL, rank, 4).named_parameters():
            assert torch.equal(p, wanted[name]), name
    return "bit by bit"


@ITEMS(11, "built on meta: no weights")
def stage_on_meta():
    with torch.device("meta"):
        assert all(p.is_meta for p in build_stage_module(SMALL, 0, 2).parameters())


@ITEMS(12, "to_empty, then init_weights_and_freqs()", world=4)
def stage_later(here: Here):
    return max(
        by_stages(here.mesh(pp=2, dp_shard=2), on_meta=True),
        by_stages(here.mesh(pp=2, tp=2), tensor=True, on_meta=True),
    )


@ITEMS(13, "rotary tables of max_seq_len; a longer sequence fails")
def stage_length():
    tokens = torch.zeros(1, SMALL.max_seq_len + 1, dtype=torch.int64)
    return refused(lambda: build_stage_module(SMALL, 0, 2)(tokens), "max_seq_len", kind=ValueError)


@ITEMS(14, "ids to hidden states to logits")
def stage_forward():
    hidden = build_stage_module(SMALL, 0, 2)(TOKENS)
    logits = build_stage_module(SMALL, 1, 2)(hidden)
    same((tuple(hidden.shape), tuple(logits.shape)), ((4, 12, 32), (4, 12, 64)))
    error = float((logits - whole_model()(TOKENS)).detach().abs().max())
    assert error < CLOSE
    return f"logits of the whole model within {error:.1g}"


@ITEMS(15, "a log line of a stage's layers and ends")
def stage_log():
    with heard() as lines:
        build_stage_module(SMALL, 1, 2)
    assert any("stage 1 of 2" in line and "2 to 3" in line and "head" in line for line in lines), lines
    return lines[-1]


@ITEMS(16, "build_stage_module(config, pp_rank, pp_size)")
def stage_of_rank():
    same(
        [tuple(build_stage_module(replace(SMALL, n_layers=5), r, 2).layers) for r in (0, 1)],
        [("0", "1", "2"), ("3", "4")],
    )
    return refused(lambda: build_stage_module(SMALL, 2, 2), "stage 2 of 2")


@ITEMS(17, "the stage talks over the pp axis", world=4)
def stage_group(here: Here):
    mesh = here.mesh(pp=2, dp_shard=2)
    made = build_pipeline_stage(build_stage_module(SMALL, get_pp_rank(mesh), 2), mesh, "cpu", 2, 12, torch.float32)
    same(made.group, mesh.get_group("pp"))


@ITEMS(
    18,
    "a mesh without a pp axis: the whole world",
    world=2,
    reason="refused: the world need not be one pipeline; name an axis pp",
)
def stage_without_axis(here: Here):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    return refused(
        lambda: build_pipeline_stage(build_stage_module(SMALL, 0, 2), mesh, "cpu", 2, 12, torch.float32),
        "axis named pp",
    )


@ITEMS(19, "static shapes: ids to the first stage, hidden states in param_dtype to the others", world=2)
def stage_shapes(here: Here):
    stage = stage_of(here)
    (taken,), (given,) = stage._user_meta.inputs, stage._user_meta.outputs
    same(tuple(taken.shape), (2, 12) if stage.is_first else (2, 12, 32))
    same((tuple(given.shape), given.dtype), ((2, 12, 64) if stage.is_last else (2, 12, 32), torch.float32))


@ITEMS(20, "ValueErrors: one stage where several are needed, an unknown schedule", world=2)
def schedule_errors(here: Here):
    stage = stage_of(here)
    refused(
        lambda: build_pipeline_schedule([stage, stage], 4, mean, schedule="gpipe"),
        "one stage on each rank",
        kind=ValueError,
    )
    return refused(lambda: build_pipeline_schedule(stage, 4, mean, schedule="gpip"), "gpipe", kind=ValueError)


@ITEMS(21, "build, tensor parallelism, recomputation, FSDP2 without resharding", world=4)
def composed(here: Here):
    by_tensor = [by_stages(here.mesh(pp=2, tp=2), tensor=True, ac=mode) for mode in ("none", "full", "selective")]
    return max(*by_tensor, by_stages(here.mesh(pp=2, dp_shard=2), ac="full"))


@ITEMS(22, "reshard_after_forward=False in a pipeline", world=4)
def gathered_once(here: Here):
    mesh = here.mesh(pp=2, dp_shard=2)
    apply_fsdp2(module := build_stage_module(SMALL, get_pp_rank(mesh), 2), mesh, FP32, reshard_after_forward=False)
    assert isinstance(module, FSDPModule)
    return by_stages(mesh)


@ITEMS(23, "tied embeddings on two stages", reason="refused: two tables would drift apart; parallelize keeps them one")
def tied():
    return refused(
        lambda: build_stage_module(replace(SMALL, tied_embeddings=True), 0, 2), "tied_embeddings", "parallelize"
    )


@ITEMS(24, "config.norm_type", reason="RMSNorm alone; another norm_type is refused by name")
def norm_type():
    same(build_stage_module(forge_config(), 0, 2).config.norm_eps, 1e-5)
    return refused(lambda: build_stage_module(forge_config(norm_type="layernorm"), 0, 2), "norm_type", "rmsnorm")
