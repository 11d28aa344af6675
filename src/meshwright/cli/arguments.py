"""What every verb accepts: a config file or a run folder, then flags over it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from meshwright.core.config import load_toml, parse_flags
from meshwright.core.errors import ConfigError
from meshwright.training.config import Config, check


def read_config(argv: list[str], *, prog: str, description: str) -> Config:
    """The config that the words of a verb describe, checked.

    Args:
        argv: an optional ``config.toml`` or run folder, then flags (``--any.key=value``) over what it says. Of a run
            folder its own ``config.toml`` is read and ``run`` is set to the folder.
        prog: the verb as typed, for help and errors.
        description: the first lines of the help.

    Raises:
        ConfigError: the file cannot be read, or a key or value of it or of the flags is not legal.
        SystemExit: 0 after ``--help``; 2 for a flag that does not exist or does not parse.
    """
    default = Config()
    if argv and not argv[0].startswith("-"):
        default, argv = _from_path(Path(argv[0])), argv[1:]
    config = parse_flags(Config, argv, default=default, prog=prog, description=description)
    check(config)
    return config


def _from_path(path: Path) -> Config:
    if not path.is_dir():
        return load_toml(Config, path)
    if not (path / "config.toml").is_file():
        raise ConfigError(f"{path} is a folder without a config.toml, so it is no run; give a config file or the folder of a run")
    return replace(load_toml(Config, path / "config.toml"), run=str(path))
