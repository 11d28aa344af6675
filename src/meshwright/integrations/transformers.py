"""``Trainer``: transformers' own, whose ``layout=`` lays the model out and whose steps are meshwright's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint import pretrained
from meshwright.core.errors import MissingExtraError

try:
    import transformers
except ImportError as missing:
    raise MissingExtraError("meshwright.integrations.transformers", "transformers", "hf") from missing
try:
    import accelerate as _accelerate  # noqa: F401  (Trainer needs it)
except ImportError as missing:
    raise MissingExtraError("meshwright.integrations.transformers", "accelerate", "hf") from missing

from meshwright.integrations.trainer_private import LaidOutLoop

__all__ = ["Trainer"]


class LaidOutTrainer(LaidOutLoop, transformers.Trainer):
    """``transformers.Trainer`` with keywords ``layout``, ``techniques``, ``loss_fn`` and ``weights`` (``LaidOutLoop``).

    Batches, schedules, callbacks, logs, evaluation and folders stay Trainer's. Layout, step, clipping, scaling of
    losses and weights on disk are meshwright's. The loss of a step is the mean over the labels of all ranks and
    microbatches, as Trainer's ``num_items_in_batch`` has it.

    Args:
        model: also the path of a folder of transformers' files, which is not loaded but read by slices.

    Raises:
        ConfigError: an argument that would be ignored, by name.
    """

    def __init__(self, model: Any = None, args: Any = None, *positional: Any, weights: Any = None, **options: Any):
        if isinstance(model, (str, Path)):
            config, weights = transformers.AutoConfig.from_pretrained(model), weights or pretrained(model)
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(config)
        super().__init__(model, args, *positional, weights=weights, **options)


Trainer = LaidOutTrainer
