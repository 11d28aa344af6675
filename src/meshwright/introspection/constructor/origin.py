"""Describe a model so that transformers, and peft, can build it again from a checkpoint alone."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from meshwright.core.config import from_dict, to_dict
from meshwright.core.errors import ConfigError, IntegrityError, UnsupportedError
from meshwright.introspection.adapted.model import adapters_of, is_adapter
from meshwright.introspection.adapted.request import Adapters
from meshwright.introspection.module_kinds import ABOUT_THE_FILE, brings_initialiser
from meshwright.introspection.signature import core_of
from meshwright.introspection.source import CONFIG, import_transformers, is_config, read_causal_lm

OWN_CODE = "auto_map"
"""Key of a config that names code beside it; a model of transformers' own needs none."""


@dataclass(frozen=True)
class ModelOrigin:
    """A model's class, config and adapters, as JSON values.

    Attributes:
        kind: name of the model's class, without a wrapper around it.
        config: transformers' config of one of its own models, as it was before any layout; empty for other models.
        adapters: the adapters that were requested; None without any.
        by_hand: whether the model has adapters that were put beside its layers by other code.
    """

    kind: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    adapters: Mapping[str, Any] | None = None
    by_hand: bool = False

    @classmethod
    def of(cls, model: nn.Module) -> ModelOrigin:
        """Describe a model, before a layout changes it."""
        core, put = core_of(model), adapters_of(model)
        config = getattr(core, "config", None)
        of_transformers = is_config(config) and brings_initialiser(core) and _is_public(type(core))
        by_hand = put is None and any(is_adapter(name) for name, _ in model.named_parameters())
        return cls(
            type(core).__name__,
            _keys(config) if of_transformers else {},
            to_dict(put.adapters) if put is not None else None,
            by_hand,
        )

    @classmethod
    def read(cls, values: Mapping[str, Any], where: Path) -> ModelOrigin:
        """Return what ``to_json`` wrote.

        Raises:
            IntegrityError: the values are of another form.
        """
        kind, config, adapters = values.get("kind", ""), values.get("config", {}), values.get("adapters")
        if not (isinstance(kind, str) and isinstance(config, dict) and isinstance(adapters, dict | None)):
            raise IntegrityError(f"{where} is damaged: its 'model' does not describe one")
        return cls(kind, config, adapters, values.get("by_hand") is True)

    def to_json(self) -> dict[str, Any]:
        """Return the description as JSON values."""
        adapters = dict(self.adapters) if self.adapters is not None else None
        return {"kind": self.kind, "config": dict(self.config), "adapters": adapters, "by_hand": self.by_hand}

    def requested_adapters(self) -> Adapters | None:
        """Return the request for the model's adapters. Raises ConfigError for values that this version lacks."""
        return None if self.adapters is None else from_dict(Adapters, self.adapters, where="the checkpoint's adapters")

    def builder(self, folder: Path) -> Callable[[], nn.Module]:
        """Return a function that builds the model without its adapters; code is transformers' own alone.

        Args:
            folder: a folder into which the config is written for transformers to read.

        Raises:
            ConfigError, UnsupportedError: this transformers has no such model or does not take its config.
        """
        transformers = import_transformers("convert")
        kind = getattr(transformers, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
            raise UnsupportedError(
                f"transformers {transformers.__version__} has no {self.kind}: convert with the version that trained it"
            )
        (folder / CONFIG).write_text(json.dumps(self.config))
        read = read_causal_lm(folder).config  # refuses kernels and files from elsewhere

        def build() -> nn.Module:
            config = copy.deepcopy(read)
            config.get_text_config().use_cache = False
            try:
                return kind(config)
            except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, ImportError) as error:
                raise ConfigError(
                    f"transformers cannot build {self.kind} of the checkpoint's config: {error}"
                ) from error

        return build


def _is_public(kind: type[nn.Module]) -> bool:
    """Return whether transformers offers a class by its name, so that no other code is needed to build it."""
    return getattr(import_transformers(), kind.__name__, None) is kind


def _keys(config: Any) -> dict[str, Any]:
    values = json.loads(config.to_json_string(use_diff=False))
    return {key: value for key, value in values.items() if key not in ABOUT_THE_FILE and key != OWN_CODE}
