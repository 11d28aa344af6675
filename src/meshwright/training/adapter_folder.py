"""Begin from a folder of adapters: its base becomes the run's model, its shape the request. Torch-free."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.core.config import to_dict
from meshwright.core.dtypes import canonical_dtype
from meshwright.core.errors import ConfigError
from meshwright.introspection.adapter_request import CONFIG, AdapterFolder, holds_adapters

from .run.occupancy import latest_checkpoint

if TYPE_CHECKING:
    from .config import Config


def with_base(config: Config, flag: str = "") -> Config:
    """Return a config whose model is the base of the adapters that it names; any other config as it is.

    A run with a checkpoint goes on without the folder that it began from.

    Args:
        flag: words that name the base on the command line, for errors; by default those of ``train``.

    Raises:
        ConfigError: the base is not on this machine, [adapters] ask for other ones, or the adapters were trained beside
            a base in 4 bits and this one is not.
        IntegrityError, UnsupportedError: as ``AdapterFolder.read`` does.
    """
    m = config.model
    is_base = not m.hf or not holds_adapters(Path(m.hf).expanduser())
    if m.adapter and not is_base:
        raise ConfigError(
            f"model.hf = {m.hf} holds adapters, and model.adapter = {m.adapter} names adapters too: leave one out, or"
            f" give their base as model.hf"
        )
    named, key = (m.adapter, "model.adapter") if is_base else (m.hf, "model.hf")
    if not named:
        return config
    place = Path(named).expanduser()
    if not place.exists() and config.run and latest_checkpoint(Path(config.run).expanduser()):
        return config
    if not place.is_dir() or not holds_adapters(place):
        raise ConfigError(f"{key} = {named}: there is no folder with the adapters of peft ({CONFIG})")
    found = AdapterFolder.read(place)
    base = m.hf if m.hf and is_base else found.base
    if not base or not Path(base).expanduser().is_dir():
        raise ConfigError(_absent(found, base, flag or f"--model.hf=BASE --model.adapter={named}"))
    if config.adapters not in (None, found.adapters):
        others = to_dict(found.adapters)
        keys = [
            f"adapters.{name} = {value} (there {others[name]})"
            for name, value in to_dict(config.adapters).items()
            if value != others[name]
        ]
        raise ConfigError(
            f"{key} = {named} holds adapters of a shape of their own, and the config asks for another:"
            f" {', '.join(keys)}. Leave [adapters] out"
        )
    _check_4_bits(config, found, key)
    tokenizer = config.data.tokenizer
    if tokenizer == "auto" and (place / "tokenizer.json").is_file():
        tokenizer = named
    return replace(
        config,
        model=replace(m, hf=base, adapter=named),
        adapters=found.adapters,
        data=replace(config.data, tokenizer=tokenizer),
    )


def _absent(found: AdapterFolder, base: str, flag: str) -> str:
    if not base:
        return f"{found.folder} holds adapters, and {CONFIG} names no base: give its folder with {flag}"
    get = ""
    if base == found.base and base.count("/") == 1:
        get = f" (to fetch it: hf download {base} --local-dir BASE)"
        if found.revision:
            get = f" (to fetch it: hf download {base} --revision {found.revision} --local-dir BASE)"
    return (
        f"{found.folder} holds adapters, and the base {base} that they stand beside is no folder on this"
        f" machine: give it with {flag}{get}"
    )


def _check_4_bits(config: Config, found: AdapterFolder, key: str) -> None:
    """Refuse another base than the one in 4 bits beside which adapters were trained."""
    t, rounded = config.techniques, found.rounded_in
    master = (
        "float32" if t.precision.master == "auto" else canonical_dtype(t.precision.master, where="precision.master")
    )
    if rounded and (t.quantize_frozen != "nf4" or master != rounded):
        other = f" --techniques.precision.master={rounded}" if master != rounded else ""
        raise ConfigError(
            f"{key} = {found.folder}: these adapters were trained beside a base in 4 bits (nf4, rounded in {rounded}),"
            f" and beside another one they compute something else. Add --techniques.quantize_frozen=nf4{other}"
        )
