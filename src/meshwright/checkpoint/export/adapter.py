"""Write a checkpoint's adapters as the folder that peft, transformers and vLLM read."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from meshwright.checkpoint.load import open_manifest, read_tensors, verify_files
from meshwright.core.dtypes import torch_dtype
from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.introspection.adapted.model import adapters_of
from meshwright.introspection.adapted.names import ADAPTER, base_name, is_adapter, is_trained_copy, peft_name
from meshwright.introspection.adapted.peft_private import rewritten

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
        ConfigError: adapters were frozen, and the checkpoint leaves frozen parameters out.
        UnsupportedError: peft's config has no words for these adapters.
    """
    manifest = open_manifest(checkpoint)
    verify_files(checkpoint, manifest)
    names = [name for name, _ in adapted.named_parameters() if is_adapter(name) or is_trained_copy(name)]
    if left_out := [name for name in names if name in manifest.left_out]:
        raise ConfigError(
            f"{checkpoint} was saved with only_trained=True and lacks {left_out[0]}, which was frozen: save it whole"
        )
    entries = {name: manifest.tensors[f"model.{name}"] for name in names}
    read = {f"model.{name}": torch.empty(row.shape, dtype=getattr(torch, row.dtype)) for name, row in entries.items()}
    read_tensors(read, checkpoint)
    tensors = {peft_name(name): read[f"model.{name}"] for name in names}
    if dtype is not None:
        tensors = {name: tensor.to(torch_dtype(dtype)) for name, tensor in tensors.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = _as_peft_reads(adapted)
    config.base_model_name_or_path, config.task_type, config.inference_mode = base, "CAUSAL_LM", True
    config.save_pretrained(folder)
    return sum(tensor.nbytes for tensor in tensors.values())


def code_to_read(checkpoint: Path, folder: Path, plain: nn.Module, kind: str, base: str) -> str:
    """Return Python code that puts exported adapters beside the weights beside which they were trained.

    A base that was held in 4 bits is rounded alike by bitsandbytes: codes, blocks of 64 and scales are equal.

    Args:
        folder: the exported adapters.
        plain: the model without adapters.
        kind: class of transformers that reads it.
    """
    rounded = {base_name(name): dtype for name, dtype in open_manifest(checkpoint).in_4_bits.items()}
    lines = ["import peft", "import transformers"]
    options = ""
    if rounded:
        dtype = f"torch.{next(iter(rounded.values()))}"
        whole = [p for p, m in plain.named_modules() if isinstance(m, nn.Linear) and f"{p}.weight" not in rounded]
        lines += [
            "import torch",
            "bits = transformers.BitsAndBytesConfig(",
            f'    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype={dtype},',
            f"    llm_int8_skip_modules={whole!r},",
            ")",
        ]
        options = f", dtype={dtype}, quantization_config=bits"
    lines += [
        f"model = transformers.{kind}.from_pretrained({base!r}{options})",
        f"model = peft.PeftModel.from_pretrained(model, {str(folder)!r})",
    ]
    return "\n".join(lines)


def _as_peft_reads(adapted: nn.Module) -> Any:
    """Return peft's config of a model's adapters, by which peft puts them where they are here.

    peft takes some layers' names for those of experts that are stacked today. It takes such a layer by its weight's
    name, where it computes the same from the same tensors.
    """
    held: Any = adapted.peft_config
    config = copy.copy(held[ADAPTER])
    names, put = set(config.target_modules or ()), adapters_of(adapted)
    taken = rewritten(config, adapted, names)
    if not taken or put is None:
        return config
    if put.adapters.kind == "dora":
        raise UnsupportedError(
            f"peft takes {', '.join(taken)} of {type(adapted).__name__} for its experts' stack, beside which it has no"
            f" DoRA: it cannot read these adapters. Use --to merged, which writes the model with its adapters added."
        )
    beside = [path for path in put.targets if any(path == name or path.endswith(f".{name}") for name in taken)]
    config.target_modules = names - set(taken)
    config.target_parameters = [*(config.target_parameters or ()), *(f"{path}.weight" for path in beside)]
    config.lora_dropout = 0.0  # peft has none beside a weight
    return config
