"""Optimus-DL: its transforms ``ddp`` and ``fully_shard``, with the blocks as units as in its own models."""

from __future__ import annotations

from types import MethodType

import torch
from torch.distributed.fsdp import fully_shard

from .bare import loop
from .problem import Question

PACKAGES = ["optimus-dl"]


def build(question: Question):
    from optimus_dl.modules.distributed.mesh import MeshCollective
    from optimus_dl.modules.model_transforms import distributed as transforms

    if question.layout not in ("zero3", "zero2", "ddp"):
        raise NotImplementedError(f"no {question.layout} of a model that is not its own")
    alone, world = question.layout == "ddp", question.world
    collective = MeshCollective(
        question.rank, world, world, question.rank, question.device, sharding_world_size=1 if alone else world
    )
    model = question.model()
    if alone:
        transform = transforms.DDPTransform(transforms.DDPTransformConfig(), collective, torch.device(question.device))
        return loop(question, transform.apply(model))
    config = transforms.FullyShardTransformConfig(reshard_after_forward=question.layout == "zero3")
    model.fully_shard = MethodType(
        lambda self, **options: [fully_shard(block, **options) for block in self.model.layers], model
    )
    transform = transforms.FullyShardTransform(config, collective, torch.device(question.device))
    return loop(question, transform.apply(model))
