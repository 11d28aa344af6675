"""Register the transform ``load_weights``, which reads a Hugging Face folder or one of our checkpoints."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from meshwright.core.errors import ConfigError
from meshwright.distributed import order
from meshwright.distributed.doors.transform_options import LoadWeightsTransformConfig
from meshwright.distributed.doors.transform_registry import ModelTransform, register_model_transform
from meshwright.distributed.mesh import sizes_of_stage
from meshwright.distributed.weights.weights import Weights
from meshwright.introspection.facts import model_facts
from meshwright.planning.build import plan_for_mesh_sizes
from meshwright.planning.techniques import Techniques

from .huggingface import Pretrained, named_tensors
from .load import load_model_tensors
from .manifest import NAME

log = logging.getLogger("meshwright")
RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


@register_model_transform("load_weights", LoadWeightsTransformConfig, after=("fully_shard",), before=("ddp",))
class LoadWeightsTransform(ModelTransform):
    """A transform that writes each rank's share of a folder's weights, creating a model on meta. Collective.

    Context: ``is_restart`` states whether this process resumes what an earlier one began (default: torchrun's and
    Slurm's restart counts).
    """

    def apply(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        config: LoadWeightsTransformConfig = self.config
        if config.skip_on_restart and self._is_restart():
            log.info("load_weights: this is a restart, so %s is not read", config.checkpoint_path)
            return model
        weights = weights_in(config.checkpoint_path)
        facts = model_facts(model)
        if not facts.on_meta:
            weights(model.module if isinstance(model, DistributedDataParallel) else model)
            return model
        mesh = self.context.get("device_mesh")
        plan = plan_for_mesh_sizes(
            facts, sizes_of_stage(mesh), mesh.device_type if mesh is not None else "cpu", Techniques(), "mean"
        )
        return order.apply(
            model, plan, order.Site(mesh, facts, self.context.get("seed", 0), weights=weights), only=("weights",)
        )

    def _is_restart(self) -> bool:
        restarts = self.context.get("is_restart")
        return any(int(os.environ.get(name, "0")) > 0 for name in RESTARTS) if restarts is None else bool(restarts)


def weights_in(path: str | Path) -> Weights:
    """Return a writer of a folder's weights; ConfigError where there is no such folder."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            f"load_weights.checkpoint_path = {path!r} is no folder; name one with safetensors, or a checkpoint of"
            f" meshwright"
        )
    return _checkpoint(folder) if (folder / NAME).is_file() else Pretrained(folder)


def _checkpoint(folder: Path) -> Weights:
    def write(model: nn.Module) -> set[str]:
        tensors = named_tensors(model)
        load_model_tensors({f"model.{name}": tensor for name, tensor in tensors.items()}, folder)
        return set(tensors)

    return write
