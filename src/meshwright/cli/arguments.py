"""Parse the arguments of every verb: a config file or a run folder, then flags over it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from meshwright.core.config import load_toml, parse_flags
from meshwright.core.config.flags import flag_of
from meshwright.core.config.schema import field_types
from meshwright.core.dtypes import canonical_dtype
from meshwright.core.errors import ConfigError, nearest
from meshwright.core.files import refuse_links_out, replace_text
from meshwright.introspection.adapter_request import AdapterFolder, holds_adapters
from meshwright.training.config import Config, ModelConfig, check
from meshwright.training.fine_tuning import before_data, fetched, with_base
from meshwright.training.run.request import MODEL_CODE, refuse_code
from meshwright.training.slurm import FOLDER, LaunchConfig, check_job

if TYPE_CHECKING:
    from meshwright.training.run.opened import Opened

CONTINUE = ("resume", "resume_from", "resume_from_checkpoint", "continue")
"""Flags of other trainers for what a run's folder as first word does here."""

AnyConfig = TypeVar("AnyConfig", bound=Config)


def read_config(argv: list[str], *, prog: str, trusted: bool = False) -> Config:
    """Read and check the config that a verb's arguments describe.

    A section ``[slurm]`` of a file is checked and left to ``meshwright launch``.

    Args:
        argv: an optional ``config.toml`` or run folder, then flags (``--any.key=value``) that override it. For a run
            folder its own ``config.toml`` is read and ``run`` is set to the folder.
        prog: the verb as typed, for errors.
        trusted: whether values that run code may stand in the file.

    Raises:
        ConfigError: the file cannot be read, or a key or value in it or in the flags is not legal.
    """
    return before_data(_read(Config, argv, prog, trusted))


def _read(cls: type[AnyConfig], argv: list[str], prog: str, trusted: bool) -> AnyConfig:
    default: Any = cls()
    if argv and not argv[0].startswith("-"):
        file, argv = argv[0], argv[1:]
        default = config_at(Path(file))
        default = default if cls is LaunchConfig else default.without_job()
        if not trusted:
            given = (word.partition("=")[0].removeprefix("--") for word in argv if word.startswith("--"))
            refuse_code(default, file, given={flag.replace("-", "_") for flag in given})
    flags = dict.fromkeys(word.partition("=")[0] for word in argv)
    for flag in flags:
        if flag.startswith("--") and flag.removeprefix("--").replace("-", "_") in CONTINUE:
            raise ConfigError(
                f"{flag}: a run is continued by the name of its folder, from its last checkpoint:"
                f" meshwright train RUN [--key=value …]"
            )
    if "--epochs" in flags and "--steps" not in flags:  # a flag of one takes the place of the file's other
        default = replace(default, steps=cls().steps)
    elif "--steps" in flags and "--epochs" not in flags:
        default = replace(default, epochs=None)
    config = parse_flags(cls, argv, default=default, prog=prog)
    check(config)
    _check_run(config.run)
    return config


def read_launch(argv: list[str], *, trusted: bool = False) -> LaunchConfig:
    """Read a config and the job that is to train it: keys ``slurm.*``, which may also precede the config file."""
    for place, word in enumerate(argv[1:], start=1):
        if argv[0].startswith("-") and word.endswith(".toml") and "=" in argv[place - 1]:
            argv = [word, *argv[:place], *argv[place + 1 :]]
            break
    config = _read(LaunchConfig, argv, "meshwright launch", trusted)
    check_job(config)
    return config


def _check_run(folder: str) -> None:
    """Refuse the folder of a run with links out of it (wandb makes links of its own)."""
    if folder:
        refuse_links_out(Path(folder).expanduser(), but=("wandb",))


def config_at(path: Path) -> LaunchConfig:
    """Read a config file, or the config of a run's folder with its job's. Raises ConfigError where there is none."""
    if not path.is_dir():
        return load_toml(LaunchConfig, path)
    if not (path / "config.toml").is_file():
        raise ConfigError(
            f"{path} is a folder without a config.toml, so it is no run; give a config file or the folder of a run"
        )
    _check_run(str(path))
    config = replace(load_toml(LaunchConfig, path / "config.toml"), run=str(path))
    submitted = path / FOLDER / "config.toml"
    return replace(config, slurm=load_toml(LaunchConfig, submitted).slurm) if submitted.is_file() else config


