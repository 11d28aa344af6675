"""Optimus-DL's ``model_transforms.distributed``: transforms with a config, a collective and a device."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from tried import TOKENS, Forge, Here, Items, against_one, gradients, loss_of, refused, rows_of, same, worst

from meshwright.distributed import transforms
from meshwright.distributed.transforms import (
    BaseDistributedTransform,
    DDPTransform,
    DDPTransformConfig,
    DDPWrappedModel,
    FullyShardTransform,
    FullyShardTransformConfig,
    MixedPrecisionConfig,
    ModelTransform,
    ModelTransformConfig,
    apply_model_transforms,
    build_model_transform,
    register_model_transform,
)

ITEMS = Items("O", "Optimus-DL model_transforms.distributed")
CPU = torch.device("cpu")


class Collective:
    """What Optimus-DL gives to a transform: ranks and their mesh."""

    def __init__(self, mesh: Any):
        self.mesh = self.dp_mesh = mesh
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.local_rank = 0


class Model(Forge):
    """With the methods of Optimus-DL's BaseModel."""

    def make_parameter_groups(self) -> list[dict[str, Any]]:
        return [{"params": list(self.parameters()), "weight_decay": 0.25}]


class Wrapping(Model):
    """Says itself what is sharded together."""

    called = 0

    def fully_shard(self, **options: Any) -> None:
        self.called += 1
        fully_shard(self.layers["0"], **options)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Model()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen += 1
        return self.inner(tokens)


def of(mesh: Any, kind: Any, config: Any, model: nn.Module | None = None) -> Any:
    """The model behind a transform that is built as Optimus-DL builds it."""
    return kind(config, collective=Collective(mesh), device=CPU).apply(model or Model())


def ddp(here: Here, model: nn.Module | None = None, **config: bool) -> Any:
    return of(here.mesh(dp_replicate=4), DDPTransform, DDPTransformConfig(**config), model)


@ITEMS(1, "BaseDistributedTransform(cfg, collective, device) keeps them", world=4)
def base(here: Here):
    class Mine(BaseDistributedTransform):
        def apply(self, model: nn.Module, **kwargs: Any) -> nn.Module:
            return model

    collective = Collective(here.mesh(dp_shard=4))
    made = Mine(DDPTransformConfig(), collective, CPU)
    same((made.cfg, made.collective, made.device), (DDPTransformConfig(), collective, CPU))
    assert made.apply(model := Model()) is model


@ITEMS(2, "DDPTransform and FullyShardTransform can be imported")
def classes():
    assert issubclass(DDPTransform, BaseDistributedTransform) and issubclass(
        FullyShardTransform, BaseDistributedTransform
    )
    same({"DDPTransform", "FullyShardTransform"} - set(transforms.__all__), set())


@ITEMS(3, "collective= and device= act", world=4)
def context(here: Here):
    collective = Collective(here.mesh(dp_replicate=2, dp_shard=2))
    made = build_model_transform("fully_shard", None, collective=collective, device=CPU).apply(Model())
    same(made.output_head.weight.placements, (Replicate(), Shard(0)))
    return refused(lambda: build_model_transform("fully_shard", None, mesh=1), "device_mesh")


@ITEMS(4, "apply(model, **kwargs)", world=2)
def applied(here: Here):
    same([p.kind.name for p in inspect.signature(FullyShardTransform.apply).parameters.values()][-1], "VAR_KEYWORD")
    made = build_model_transform("fully_shard", None, device_mesh=here.mesh(dp_shard=2))
    return refused(lambda: made.apply(Model(), step=3), "step")


@ITEMS(5, "register_model_transform(name, config_class)")
def registered():
    @dataclass
    class Config:
        size: int = 1

    @register_model_transform("contract_mark", Config)
    class Mark(ModelTransform):
        def apply(self, model: nn.Module, **kwargs: Any) -> nn.Module:
            model.mark = self.config.size
            return model

    made = apply_model_transforms(Model(), [{"_name": "contract_mark", "size": 3}])
    same((made.mark, Mark(Config(5)).config.size), (3, 5))


