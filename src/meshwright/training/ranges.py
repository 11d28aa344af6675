"""Check the legal range of every value of the config tree.

Rules about the model or the mesh are in planning.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from meshwright.core.config import from_dict, is_unset, to_dict
from meshwright.core.dtypes import canonical_dtype
from meshwright.core.errors import ConfigError, nearest
from meshwright.introspection.adapted.request import RANGES as ADAPTERS
from meshwright.models.decoder_config import SIZES
from meshwright.planning.optimizer.kinds import KINDS, kind_of

from .optim.fine_tuning import length_follows
from .profiling.windows import read_window

Range = tuple[str, Callable[[Any], bool]]
"""A description of the range, and the test whether a value lies in it."""

# Written so that a nan, which compares false with everything, is out of every range.
_ABOVE_0: Range = ("a finite number above 0", lambda value: 0 < value < math.inf)
_FROM_0: Range = ("a finite number, 0 or more", lambda value: 0 <= value < math.inf)
_FROM_1: Range = ("1 or more", lambda value: value >= 1)
_BELOW_1: Range = ("0 or more and below 1", lambda value: 0 <= value < 1)
_BETWEEN: Range = ("above 0 and below 1", lambda value: 0 < value < 1)
_SHARE: Range = ("from 0 to 1", lambda value: 0 <= value <= 1)
_SEED: Range = ("from 0 to 2**63 - 1", lambda value: 0 <= value < 2**63)
_TEXT: Range = ("not empty", lambda value: len(value) > 0)
_NAME: Range = (
    "letters, digits, '.', '_' and '-', beginning with a letter or digit",
    lambda value: re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value) is not None,
)

RANGES: dict[str, Range] = {
    "name": _NAME,
    "out": _TEXT,
    "seed": _SEED,
    "steps": _FROM_1,
    "epochs": _ABOVE_0,
    "model.vocab_size": _FROM_1,
    "model.dim": _FROM_1,
    "model.n_layers": _FROM_1,
    "model.n_heads": _FROM_1,
    "model.n_kv_heads": _FROM_1,
    "model.hidden_dim": _FROM_1,
    "model.max_seq_len": _FROM_1,
    "model.rope_theta": _ABOVE_0,
    "model.rope_scaling.factor": _ABOVE_0,
    "model.rope_scaling.low_freq_factor": _ABOVE_0,
    "model.rope_scaling.high_freq_factor": _ABOVE_0,
    "model.rope_scaling.original_max_seq_len": _FROM_1,
    "model.moe.n_experts": _FROM_1,
    "model.moe.top_k": _FROM_1,
    "model.moe.hidden_dim": _FROM_0,
    "model.moe.n_shared": _FROM_0,
    "model.moe.first_dense": _FROM_0,
    "model.moe.router": _TEXT,
    "model.moe.n_groups": _FROM_1,
    "model.moe.top_groups": _FROM_1,
    "model.moe.scale": _ABOVE_0,
    "model.moe.bias_rate": _FROM_0,
    "model.moe.sequence_loss": _FROM_0,
    "model.moe.batch_loss": _FROM_0,
    "model.moe.z_loss": _FROM_0,
    "model.moe.capacity_factor": _FROM_0,
    **{f"adapters.{key}": legal for key, legal in ADAPTERS.items()},
    "data.source": _TEXT,
    "data.source[]": _TEXT,
    "data.column": _TEXT,
    "data.max_epochs": _FROM_0,
    "data.mixture[].source": _TEXT,
    "data.mixture[].source[]": _TEXT,
    "data.mixture[].column": _TEXT,
    "data.mixture[].max_epochs": _FROM_0,
    "data.mixture[].weight": _FROM_0,
    "data.curriculum[].from_step": _FROM_0,
    "data.curriculum[].weights": _TEXT,
    "data.curriculum[].weights[]": _FROM_0,
    "data.tokenizer": _TEXT,
    "data.seq_len": _FROM_1,
    "data.validation_fraction": _BELOW_1,
    "data.workers": _FROM_0,
    "batch.global_batch": _FROM_1,
    "batch.microbatch": _FROM_0,
    "techniques.checkpoint_every": _FROM_1,
    "techniques.checkpoint_keep_every": _FROM_1,
    "techniques.activation_memory_budget": _BETWEEN,
    "techniques.loss_chunks": _FROM_1,
    "techniques.layers_per_stage": _FROM_0,
    "techniques.precision.loss_scale": _ABOVE_0,
    "dpo.beta": _ABOVE_0,
    "dpo.label_smoothing": ("0 or more and below 0.5", lambda value: 0 <= value < 0.5),
    "optimizer.lr": _ABOVE_0,
    "optimizer.beta1": _BELOW_1,
    "optimizer.beta2": _BELOW_1,
    "optimizer.eps": _ABOVE_0,
    "optimizer.weight_decay": _FROM_0,
    "optimizer.max_norm": _FROM_0,
    "optimizer.max_skipped_steps": _FROM_0,
    "optimizer.max_loss_deviation": _FROM_0,
    "optimizer.loss_window": ("4 or more", lambda value: value >= 4),
    "optimizer.overrides[].lr_scale": _ABOVE_0,
    "optimizer.overrides[].weight_decay": _FROM_0,
    "schedule.warmup_steps": _FROM_0,
    "schedule.tokens": _FROM_1,
    "schedule.warmup_tokens": _FROM_0,
    "schedule.final_ratio": _SHARE,
    "schedule.decay_fraction": _SHARE,
    "validation.every": _FROM_0,
    "validation.samples": _FROM_1,
    "checkpoint.every": _FROM_0,
    "checkpoint.keep_last": _FROM_0,
    "logging.every": _FROM_1,
    "process.count": _FROM_0,
    "process.backend": _TEXT,
    "process.startup_timeout_sec": _FROM_1,
    "process.step_timeout_sec": _FROM_1,
    "process.max_restarts": _FROM_0,
    "sample.prompt": _TEXT,
    "sample.tokens": _FROM_0,
    "sample.temperature": _FROM_0,
}
PATTERNS = ("techniques.freeze[]", "techniques.float8_filter[]", "optimizer.overrides[].pattern")
DTYPES = {
    "techniques.precision.master": ("auto",),
    "techniques.precision.compute": ("auto",),
    "techniques.precision.reduce": ("auto",),
    "techniques.precision.output": (),
}
"""Keys of dtypes, and the values that they take besides dtypes."""


def check_values(config: Any) -> None:
    """Check types, ranges, patterns and dtype names of a config tree.

    Raises:
        ConfigError: a bad value; the message names the dotted key, the value and the legal range.
    """
    typed = from_dict(type(config), to_dict(config))
    check_ranges(typed, RANGES)
    for pattern in PATTERNS:
        for key, value in _values(typed, pattern):
            _check_pattern(key, value)
    for name, words in DTYPES.items():
        for key, value in _values(typed, name):
            if value not in words:
                canonical_dtype(value, where=key)
    if config.epochs is not None and not is_unset(config.steps):
        raise ConfigError(
            f"steps = {config.steps} and epochs = {config.epochs:g} are both given: either says how long the run is, so"
            f" leave one out"
        )
    if not length_follows(config):
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


def check_ranges(config: Any, ranges: Mapping[str, Range]) -> None:
    """Check the values that a table names against its ranges. Raises ConfigError."""
    for pattern, (words, is_legal) in ranges.items():
        for key, value in _values(config, pattern):
            if not is_legal(value):
                raise ConfigError(f"{key} = {value!r} is out of range: it must be {words}.")


def _values(node: Any, pattern: str, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every (dotted key, value) that matches a pattern like ``optimizer.overrides[].lr_scale``.

    None is skipped.
    """
    if node is None:
        return
    if not pattern:
        yield path, node
    elif pattern.startswith("[]"):
        for i, item in enumerate(node):
            yield from _values(item, pattern[2:].removeprefix("."), f"{path}[{i}]")
    else:
        end = next((i for i, char in enumerate(pattern) if char in ".["), len(pattern))
        name, rest = pattern[:end], pattern[end:].removeprefix(".")
        yield from _values(getattr(node, name), rest, f"{path}.{name}" if path else name)


def _check_pattern(key: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{key} = {pattern!r} is no regular expression: {error}") from None


def _check_model(model: Any) -> None:
    if model.hf:
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
    if not config.model.hf:
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
        if key not in ("hf", "trust_remote_code") and value != getattr(default, key)
    ]
    if other:
        raise ConfigError(
            f"{', '.join(other)} and model.hf are both given: the sizes of a Hugging Face model are read from its"
            f" config.json. Leave out {', '.join(other)}, or change a copy of that file and give it as model.hf"
        )
