"""Optimus-DL's ``FullyShardTransform``, and chains of transforms."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from optimus import CPU, Collective, Model, Wrapping, accumulated, of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from tried import BFLOAT16, TOKENS, Forge, Here, Items, against_one, environment, logits_of, refused, same

from meshwright.distributed.transforms import (
    FullyShardTransform,
    FullyShardTransformConfig,
    MixedPrecisionConfig,
    OffloadConfig,
    apply_model_transforms,
    build_model_transform,
)

ITEMS = Items("O", "Optimus-DL model_transforms.distributed")


def sharded(here: Here, sizes: dict[str, int] | None = None, model: nn.Module | None = None, **config: Any) -> Any:
    return of(here.mesh(**sizes or {"dp_shard": 4}), FullyShardTransform, FullyShardTransformConfig(**config), model)


@ITEMS(15, "fully_shard: defaults False, None, None, True, False")
def shard_defaults():
    keys = ["reshard_after_forward", "mixed_precision", "offload", "use_hybrid_sharding", "sync_grad_accum"]
    published = dict(zip(keys, (False, None, None, True, False), strict=True))
    same({key: value for key, value in vars(FullyShardTransformConfig()).items() if key in keys}, published)


@ITEMS(16, "fully_shard: one process gets its model back")
def shard_alone():
    made = FullyShardTransform(FullyShardTransformConfig(), None, CPU).apply(model := Model())
    assert made is model and not isinstance(made, FSDPModule)
    config = FullyShardTransformConfig(mixed_precision=MixedPrecisionConfig("bfloat16"))
    same(logits_of(FullyShardTransform(config, None, CPU).apply(Model()), TOKENS).dtype, torch.bfloat16)
    return against_one(made, Model(), None)


@ITEMS(17, "fully_shard wants a collective with a mesh, else ValueError", world=4)
def shard_mesh(here: Here):
    made = build_model_transform("fully_shard", None, device_mesh=here.mesh(dp_shard=4)).apply(Model())
    against_one(made, Model(), here.mesh(dp_shard=4))
    return refused(
        lambda: FullyShardTransform(FullyShardTransformConfig(), object(), CPU), "without a mesh", kind=ValueError
    )


@ITEMS(18, "fully_shard: reshard_after_forward bool or number", world=4)
def shard_reshard(here: Here):
    return max(
        against_one(sharded(here, reshard_after_forward=w), Model(), here.mesh(dp_shard=4)) for w in (True, False, 2)
    )


@ITEMS(19, "mixed_precision acts", world=4)
def shard_mixed(here: Here):
    made = sharded(
        here, mixed_precision=MixedPrecisionConfig(param_dtype="bfloat16", reduce_dtype="fp32", output_dtype="float32")
    )
    same(next(made.parameters()).dtype, torch.float32)
    same(logits_of(made, TOKENS[:1]).dtype, torch.float32)
    return against_one(made, Model(), here.mesh(dp_shard=4), bound=BFLOAT16)


@ITEMS(20, "MixedPrecisionConfig(): all dtypes may be left out", world=4)
def shard_mixed_open(here: Here):
    same(
        vars(MixedPrecisionConfig()),
        {"param_dtype": None, "reduce_dtype": None, "output_dtype": None, "cast_forward_inputs": True},
    )
    made = sharded(here, mixed_precision=MixedPrecisionConfig(param_dtype="bfloat16"))
    same(logits_of(made, TOKENS[:1]).dtype, torch.bfloat16)
    by_dict = build_model_transform(
        "fully_shard", {"mixed_precision": {"param_dtype": "bfloat16"}}, device_mesh=here.mesh(dp_shard=4)
    )
    same(by_dict.config.mixed_precision, MixedPrecisionConfig("bfloat16"))
    return against_one(sharded(here, mixed_precision=MixedPrecisionConfig()), Model(), here.mesh(dp_shard=4))


@ITEMS(21, "output_dtype and cast_forward_inputs", world=4)
def shard_output(here: Here):
    made = sharded(here, mixed_precision=MixedPrecisionConfig("bf16", "fp32", "float64", cast_forward_inputs=False))
    same(logits_of(made, TOKENS[:1]).dtype, torch.float64)
    same(made._get_fsdp_state()._mp_policy.cast_forward_inputs, False)


@ITEMS(22, "nine names of dtypes, ValueError with them all for others")
def dtypes():
    names = ["float32", "float16", "bfloat16", "float64", "double", "half", "fp32", "fp16", "bf16"]
    for name in names:
        assert MixedPrecisionConfig(param_dtype=name).policy.param_dtype in (
            torch.float32,
            torch.float16,
            torch.bfloat16,
            torch.float64,
        )
    return refused(lambda: MixedPrecisionConfig(param_dtype="int8"), *names, kind=ValueError)


@ITEMS(23, "OffloadConfig(cpu_offload=False, pin_memory=True)")
def offload_defaults():
    same(vars(OffloadConfig()), {"cpu_offload": False, "pin_memory": True})


@ITEMS(24, "offload acts", world=4)
def offload(here: Here):
    return against_one(
        sharded(here, offload=OffloadConfig(cpu_offload=True, pin_memory=False)), Model(), here.mesh(dp_shard=4)
    )


@ITEMS(25, "the model's own fully_shard(**kw) wraps its blocks", world=4)
def shard_own(here: Here):
    made = sharded(here, model=Wrapping())
    same((made.called, [n for n, m in made.named_modules() if isinstance(m, FSDPModule)]), (1, ["", "layers.0"]))
    return against_one(made, Wrapping(), here.mesh(dp_shard=4))


@ITEMS(26, "use_hybrid_sharding=True: sharded in a node, replicated across nodes", world=4)
def shard_hybrid(here: Here):
    assert here is not None
    with environment(LOCAL_WORLD_SIZE="2"):
        made = build_model_transform("fully_shard", {"use_hybrid_sharding": True}).apply(Model())
    same(made.output_head.weight.placements, (Replicate(), Shard(0)))
    return against_one(made, Model(), here.mesh(dp_replicate=2, dp_shard=2))


@ITEMS(27, "use_hybrid_sharding=False: sharded over all data ranks", world=4)
def shard_flat(here: Here):
    with environment(LOCAL_WORLD_SIZE="2"):
        made = build_model_transform("fully_shard", {"use_hybrid_sharding": False}).apply(Model())
    same(made.output_head.weight.placements, (Shard(0),))
    error = against_one(made, Model(), here.mesh(dp_shard=4))
    flat = sharded(here, sizes := {"dp_replicate": 2, "dp_shard": 2}, use_hybrid_sharding=False)
    same(tuple(flat.output_head.weight.to_local().shape), (16, 32))
    named = build_model_transform("fully_shard", {"use_hybrid_sharding": False}, device_mesh=here.mesh(**sizes))
    refused(lambda: named.apply(Model()), "dp_shard = 4 and dp_replicate = 1")
    return max(error, against_one(flat, Model(), here.mesh(**sizes)))


@ITEMS(28, "the defaults shard", world=4)
def shard_default(here: Here):
    made = sharded(here)
    assert all(isinstance(p, DTensor) for p in made.parameters())
    same(made.output_head.weight.to_local().shape[0], 16)


@ITEMS(29, "sync_grad_accum", world=4)
def shard_sync(here: Here):
    tokens = TOKENS.repeat(2, 1) + torch.arange(8)[:, None] % 3
    sizes = {"dp_replicate": 2, "dp_shard": 2}
    return max(
        accumulated(sharded(here, sizes, sync_grad_accum=w), here.mesh(**sizes), tokens) for w in (False, True, "shard")
    )


@ITEMS(30, "accumulation_context on what apply returns; restored behind an exception", world=4)
def shard_restored(here: Here):
    model = sharded(here)
    with suppress(KeyError), model.accumulation_context(False):
        raise KeyError
    return against_one(model, Model(), here.mesh(dp_shard=4))


@ITEMS(31, "make_parameter_groups() of sharded models", world=4)
def shard_groups(here: Here):
    same(sharded(here).make_parameter_groups()[0]["weight_decay"], 0.25)
    same(len(sharded(here, model=Forge()).make_parameter_groups()), 2)


@ITEMS(32, "the model is moved to the device first", world=4)
def shard_moves(here: Here):
    made = FullyShardTransform(FullyShardTransformConfig(), Collective(here.mesh(dp_shard=4)), CPU).apply(Model())
    same({p.to_local().device.type for p in made.parameters()}, {"cpu"})


@ITEMS(
    33,
    "transforms come in the order of the config",
    world=4,
    reason="one order always, so that a listed one cannot be wrong",
)
def chain(here: Here):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    rows = [{"_name": "fully_shard"}, {"_name": "activation_checkpoint"}, {"_name": "tensor_parallel"}]
    made = apply_model_transforms(Model(), rows, device_mesh=mesh)
    by_name = apply_model_transforms(Model(), {"fully_shard": {}, "tensor_parallel": {}}, device_mesh=mesh)
    refused(lambda: apply_model_transforms(Model(), [{"fully_shard": {}}], device_mesh=mesh), "_name")
    one = [against_one(model, Model(), mesh) for model in (made, by_name)]
    listed = apply_model_transforms(Model(), [{"_name": "ddp"}], device_mesh=here.mesh(dp_replicate=4))
    return max(*one, against_one(listed, Model(), here.mesh(dp_replicate=4)))