@ITEMS(6, "configs derive from ModelTransformConfig, and can be changed")
def configs():
    @dataclass
    class Mine(ModelTransformConfig):
        size: int = 1

    made = Mine()
    made.size = 2
    assert issubclass(DDPTransformConfig, ModelTransformConfig) and issubclass(
        FullyShardTransformConfig, ModelTransformConfig
    )
    config = FullyShardTransformConfig()
    config.mixed_precision = MixedPrecisionConfig()
    config.mixed_precision.param_dtype = "int8"
    return refused(
        lambda: FullyShardTransform(config, None, CPU).apply(Model()), "mixed_precision.param_dtype", "bfloat16"
    )


@ITEMS(7, "names and keys that do not exist")
def unknown():
    refused(lambda: build_model_transform("fully_shards", {}), "Did you mean 'fully_shard'?")
    return refused(lambda: build_model_transform("ddp", {"find_unused": True}), "find_unused_parameters")


@ITEMS(8, "ddp: find_unused_parameters, gradient_as_bucket_view, static_graph", world=4)
def ddp_options(here: Here):
    published = {"find_unused_parameters": False, "gradient_as_bucket_view": True, "static_graph": False}
    same({key: vars(DDPTransformConfig())[key] for key in published}, published)
    given = ({}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": False}, {"static_graph": True})
    return max(against_one(ddp(here, **options), Model(), here.mesh(dp_replicate=4)) for options in given)


@ITEMS(9, "ddp: one process gets its model back")
def ddp_alone():
    made = DDPTransform(DDPTransformConfig(), None, CPU).apply(model := Model())
    assert made is model


@ITEMS(10, "ddp: buffers are those of rank 0", world=4)
def ddp_buffers(here: Here):
    model = Counting()
    model.seen += dist.get_rank()
    model = ddp(here, model)
    for _ in range(2):
        loss_of(model, TOKENS[:1]).backward()
    same(float(model.module.seen), 2.0)


@ITEMS(11, "ddp: weights are those of rank 0", world=4)
def ddp_weights(here: Here):
    torch.manual_seed(dist.get_rank())
    model = Model()
    nn.init.normal_(model.output_head.weight)
    return against_one(made := ddp(here, model), made.module, here.mesh(dp_replicate=4))


@ITEMS(12, "DDPWrappedModel.make_parameter_groups is the model's own", world=4)
def ddp_groups(here: Here):
    same(ddp(here).make_parameter_groups()[0]["weight_decay"], 0.25)


@ITEMS(13, "DDPWrappedModel.accumulation_context(is_last_microbatch)", world=4)
def ddp_accumulates(here: Here):
    return accumulated(ddp(here), here.mesh(dp_replicate=4), TOKENS.repeat(2, 1) + torch.arange(8)[:, None] % 3)


def accumulated(model: Any, mesh: Any, tokens: Tensor = TOKENS) -> float:
    """Error behind two microbatches."""
    rows = rows_of(mesh, tokens)
    for number, piece in enumerate(rows.chunk(2)):
        with model.accumulation_context(is_last_microbatch=number == 1):
            (loss_of(model, piece) / 2).backward()
    plain = Model()
    loss_of(plain, tokens).backward()
    return worst(gradients(model), gradients(plain))


@ITEMS(14, "DDPWrappedModel is a name, its fully_shard is the model's", world=4)
def ddp_wrapped(here: Here):
    made = ddp(here, Wrapping())
    assert isinstance(made, DDPWrappedModel) and isinstance(made, DistributedDataParallel)
    seen: list[str] = []
    made.module.fully_shard = lambda **options: seen.extend(options)
    made.fully_shard(mesh=None)
    same(seen, ["mesh"])
