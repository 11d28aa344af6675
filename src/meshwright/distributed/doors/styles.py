"""Read tensor plans that users pass to a function, torch's own styles among them, as rows of style names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.core.names import clean, selected
from meshwright.distributed.tensor.styles import Style, translate_to_torch_parallel_style
from meshwright.distributed.tensor.styles import is_transposed as is_transposed
from meshwright.planning.techniques import TensorStyleRequest
from meshwright.planning.tensor.styles import STYLES


def requested_of(plan: Mapping[str, str | ParallelStyle] | None, model: nn.Module) -> tuple[TensorStyleRequest, ...]:
    """Translate a plan passed to a function (``tp_shard_plan``) to rows; raise ConfigError for an empty one.

    A layer with adapters goes by its own path, as in models of transformers, or by that of the layer inside.
    """
    if plan is not None and not plan:
        raise ConfigError(
            "tp_shard_plan = {} names nothing that is cut: give None (it is measured), or a mesh with tp = 1"
        )
    paths = {clean(name) for name, _ in model.named_modules()}
    rows = []
    for pattern, style in (plan or {}).items():
        word, named = word_of(style, f"tp_shard_plan['{pattern}']"), selected(pattern, paths)
        adapted = {path: f"{path}{HOST}" for path in named if f"{path}{HOST}" in paths}
        rows += (
            [TensorStyleRequest(adapted.get(path, path), word) for path in sorted(named)]
            if adapted
            else [TensorStyleRequest(pattern, word)]
        )
    return tuple(rows)


HOST = ".base_layer"
"""Suffix of the layer beside adapters in adapter libraries."""


def word_of(style: str | ParallelStyle, where: str) -> str:
    """Name a style, torch's own ones too.

    Raises:
        ConfigError: a name of no style.
        UnsupportedError: an object whose behaviour cannot be read off it.
    """
    if isinstance(style, Style):
        return style.word
    if isinstance(style, str):
        return translate_to_torch_parallel_style(style).word  # type: ignore[attr-defined]
    whole, features, tokens = Replicate(), Shard(-1), Shard(1)
    if type(style) is ColwiseParallel:
        _check_layouts(style, where, reads=(whole, tokens), gives=(whole, features))
        return "colwise_gather_output" if style.output_layouts == (whole,) else "colwise"
    if type(style) is RowwiseParallel:
        _check_layouts(style, where, reads=(whole, features), gives=(whole, tokens))
        return "rowwise_split_input" if style.input_layouts == (whole,) else "rowwise"
    if type(style) is SequenceParallel:
        return "sequence_parallel"
    if isinstance(style, PrepareModuleInput | PrepareModuleOutput | PrepareModuleInputOutput):
        raise UnsupportedError(
            f"{where}: a {type(style).__name__} says how activations lie between modules, which is arranged here as the"
            f" layers need it, cut along the sequence between blocks. Leave the pattern out"
        )
    raise UnsupportedError(
        f"{where}: the behaviour of a {type(style).__name__} cannot be read off the object. Give one of"
        f" {', '.join(STYLES)}, or leave the pattern out and apply this style yourself with torch's parallelize_module"
    )


def _check_layouts(style: Any, where: str, reads: tuple[Placement, ...], gives: tuple[Placement, ...]) -> None:
    """Refuse layouts of torch's styles without a style name; whole or cut by tokens are both up to the engine."""
    for name, legal in (("input_layouts", reads), ("output_layouts", gives)):
        if (layout := getattr(style, name)[0]) not in legal:
            raise UnsupportedError(
                f"{where}: a {type(style).__name__} with {name} = {layout}. Legal here: {' or '.join(map(str, legal))};"
                f" or leave the pattern out and apply this style yourself with torch's parallelize_module"
            )
