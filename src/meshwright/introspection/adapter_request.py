"""Define what adapters are asked for, and check the values. Torch-free."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from meshwright.core.config.ranges import ABOVE_0, BELOW_1, FROM_1, NOT_EMPTY, check_ranges
from meshwright.core.errors import ConfigError, IntegrityError, UnsupportedError
from meshwright.core.files import inside, read_json, refuse_pointer
from meshwright.core.names import pattern

ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters, which are trained instead of the model (https://arxiv.org/abs/2106.09685); made by peft."""

    kind: Literal["lora", "rslora", "dora"] = "lora"
    """lora: the adapter's output times alpha / rank; rslora: times alpha / sqrt(rank)
    (https://arxiv.org/abs/2312.03732); dora: as lora, and each row of the sum of weight and adapter is brought to a
    length that is trained (https://arxiv.org/abs/2402.09353)."""
    rank: Annotated[int, FROM_1] = 16
    """Rank of each adapter: features between its two matrices."""
    alpha: Annotated[float, ABOVE_0] = 32.0
    """Numerator of the factor of the adapters' output."""
    dropout: Annotated[float, BELOW_1] = 0.0
    """Probability that a feature of an adapter's input is zeroed."""
    targets: Annotated[tuple[Annotated[str, NOT_EMPTY], ...], NOT_EMPTY] = (ALL_LINEAR,)
    """Layers beside which adapters stand: names (q_proj) or ends of paths (self_attn.q_proj), * for one part of a path
    (layers.*.mlp.up_proj); all-linear: every linear layer of the blocks."""
    modules_to_save: tuple[Annotated[str, NOT_EMPTY], ...] = ()
    """Modules that are trained whole beside the adapters, named as targets are: lm_head."""

    def check(self, where: str = "adapters") -> None:
        """Raise ConfigError for a value out of its range; the text names key, value and range."""
        check_ranges(self, where)


# --- read what a folder of peft's holds: the request for such adapters, their base, and their tensors. Torch-free

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
WHOLE = ("model.safetensors", "model.safetensors.index.json")
"""Files of a whole model's weights; ``checkpoint/tensor_files`` reads them, and would import torch."""
ROUNDED_IN = "meshwright.base_in_4_bits"
"""Key of the tensors' file, where the base was held in 4 bits: the dtype in which its weights were rounded."""