def refuse_rest(argv: list[str], prog: str, *options: type) -> None:
    """Raise ConfigError for words that a verb does not know, which names its flags."""
    if argv:
        flags = [flag_of(key) for cls in options for key in field_types(cls)]
        close = nearest(argv[0].partition("=")[0], flags) if argv[0].startswith("-") else ""
        raise ConfigError(f"{prog} does not know '{argv[0]}'.{close} Flags: {', '.join(flags) or 'none'}.")


def open_run(path: str, *, trusted: bool = True) -> tuple[Path, Config]:
    """Return a run's folder and config; ConfigError if it is none, or its model runs code and is not ``trusted``."""
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(f"{path} does not exist or is no folder; give the folder of a run, like runs/demo-…")
    config = config_at(folder).without_job()
    if not trusted:
        refuse_code(config, folder / "config.toml", keys=(MODEL_CODE,))
    return folder, config


def open_model(
    path: str,
    *,
    step: int | None = None,
    base: Path | None = None,
    tokenizer: str | None = None,
    dtype: str | None = None,
    trusted: bool = False,
) -> Opened:
    """Open the folder of a run, or one with the files of a model of transformers or of adapters.

    Raises:
        ConfigError: it is none of these, or a flag is for another kind.
    """
    from meshwright.training.run.opened import Opened

    folder = Path(path := fetched(path)).expanduser()
    if (folder / "config.toml").is_file() or not folder.is_dir():
        _refuse_given(path, "the folder of a run", {"--tokenizer": tokenizer, "--dtype": dtype})
        return Opened.of_run(*open_run(path, trusted=trusted), step, base)
    if holds_adapters(folder):
        _refuse_given(path, "a folder of adapters, no run", {"--step": step})
        config = Config(model=ModelConfig(hf=str(base or ""), adapter=str(folder)))
        adapters = AdapterFolder.read(folder)
        if adapters.rounded_in:  # their base is held in 4 bits, as it was when they were trained
            precision = replace(config.techniques.precision, master=adapters.rounded_in)
            config = replace(config, techniques=replace(config.techniques, quantize_frozen="nf4", precision=precision))
        config, dtype = with_base(config, "--base BASE"), dtype or adapters.dtype
    elif (folder / "config.json").is_file():
        _refuse_given(path, "a model of transformers, no run", {"--step": step, "--base": base})
        config = Config(model=ModelConfig(hf=str(folder)))
    else:
        raise ConfigError(
            f"{path} is a folder without a config.toml, so it is no run, and without a config.json, so it is no"
            f" model of transformers either; give the folder of one of the two"
        )
    config = replace(config, model=replace(config.model, trust_remote_code=trusted))
    if dtype is not None:
        precision = replace(config.techniques.precision, master=canonical_dtype(dtype, where="--dtype"))
        config = replace(config, techniques=replace(config.techniques, precision=precision))
    return Opened.of_folder(folder, before_data(config), tokenizer or "")


def _refuse_given(path: str, kind: str, flags: dict[str, object]) -> None:
    for flag, value in flags.items():
        if value is not None:
            raise ConfigError(f"{flag} does not go with {path}, which is {kind}: leave {flag} out")


def check_file(target: Path, flag: str = "--html = ") -> None:
    """Raise ConfigError where a file cannot be written to ``target``, before the work for it."""
    file = target.expanduser()
    folder = file.parent
    why = ""
    if not folder.is_dir():
        why = f"there is no folder {folder}"
    elif file.is_dir():
        why = "it is a folder"
    elif not os.access(folder, os.W_OK | os.X_OK):
        why = f"the folder {folder} cannot be written to"
    if why:
        raise ConfigError(f"{flag}{target}: cannot write this file ({why})")


def write_file(target: Path, text: str, flag: str = "--html = ") -> str:
    """Write a file in place of an older one; return what to tell the user. ConfigError where it cannot be written."""
    try:
        replace_text(target.expanduser(), text)
    except OSError as error:
        raise ConfigError(f"{flag}{target}: cannot write this file ({error.strerror or error})") from None
    return f"wrote {target}: open it in a browser"
