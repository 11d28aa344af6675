"""KempnerForge's pipelines as its package documents them: schedules, steps, dtypes, one norm."""

from __future__ import annotations

import inspect

import torch
from kempner_pipeline import FP32, LABELS, by_stages, mean, stage_of, whole_model
from torch import nn
from tried import SMALL, TOKENS, Here, Items, gradients, near, refused, same, worst

from meshwright.distributed import (
    PipelineStageModule,
    apply_fsdp2,
    build_pipeline_schedule,
    build_pipeline_stage,
    build_stage_module,
    clip_grad_norm_,
    compute_layer_assignment,
    get_pp_rank,
)
from meshwright.models.decoder import Decoder

ITEMS = Items("K", "KempnerForge distributed")


@ITEMS("K23", "build_pipeline_schedule(stage, n_microbatches, loss_fn, schedule='1f1b')")
def schedule_signature():
    parameters = list(inspect.signature(build_pipeline_schedule).parameters.values())
    same([p.name for p in parameters[:4]], ["stage", "n_microbatches", "loss_fn", "schedule"])
    same(parameters[3].default, "1f1b")


@ITEMS("K24", "schedules 1f1b, gpipe, interleaved_1f1b", world=2)
def schedules(here: Here):
    mesh = here.mesh(pp=2)
    errors = [by_stages(mesh, schedule=name) for name in ("1f1b", "gpipe", "1F1B")]
    layers, rank = compute_layer_assignment(4, 4), get_pp_rank(mesh)
    modules = [PipelineStageModule(SMALL, i, 4, layers[i]) for i in (rank, rank + 2)]
    stages = [build_pipeline_stage(m, mesh, "cpu", 1, TOKENS.shape[1], torch.float32) for m in modules]
    run = build_pipeline_schedule(stages, 4, mean, schedule="interleaved_1f1b")
    run.step(*([TOKENS] if rank == 0 else []), **({"target": LABELS} if rank == 1 else {}))
    mean((plain := whole_model())(TOKENS), LABELS).backward()
    found = {name: g for m in modules for name, g in gradients(m).items()}
    return max(*errors, worst(found, {name: gradients(plain)[name] for name in found}))


@ITEMS("K25", "interleaved_1f1b wants a list of stages: ValueError", world=2)
def schedule_of_one(here: Here):
    return refused(
        lambda: build_pipeline_schedule(stage_of(here), 4, mean, schedule="interleaved_1f1b"), "list", kind=ValueError
    )


@ITEMS("K26", "1f1b: at least as many microbatches as stages", world=2)
def microbatches(here: Here):
    return refused(
        lambda: build_pipeline_schedule(stage_of(here), 1, mean), "takes 2 microbatches or more", kind=ValueError
    )


@ITEMS("K27", "first stage step(x, target=y), last step(target=y), others step()", world=4)
def steps(here: Here):
    return by_stages(here.mesh(pp=4))


@ITEMS("K28", "build_pipeline_stage(..., param_dtype=bfloat16): static shapes", world=4)
def stage_dtype(here: Here):
    same(inspect.signature(build_pipeline_stage).parameters["param_dtype"].default, torch.bfloat16)
    error = by_stages(mesh := here.mesh(pp=2, dp_shard=2), bf16=True)
    refused(
        lambda: build_pipeline_stage(build_stage_module(SMALL, get_pp_rank(mesh), 2), mesh, "cpu", 2, 12), "param_dtype"
    )
    return error


@ITEMS("K29", "build_stage_module(config, pp_rank, pp_size): this stage's parameters alone")
def stage_parameters():
    counts = [len(list(build_stage_module(SMALL, rank, 2).parameters())) for rank in (0, 1)]
    same(sum(counts), len(list(Decoder(SMALL).parameters())))
    return f"{counts[0]} and {counts[1]}"


@ITEMS("K35", "one norm over all stages, the same on every rank", world=4)
def one_norm(here: Here):
    by_stages_module = build_stage_module(SMALL, get_pp_rank(mesh := here.mesh(pp=2, dp_shard=2)), 2)
    apply_fsdp2(by_stages_module, mesh, FP32)
    plain = whole_model()
    for module in (by_stages_module, plain):
        for p in module.parameters():
            p.grad = torch.ones_like(p)
    build_pipeline_stage(by_stages_module, mesh, "cpu", 2, 12, torch.float32)
    return near(float(clip_grad_norm_(by_stages_module, 1.0)), float(nn.utils.clip_grad_norm_(plain.parameters(), 1.0)))
