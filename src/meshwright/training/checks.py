"""Check the values of the config tree, each and together.

Ranges stand at the fields; rules about the model or the mesh are in planning.
"""

from __future__ import annotations

from typing import Any

from meshwright.core.config import from_dict, is_unset, to_dict
from meshwright.core.config.ranges import check_ranges
from meshwright.core.errors import ConfigError, nearest
from meshwright.models.decoder_config import SIZES
from meshwright.planning.optimizer import KINDS, kind_of

from .profiling.windows import read_window


def check_values(config: Any) -> None:
    """Check types, ranges, patterns and dtype names of a config tree.

    Raises:
        ConfigError: a bad value; the message names the dotted key, the value and the legal range.
    """
    typed = from_dict(type(config), to_dict(config))
    check_ranges(typed)
    if config.epochs is not None and not is_unset(config.steps):
        raise ConfigError(
            f"steps = {config.steps} and epochs = {config.epochs:g} are both given: either says how long the run is, so"
            f" leave one out"
        )
    if config.epochs is None and not (
        is_unset(config.steps) and (config.model.hf or config.model.adapter)
    ):  # else the data says how many steps
        for key in ("profile", "memory_snapshot"):
            read_window(f"logging.{key}", getattr(typed.logging, key), typed.steps)
    _check_model(typed.model)
    _check_adapters(typed)
    _check_optimizer(typed)
    _check_schedule(typed.schedule)
    if typed != config:
        raise ConfigError(
            "a section of this config is a plain dict, or one of its tuples is a list; build it with"
            " Config.from_dict(...)"
        )


def _check_model(model: Any) -> None:
    if model.hf or model.adapter:
        _check_hf(model)
    elif model.trust_remote_code:
        raise ConfigError(
            "model.trust_remote_code = true, and model.hf names no model whose code could be run: set model.hf, or"
            " leave it out"
        )
    if model.size not in SIZES:
        raise ConfigError(
            f"model.size = {model.size!r} is not a built-in size.{nearest(model.size, SIZES)} Sizes:"
            f" {', '.join(SIZES)}."
        )
    scaling = model.rope_scaling
    if scaling is not None and scaling.high_freq_factor <= scaling.low_freq_factor:
        raise ConfigError(
            f"model.rope_scaling.high_freq_factor = {scaling.high_freq_factor} is out of range: it must be above"
            f" model.rope_scaling.low_freq_factor = {scaling.low_freq_factor}."
        )


def _check_adapters(config: Any) -> None:
    if config.adapters is None:
        return
    if not (config.model.hf or config.model.adapter):
        raise ConfigError(
            f"[adapters] are trained beside a model that has been trained before, and model.size = {config.model.size}"
            f" begins with random weights: set model.hf to the folder of a model, or leave [adapters] out"
        )


def _check_optimizer(config: Any) -> None:
    """Refuse a value that the chosen optimizer does not use."""
    word, settings = config.optimizer.kind, config.optimizer
    row, default = kind_of(word), type(settings)()
    for key in dict.fromkeys(key for other in KINDS.values() for key in other.keys):
        if key not in row.keys and getattr(settings, key) != getattr(default, key):
            raise ConfigError(
                f"optimizer.{key} = {getattr(settings, key)} and optimizer.kind = {word}, which does not use it:"
                f" it takes {', '.join(('lr', *row.keys))}. Leave optimizer.{key} out, or choose another optimizer."
            )
    if row.averages and config.schedule.kind != "constant":
        raise ConfigError(
            f"schedule.kind = {config.schedule.kind} and optimizer.kind = {word}: its average of all steps takes"
            f" the place of a falling rate. Set schedule.kind = constant (schedule.warmup_steps stays), or"
            f" optimizer.kind = adamw."
        )
    if row.averages and not settings.beta1:
        raise ConfigError(
            f"optimizer.beta1 = {settings.beta1} and optimizer.kind = {word}: beta1 is the weight of the average"
            f" in the point of training, above 0 and below 1. Set optimizer.beta1 = 0.9."
        )


def _check_schedule(schedule: Any) -> None:
    """Refuse lengths in two units."""
    if schedule.tokens is not None and schedule.warmup_steps is not None:
        raise ConfigError(
            f"schedule.tokens = {schedule.tokens} and schedule.warmup_steps = {schedule.warmup_steps}: the rate follows"
            f" tokens, and so does its warm-up. Set schedule.warmup_tokens instead."
        )
    if schedule.tokens is None and schedule.warmup_tokens is not None:
        raise ConfigError(
            f"schedule.warmup_tokens = {schedule.warmup_tokens}, and the rate follows steps. Set schedule.tokens to the"
            f" tokens of the whole schedule, or schedule.warmup_steps instead."
        )


def _check_hf(model: Any) -> None:
    default = type(model)()
    other = [
        f"model.{key}"
        for key, value in vars(model).items()
        if key not in ("hf", "adapter", "trust_remote_code") and value != getattr(default, key)
    ]
    if other:
        raise ConfigError(
            f"{', '.join(other)} and model.hf are both given: the sizes of a Hugging Face model are read from its"
            f" config.json. Leave out {', '.join(other)}, or change a copy of that file and give it as model.hf"
        )
