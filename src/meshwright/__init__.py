"""meshwright: facts about a model, a cluster and a batch become a Plan; the plan is applied, stepped and saved.

Importing this package imports neither torch nor any part of meshwright; each name below is loaded when it is first
used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.checkpoint import load, pretrained, save
    from meshwright.checkpoint.saving import Handle
    from meshwright.core.errors import (
        ConfigError,
        IntegrityError,
        MeshwrightError,
        MissingExtraError,
        NonFiniteError,
        UnsupportedError,
    )
    from meshwright.core.losses import Loss, PreferenceLoss
    from meshwright.distributed.parallel_model import ParallelModel
    from meshwright.distributed.parallelize import parallelize
    from meshwright.distributed.step.part import StepLoss, StepResult
    from meshwright.introspection.blocks import Hints
    from meshwright.introspection.cluster import Cluster
    from meshwright.planning.build import Plan
    from meshwright.planning.layout import Layout
    from meshwright.planning.techniques import Precision, Techniques
    from meshwright.planning.values import Batch
    from meshwright.simulation.answer import Foresight
    from meshwright.simulation.foresee import foresee, plan
    from meshwright.training.config import Config
    from meshwright.training.trainer import Trainer
    from meshwright.verification.verify import verify

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "Cluster",
    "Config",
    "ConfigError",
    "Foresight",
    "Handle",
    "Hints",
    "IntegrityError",
    "Layout",
    "Loss",
    "MeshwrightError",
    "MissingExtraError",
    "NonFiniteError",
    "ParallelModel",
    "Plan",
    "Precision",
    "PreferenceLoss",
    "StepLoss",
    "StepResult",
    "Techniques",
    "Trainer",
    "UnsupportedError",
    "__version__",
    "foresee",
    "load",
    "parallelize",
    "plan",
    "pretrained",
    "save",
    "verify",
]

# A name of this table must never be the name of a submodule of this package: importing the submodule would hide it.
_HOME = {
    "Batch": "meshwright.planning.values",
    "Cluster": "meshwright.introspection.cluster",
    "Config": "meshwright.training.config",
    "ConfigError": "meshwright.core.errors",
    "Foresight": "meshwright.simulation.answer",
    "Handle": "meshwright.checkpoint.saving",
    "Hints": "meshwright.introspection.blocks",
    "IntegrityError": "meshwright.core.errors",
    "Layout": "meshwright.planning.layout",
    "Loss": "meshwright.core.losses",
    "MeshwrightError": "meshwright.core.errors",
    "MissingExtraError": "meshwright.core.errors",
    "NonFiniteError": "meshwright.core.errors",
    "ParallelModel": "meshwright.distributed.parallel_model",
    "Plan": "meshwright.planning.build",
    "Precision": "meshwright.planning.techniques",
    "PreferenceLoss": "meshwright.core.losses",
    "StepLoss": "meshwright.distributed.step.part",
    "StepResult": "meshwright.distributed.step.part",
    "Techniques": "meshwright.planning.techniques",
    "Trainer": "meshwright.training.trainer",
    "UnsupportedError": "meshwright.core.errors",
    "foresee": "meshwright.simulation.foresee",
    "load": "meshwright.checkpoint",
    "parallelize": "meshwright.distributed.parallelize",
    "plan": "meshwright.simulation.foresee",
    "pretrained": "meshwright.checkpoint",
    "save": "meshwright.checkpoint",
    "verify": "meshwright.verification.verify",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'meshwright' has no attribute '{name}'")
    from importlib import import_module

    from meshwright.core.host import without_collector

    with without_collector():
        value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
