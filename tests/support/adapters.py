"""Tiny models with adapters, in the wrapper of the library that makes them: hosts frozen, adapters' weights drawn,
none of them zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from . import families


def adapted(family: str, targets: str | list[str] = "all-linear", *, seed: int = 0, **options: Any) -> nn.Module:
    """``options``: of LoraConfig, or of the family's config where they begin with ``model_``."""
    from peft import LoraConfig, get_peft_model

    changes = {key.removeprefix("model_"): options.pop(key) for key in list(options) if key.startswith("model_")}
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        made = families.on_cpu(families.config_of(family, use_cache=False, **changes), seed=seed)
        torch.manual_seed(seed)
        if family == "gpt2":
            options.setdefault("fan_in_fan_out", True)
        config = LoraConfig(
            r=options.pop("r", 4), target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM", **options
        )
        return get_peft_model(made, config)  # type: ignore[return-value]
