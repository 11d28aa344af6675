"""Keep a run's config as it was asked for, beside the one in which models and data have filled keys in. Torch-free."""

from __future__ import annotations

from pathlib import Path

from meshwright.core.config import load_toml, to_toml
from meshwright.core.errors import ConfigError
from meshwright.core.files import replace_text
from meshwright.training.config import Config

NAME = "request.toml"


def keep_request(folder: Path, config: Config) -> None:
    """Write the config that a new run was asked for into its folder."""
    replace_text(folder / NAME, to_toml(config))


def read_request(folder: Path) -> Config | None:
    """Return the config that a run was asked for; None where its folder has none that can be read."""
    try:
        return load_toml(Config, folder / NAME) if (folder / NAME).is_file() else None
    except ConfigError:  # keys of another version: it is only shown, and the run's config is shown in its place
        return None
