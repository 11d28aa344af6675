"""Linear layers that were converted to float8, and tensors in it."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn


def is_rounded(tensor: Tensor) -> bool:
    """Whether a tensor is in float8 already."""
    loaded = sys.modules.get("torchao.float8.float8_training_tensor")
    return loaded is not None and isinstance(tensor, loaded.Float8TrainingTensor)


def config_at(module: nn.Module) -> Any:
    """torchao's config of a module that was converted to float8; None of any other."""
    loaded = sys.modules.get("torchao.float8.float8_linear")
    return module.config if loaded is not None and isinstance(module, loaded.Float8Linear) else None
