"""``SFTTrainer``: TRL's own, whose ``layout=`` lays the model out and whose steps are meshwright's."""

from __future__ import annotations

from typing import Any

from meshwright.core.errors import ConfigError, MissingExtraError

try:
    import trl
except ImportError as missing:
    raise MissingExtraError("meshwright.integrations.trl", "trl", "trl") from missing

from meshwright.integrations.trainer_private import LaidOutLoop
from meshwright.integrations.training_arguments import SFT_CONFIG

__all__ = ["SFTTrainer"]


class LaidOutSFTTrainer(LaidOutLoop, trl.SFTTrainer):
    """``trl.SFTTrainer`` with keywords ``layout``, ``techniques``, ``loss_fn`` and ``weights`` (``LaidOutLoop``).

    TRL prepares, packs and collates; entropy, token accuracy and number of tokens, which its own forward counts, are
    not logged.

    Raises:
        ConfigError: an argument that would be ignored, by name.
    """

    handling = SFT_CONFIG

    def __init__(self, model: Any, args: Any = None, *positional: Any, **options: Any):
        if options.get("peft_config") is not None:
            raise ConfigError(
                "peft_config would put adapters beside layers before these are laid out: leave it out, and give"
                " techniques={'adapters': {'rank': 16, 'alpha': 32.0, 'targets': ['all-linear']}}"
            )
        if options.get("quantization_config") is not None:
            raise ConfigError(
                "quantization_config makes weights that no layout cuts: leave it out, and give"
                " techniques={'quantize_frozen': 'nf4', 'adapters': {'rank': 16}}"
            )
        super().__init__(model, args, *positional, **options)

    def default_arguments(self) -> Any:
        return trl.SFTConfig("tmp_trainer")

    def lay_out(self) -> None:
        """Take TRL's forward off the model, which computes the loss of whole rows itself, and lay it out."""
        vars(self.model).pop("forward", None)
        super().lay_out()


SFTTrainer = LaidOutSFTTrainer
