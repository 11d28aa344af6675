"""Find the weights beside which a run's adapters stand: a run's folder holds the adapters alone."""

from __future__ import annotations

from pathlib import Path

from meshwright.checkpoint.huggingface import Pretrained, pretrained
from meshwright.checkpoint.tensor_files import holds_weights
from meshwright.core.errors import ConfigError
from meshwright.core.files import read_object
from meshwright.training.config import Config

from .folder import IDENTITY


def weights_beside_adapters(run: Path, config: Config, base: Path | None) -> Pretrained | None:
    """Return the weights in ``base``, if they are those that a run's adapters were trained beside.

    The path in the run's own config is not opened: nothing in a run's folder names a file outside.

    Returns:
        None for a run without adapters.

    Raises:
        ConfigError: no folder is given for a run with adapters, one for a run without, or one of other weights.
    """
    if config.adapters is None:
        if base is not None:
            raise ConfigError(f"--base {base}: the run {run} trained a whole model, no adapters; leave --base out")
        return None
    if base is None:
        raise ConfigError(
            f"{run} trained adapters, and its folder does not hold the model beside which they stand: give that"
            f" model's folder with --base (the run's config names {config.model.hf})"
        )
    if not (base.expanduser().is_dir() and holds_weights(base.expanduser())):
        raise ConfigError(f"--base {base}: the folder is not there, or holds no weights (model.safetensors)")
    found, identity = pretrained(base), read_object(run / IDENTITY)
    if found.fingerprint() != identity.get("model", {}).get("base"):
        raise ConfigError(
            f"--base {base}: these are not the weights beside which the adapters of {run} were trained (the run's"
            f" config names {config.model.hf})"
        )
    return found
