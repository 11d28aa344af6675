"""Write a checkpoint's model in the forms that transformers and peft read."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from meshwright.core.dtypes import torch_dtype
from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.distributed.nf4 import pack, unpack
from meshwright.introspection.adapted_model import (
    ADAPTER,
    AdaptersPut,
    adapters_of,
    base_name,
    is_adapter,
    is_trained_copy,
    peft_name,
    rewritten,
)
from meshwright.introspection.adapter_request import ROUNDED_IN, WEIGHTS, Adapters
from meshwright.introspection.module_kinds import brings_initialiser

from .huggingface import Pretrained, named_tensors
from .loading import open_manifest, read_tensors, verify_files
from .store import Location
from .tensor_files import DTYPES, INDEX, SINGLE

# --- write a checkpoint's model as Hugging Face safetensors, tensor by tensor

FILE_BYTES = 5_000_000_000
"""Size limit of a file, unless one tensor alone is larger."""
CHUNK_BYTES = 2**30
"""Bytes of tensors that are read together."""
_WORDS = {dtype: word for word, dtype in DTYPES.items()}

ToFile = Callable[[str, Tensor], dict[str, Tensor]]
"""(name in the model, tensor; also on meta) -> the tensors that the files hold for it, by their names."""
InFiles = Callable[[str], Iterator[tuple[str, Tensor]]]
"""Device -> the contents of the files, always in the same order; on meta nothing is read."""
MadeOf = Mapping[str, tuple[str, ...]]
"""Name in the model -> checkpoint names of its tensors, joined along the last dim but one; of none: zeros."""


def export_tensors(
    checkpoint: Location,
    folder: Path,
    model: nn.Module,
    made_of: MadeOf | None = None,
    dtype: str | None = None,
    file_bytes: int = FILE_BYTES,
) -> int:
    """Write the model tensors of ``checkpoint`` into ``folder`` in one process: one file, or several with an index.

    Args:
        model: a model of transformers, on meta, which defines names and form of the tensors in the files.
        made_of: the checkpoint tensors that each model tensor is made of; None: the one of its name.
        dtype: dtype of floating-point parameters; None: as they are. Buffers stay as they are.

    Returns:
        Bytes of all tensors.

    Raises:
        IntegrityError: the checkpoint is damaged.
    """
    manifest = open_manifest(checkpoint)
    verify_files(checkpoint, manifest)
    own = (key.removeprefix("model.") for key in manifest.tensors if key.startswith("model."))
    sources, to_file = made_of or {name: (name,) for name in own}, as_transformers_saves(model)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}

    def in_files(device: str) -> Iterator[tuple[str, Tensor]]:
        left = list(sources)
        while left:
            chunk: dict[str, Tensor] = {}
            parts: dict[str, Tensor] = {}
            while left and sum(tensor.nbytes for tensor in chunk.values()) < CHUNK_BYTES:
                name = left.pop(0)
                entries = {key: manifest.tensors[key] for key in (f"model.{one}" for one in sources[name])}
                if not entries:
                    chunk[name] = torch.zeros_like(model.state_dict()[name], device=device)
                    continue
                first, *others = entries.values()
                shape, sizes = list(first.shape), [entry.shape[-2] for entry in entries.values() if others]
                if others:
                    shape[-2] = sum(sizes)
                chunk[name] = whole = torch.empty(shape, dtype=getattr(torch, first.dtype), device=device)
                parts |= zip(entries, whole.split(sizes, -2) if others else (whole,), strict=True)
            if parts and device != "meta":
                read_tensors(parts, checkpoint, manifest, fresh=parts)
            for name, tensor in chunk.items():
                rounded_in = [manifest.in_4_bits[one] for one in sources[name] if one in manifest.in_4_bits]
                values = unpack(tensor, torch_dtype(rounded_in[0])) if rounded_in else tensor
                if dtype and name in parameters and values.is_floating_point():
                    values = values.to(torch_dtype(dtype))
                yield from to_file(name, values).items()

    return write_files(folder, in_files, file_bytes)


def write_files(folder: Path, in_files: InFiles, file_bytes: int = FILE_BYTES) -> int:
    """Write tensors into ``folder``, one after the other: one file, or several with an index.

    A file is the length of its header, the header, and the tensors' bytes (https://huggingface.co/docs/safetensors).

    Returns:
        Bytes of all tensors.
    """
    groups: list[dict[str, Tensor]] = [{}]
    full = total = 0
    for name, made in in_files("meta"):
        if groups[-1] and full + made.nbytes > file_bytes:
            groups.append({})
            full = 0
        groups[-1][name] = made
        full, total = full + made.nbytes, total + made.nbytes
    n, found, weight_map = len(groups), in_files("cpu"), {}
    for number, planned in enumerate(groups, 1):
        file_name = SINGLE if n == 1 else f"model-{number:05d}-of-{n:05d}.safetensors"
        weight_map |= dict.fromkeys(planned, file_name)
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        begin = 0
        for name, made in planned.items():
            end = begin + made.nbytes
            header[name] = {"dtype": _WORDS[made.dtype], "shape": tuple(made.shape), "data_offsets": (begin, end)}
            begin = end
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % 8)
        with open(folder / file_name, "wb") as file:
            file.write(len(encoded).to_bytes(8, "little") + encoded)
            for expected, made in planned.items():
                name, tensor = next(found)
                assert (name, tensor.shape, tensor.dtype) == (expected, made.shape, made.dtype)
                file.write(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
    if n > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return total


def as_transformers_saves(model: nn.Module) -> ToFile:
    """Return a converter of tensors to the form that transformers saves, such as experts one by one.

    Tensors stay as they are where the model has no other form, or one that takes several of them together.
    """
    if not brings_initialiser(model):
        return lambda name, tensor: {name: tensor}
    from transformers.core_model_loading import revert_weight_conversion

    state = model.state_dict()
    alone = [revert_weight_conversion(model, {name: tensor}).keys() for name, tensor in state.items()]  # type: ignore[arg-type]
    together = revert_weight_conversion(model, dict(state)).keys()  # type: ignore[arg-type]
    if sum(map(len, alone)) != len(together) or set().union(*alone) != set(together):
        return lambda name, tensor: {name: tensor}
    return lambda name, tensor: revert_weight_conversion(model, {name: tensor})  # type: ignore[arg-type]


# --- add a checkpoint's adapters to the weights beside which they were trained, layer by layer


def export_merged(
    checkpoint: Location,
    folder: Path,
    adapted: nn.Module,
    plain: nn.Module,
    base: Pretrained | None,
    dtype: str | None = None,
) -> int:
    """Write a model with its adapters added into ``folder``, as transformers saves it without adapters.

    peft computes each merged weight, in the model's dtype; one layer at a time is in memory.

    Args:
        adapted: the model with adapters, on meta; of a model without any, ``plain``.
        plain: the same model without, on meta; it defines names and form of the tensors in the files.
        base: the weights beside which the adapters were trained; None: the checkpoint left nothing out.
        dtype: dtype of floating-point parameters; None: the model's.

    Returns:
        Bytes of all tensors.

    Raises:
        ConfigError, IntegrityError: the base is that of another model, or the checkpoint is damaged.
    """
    manifest = open_manifest(checkpoint)
    verify_files(checkpoint, manifest)
    put, to_file = adapters_of(adapted) or AdaptersPut(Adapters(), ()), as_transformers_saves(plain)
    parameters = {name for name, _ in plain.named_parameters(remove_duplicate=False)}
    beside = [name for name in named_tensors(adapted) if not (is_adapter(name) or is_trained_copy(name))]
    own_names = {base_name(name): name for name in beside}  # of the plain model's tensors, beside adapters
    copies = {base_name(name): name for name, _ in adapted.named_parameters() if is_trained_copy(name)}
    last: dict[str, dict[str, Tensor]] = {}

    @cache
    def reader() -> Callable[[str], Tensor]:
        assert base is not None
        return base.reader(plain)

    def stored(name: str, like: Tensor) -> Tensor:
        entry = manifest.tensors[f"model.{name}"]
        read = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        read_tensors({f"model.{name}": read}, checkpoint, manifest, fresh={f"model.{name}"})
        return unpack(read, like.dtype) if name in manifest.in_4_bits else read.to(like.dtype)

    def frozen(name: str, like: Tensor) -> Tensor:
        """Read a tensor of the model without adapters: from the checkpoint, or from the base what that left out."""
        own = own_names.get(name, name)
        if f"model.{own}" in manifest.tensors:
            return stored(own, like)
        value, rounded_in = reader()(name), manifest.in_4_bits.get(own)
        if rounded_in is not None:  # adapters were trained beside the rounded weight
            value = unpack(pack(value.to(torch_dtype(rounded_in))), like.dtype)
        return value.to(like.dtype)

    def merged(path: str) -> dict[str, Tensor]:
        """Return the parameters of an adapted layer, or of a stack, with its adapters added; the last one is kept."""
        if path not in last:
            last.clear()
            layer: Any = copy.deepcopy(adapted.get_submodule(path)).to_empty(device="cpu")
            with torch.no_grad():
                for name, tensor in layer.state_dict(keep_vars=True).items():
                    full = f"{path}.{name}"
                    tensor.copy_(stored(full, tensor) if is_adapter(full) else frozen(base_name(full), tensor))
                while hasattr(layer, "base_layer"):
                    layer.merge(safe_merge=True)
                    layer = layer.base_layer
            last[path] = {name: p.detach() for name, p in layer.named_parameters(recurse=False)}
        return last[path]

    def in_files(device: str) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named_tensors(plain).items():
            path, _, own = name.rpartition(".")
            if device == "meta":
                value = tensor
            elif name in copies:
                value = stored(copies[name], tensor)
            elif name in put.parameters or (own == "weight" and path in put.targets):
                value = merged(path)[own]
            else:
                value = frozen(name, tensor)
            if dtype is not None and name in parameters and value.is_floating_point():
                value = value.to(torch_dtype(dtype))
            yield from to_file(name, value).items()

    return write_files(folder, in_files)


# --- write a checkpoint's adapters as the folder that peft, transformers and vLLM read


def export_adapter(checkpoint: Location, folder: Path, adapted: nn.Module, base: str, dtype: str | None = None) -> int:
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
    read_tensors(read, checkpoint, manifest, fresh=read)
    tensors = {peft_name(name): read[f"model.{name}"] for name in names}
    if dtype is not None:
        tensors = {name: tensor.to(torch_dtype(dtype)) for name, tensor in tensors.items()}
    rounded = {ROUNDED_IN: next(iter(manifest.in_4_bits.values()))} if manifest.in_4_bits else {}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"} | rounded)
    held: Any = adapted.peft_config
    config, put = copy.copy(held[ADAPTER]), adapters_of(adapted)
    modules = set(config.target_modules or ())
    # peft takes some layers' names for those of experts that are stacked today. It takes such a layer by its weight's
    # name, where it computes the same from the same tensors
    taken = rewritten(config, adapted, modules)
    if taken and put is not None:
        if put.adapters.kind == "dora":
            raise UnsupportedError(
                f"peft takes {', '.join(taken)} of {type(adapted).__name__} for its experts' stack, beside which it has"
                f" no DoRA: it cannot read these adapters. Use --to merged, which writes the model with its adapters"
                f" added."
            )
        beside = [path for path in put.targets if any(path == name or path.endswith(f".{name}") for name in taken)]
        config.target_modules = modules - set(taken)
        config.target_parameters = [*(config.target_parameters or ()), *(f"{path}.weight" for path in beside)]
        config.lora_dropout = 0.0  # peft has none beside a weight
    config.base_model_name_or_path, config.task_type, config.inference_mode = base, "CAUSAL_LM", True
    config.save_pretrained(folder)
    return sum(tensor.nbytes for tensor in tensors.values())


def code_to_read(checkpoint: Location, folder: Path, plain: nn.Module, kind: str, base: str) -> str:
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
            "import torch  # and, for 4 bits: pip install bitsandbytes",
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
