"""Write a checkpoint's adapters as the folder that peft, transformers and vLLM read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from meshwright.checkpoint.load import open_manifest, read_tensors, verify_files
from meshwright.core.dtypes import torch_dtype
from meshwright.introspection.adapted.names import ADAPTER, is_adapter, is_trained_copy, peft_name

WEIGHTS = "adapter_model.safetensors"


def export_adapter(checkpoint: Path, folder: Path, adapted: nn.Module, base: str, dtype: str | None = None) -> int:
    """Write adapters, and modules that were trained whole, with peft's adapter_config.json.

    Args:
        adapted: the model with adapters, on meta.
        base: path or name of the base, which readers of the folder load first.
        dtype: dtype of the tensors; None: as in the checkpoint.

    Returns:
        Bytes of all tensors.

    Raises:
        IntegrityError: the checkpoint is damaged.
    """
    manifest = open_manifest(checkpoint)
    verify_files(checkpoint, manifest)
    names = [name for name, _ in adapted.named_parameters() if is_adapter(name) or is_trained_copy(name)]
    entries = {name: manifest.tensors[f"model.{name}"] for name in names}
    read = {f"model.{name}": torch.empty(row.shape, dtype=getattr(torch, row.dtype)) for name, row in entries.items()}
    read_tensors(read, checkpoint)
    tensors = {peft_name(name): read[f"model.{name}"] for name in names}
    if dtype is not None:
        tensors = {name: tensor.to(torch_dtype(dtype)) for name, tensor in tensors.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config: Any = adapted.peft_config[ADAPTER]  # type: ignore[index]
    config.base_model_name_or_path, config.task_type, config.inference_mode = base, "CAUSAL_LM", True
    config.save_pretrained(folder)
    return sum(tensor.nbytes for tensor in tensors.values())