CARRIED = (
    *("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "target_modules", "target_parameters"),
    *("modules_to_save", "base_model_name_or_path", "revision", "layers_to_transform", "layers_pattern"),
    *("exclude_modules", "fan_in_fan_out"),
)
"""Keys of peft's config that the request says, or the names of the tensors do."""
WITHOUT_EFFECT = (
    *("auto_mapping", "inference_mode", "peft_version", "megatron_core", "qalora_group_size", "runtime_config"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
)
"""Keys that say nothing about what trained adapters compute; init_lora_weights says which of them changed the base."""
LEGAL: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}
"""Values with which adapters are added to the base as it is."""
_FACTOR = re.compile(r"\.lora_(?:A|embedding_A)(?:\.weight)?$")
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def holds_adapters(folder: Path) -> bool:
    """Return whether a folder holds adapters of peft; raise ConfigError if it holds a whole model too."""
    if not (folder / CONFIG).is_file():
        return False
    if whole := next((name for name in WHOLE if (folder / name).is_file()), ""):
        raise ConfigError(
            f"{folder} holds a whole model ({whole}) and adapters ({CONFIG}), and one of the two would be left out:"
            f" move the adapters to a folder of their own, and give the folder that is meant"
        )
    return True


@dataclass(frozen=True)
class AdapterFolder:
    """The contents of a folder of peft's.

    Attributes:
        adapters: the request that makes such adapters.
        base: path or name of the base, as peft was told.
        revision: revision of a base that is a repository; "" for the newest.
        dtype: dtype of the adapters' tensors, by name.
        rounded_in: dtype in which the base's frozen weights were rounded to 4 bits (nf4); "" where nothing says so.
    """

    folder: Path
    adapters: Adapters
    base: str
    revision: str
    dtype: str
    rounded_in: str

    @classmethod
    def read(cls, folder: Path) -> AdapterFolder:
        """Read a folder; of the tensors' file the header alone.

        Raises:
            ConfigError: a file is missing, a pointer of Git LFS or of another form.
            IntegrityError: the tensors' file is cut short.
            UnsupportedError: peft's config asks for what a request cannot say; names the key.
        """
        keys = read_json(inside(folder, CONFIG))
        path = inside(folder, WEIGHTS)
        if not path.is_file():
            there = f"{PICKLED} is there, and pickled weights are not read: " if (folder / PICKLED).is_file() else ""
            raise ConfigError(
                f"{folder} holds {CONFIG} and no {WEIGHTS}: {there}save the adapters again by peft"
                f" (model.save_pretrained(FOLDER))"
            )
        refuse_pointer(path)
        try:
            with open(path, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(min(length, path.stat().st_size)))
            if not all(isinstance(row, dict) for row in header.values()):
                raise ValueError("its header is no table")
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise IntegrityError(f"{path} is no whole safetensors file: {error}. Copy it again") from None
        # a key that changes what is computed, and that no request says
        default = {"peft_type": None, "bias": "none", "init_lora_weights": True}
        other = [key for key, legal in LEGAL.items() if keys.get(key, default.get(key)) not in legal]
        known = (*CARRIED, *WITHOUT_EFFECT, *LEGAL)
        other += [key for key, value in keys.items() if value and key not in known]
        if keys.get("use_rslora") and keys.get("use_dora"):
            other.append("use_dora beside use_rslora")
        if other:
            key = other[0]
            raise UnsupportedError(
                f"{folder} holds adapters of peft with {key} = {keys.get(key, True)!r:.60} ({CONFIG}), which are"
                f" neither trained nor evaluated beside their base. Where peft can add them to it, do so with"
                f" {merging_by_peft(folder)}"
            )
        about = header.pop("__metadata__", {})
        kind: Literal["lora", "rslora", "dora"] = "dora" if keys.get("use_dora") else "lora"
        try:
            adapters = Adapters(
                "rslora" if keys.get("use_rslora") else kind,
                int(keys["r"]),
                float(keys["lora_alpha"]),
                float(keys.get("lora_dropout") or 0.0),
                _targets(keys, list(header)),
                tuple(keys.get("modules_to_save") or ()),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{folder / CONFIG} is no config of peft's adapters ({type(error).__name__}: {error})"
            ) from None
        adapters.check(str(folder / CONFIG))
        dtype = next((_DTYPES[row["dtype"]] for row in header.values() if row.get("dtype") in _DTYPES), "float32")
        base, revision = str(keys.get("base_model_name_or_path") or ""), str(keys.get("revision") or "")
        return cls(folder, adapters, base, revision, dtype, str(about.get(ROUNDED_IN, "")))


def merging_by_peft(folder: Path) -> str:
    """Return the command by which peft adds the adapters in a folder to their base, and the folder that it writes."""
    base, merged = read_json(folder / CONFIG).get("base_model_name_or_path"), str(folder.absolute()) + "-merged"
    tokenizer = str(folder if (folder / "tokenizer.json").is_file() else base)
    code = (
        f"import peft, transformers;"
        f" model = peft.AutoPeftModelForCausalLM.from_pretrained({str(folder)!r});"
        f" model.merge_and_unload().save_pretrained({merged!r});"
        f" transformers.AutoTokenizer.from_pretrained({tokenizer!r}).save_pretrained({merged!r})"
    )
    return f"{shlex.join(['python', '-c', code])} and give {merged}"


def _targets(keys: Mapping[str, Any], tensors: list[str]) -> tuple[str, ...]:
    """Return the layers with adapters by the tensors' names, which are exact whatever peft's config says.

    A name stands for all blocks (``layers.*.mlp.up_proj``) where the config picks no blocks itself. Stacked parameters
    are named in the config alone.
    """
    stacks = [name for name in keys.get("target_parameters") or () if not name.endswith(".weight")]
    modules = [name.rpartition(".")[0] for name in stacks]
    picks = any(keys.get(key) for key in ("layers_to_transform", "layers_pattern", "exclude_modules"))
    named = keys.get("target_modules")
    picks = picks or (isinstance(named, str) and named != "all-linear")
    found = dict.fromkeys(stacks)
    for name in tensors:
        path, count = _FACTOR.subn("", name.removeprefix("base_model.model."))
        path = path.replace(".base_layer", "")
        if count and not any(path == module or path.endswith(f".{module}") for module in modules):
            found[path if picks else pattern(path)] = None
    return tuple(found)
