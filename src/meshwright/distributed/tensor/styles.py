"""Provide ParallelStyle objects for the styles of tensor-parallel plans, and read plans that users give.

The styles act on modules one by one and without sequence parallelism: a module's inputs and outputs are whole or one
rank's features, by its style. Cutting a whole model by regions is better (``apply_tensor_parallel``), since regions say
which modules belong together.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
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
from meshwright.core.parts import FusedPart, take
from meshwright.core.record import wrap
from meshwright.distributed.exchange import ProcessGroupRanks
from meshwright.distributed.weights.parts_tensor import distribute
from meshwright.distributed.weights.shards import placement_of_cut
from meshwright.planning.techniques import TensorStyleRequest
from meshwright.planning.tensor.plan import ROW
from meshwright.planning.tensor.styles import STYLES, unknown_style

from . import ends, functions, layers
from .functions import TokenSequence
from .layers import LocalView, Runtime, use_local_parameters


class Style(ParallelStyle):
    """A style by its name in plans; ``parts``: equal ones side by side in the weight, each cut by itself."""

    def __init__(self, word: str):
        self.word = word
        self.kind, self.parts = STYLES[word].kind, STYLES[word].parts

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.word!r})"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        runtime = Runtime(sequence=TokenSequence(ProcessGroupRanks(device_mesh.get_group()), cut=False))
        cuts = self.prepare(module, runtime)
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and cuts is not None:
                module._parameters[name] = distribute(parameter, device_mesh, cuts.get(name, Replicate()))
        return module

    def prepare(self, module: nn.Module, runtime: Runtime) -> dict[str, Placement] | None:
        """Wrap the module, and return placements of its cut parameters (others stay whole; None: leave all)."""
        raise NotImplementedError

    def placements(self, module: nn.Module, dims: dict[str, int], ranks: int) -> dict[str, Placement]:
        """Place the parameters that have one of these names, cut along these dims."""
        return {
            name: placement_of_cut(dim, self._cut(module, name, dim, ranks), ranks)
            for name, dim in dims.items()
            if module._parameters.get(name) is not None
        }

    def _cut(self, module: nn.Module, name: str, dim: int, ranks: int) -> tuple[FusedPart, ...]:
        size = module.get_parameter(name).shape[dim]
        what = f"style '{self.word}': the {name} of this {type(module).__name__} has {size} slices along dim {dim}"
        if size < ranks:
            raise ConfigError(f"{what}, too few for {ranks} ranks. Legal here: replicate.")
        if self.parts == 1:
            return (FusedPart(size, size),)
        if size % (self.parts * ranks):
            raise ConfigError(
                f"{what}, which are no {self.parts} equal parts that {ranks} ranks can share. Legal here: replicate."
            )
        return (FusedPart(size // self.parts, size // self.parts),) * self.parts

    def is_transposed(self, module: nn.Module) -> bool:
        """Return whether a linear layer's weight is stored (in, out); ConfigError for any other module."""
        if (found := is_transposed(module)) is None:
            raise self.refuse(module, "a linear layer")
        return found

    def refuse(self, module: nn.Module, needs: str) -> ConfigError:
        return ConfigError(
            f"style '{self.word}' is for {needs}, and this is a {type(module).__name__}. Legal for any module:"
            f" replicate."
        )


class ColumnStyle(Style, ColwiseParallel):
    """Column parallelism: each rank has some output features; the input is whole, and its gradient is summed.

    The output is cut; gathered for colwise_gather_output and colwise_rep. local_*: no messages, a partial gradient.
    """

    def __init__(self, word: str):
        super().__init__(word)
        ColwiseParallel.__init__(self, output_layouts=Replicate() if STYLES[word].whole_outside else Shard(-1))

    def prepare(self, module: nn.Module, runtime: Runtime) -> dict[str, Placement]:
        gathers, group = STYLES[self.word].whole_outside, runtime.group
        if gathers and isinstance(module, nn.Embedding):
            return EmbeddingStyle("embedding_colwise").prepare(module, runtime)
        transposed = self.is_transposed(module)
        dim = 1 if transposed else 0
        size = module.get_parameter("weight").shape[dim]
        placements = self.placements(module, {"weight": dim, "bias": 0}, group.size)
        if STYLES[self.word].silent:
            layers.local_linear(layers.ColumnLayer(module, transposed), runtime)
        else:
            layers.SharedInput(runtime, [layers.LayersOfInput([layers.ColumnLayer(module, transposed)])])
        if gathers:
            _change_output(
                module,
                lambda output: functions.whole_vocabulary(output, size, group),
                f"output gathered over tp {group.size}",
            )
        return placements


class RowStyle(Style, RowwiseParallel):
    """Row parallelism: each rank has some input features; the output is summed, and the bias added once.

    The input is cut already; rowwise_split_input and rowwise_rep cut a whole one. local_*: a partial sum as output.
    """

    def __init__(self, word: str):
        super().__init__(word)
        RowwiseParallel.__init__(self, input_layouts=Replicate() if STYLES[word].whole_outside else Shard(-1))

    def prepare(self, module: nn.Module, runtime: Runtime) -> dict[str, Placement]:
        group = runtime.group
        if isinstance(module, nn.Embedding):
            return EmbeddingStyle("embedding_rowwise").prepare(module, runtime)
        transposed = self.is_transposed(module)
        dim = 0 if transposed else 1
        placements = self.placements(module, {"weight": dim}, group.size)
        if STYLES[self.word].silent:
            if module._parameters.get("bias") is not None:
                raise ConfigError(
                    f"style '{self.word}' returns partial sums, each of which would add this layer's bias. Legal here:"
                    f" rowwise."
                )
            layers.local_linear(layers.ColumnLayer(module, transposed, parts=ROW), runtime)
        else:
            layers.row_parallel(module, transposed, runtime)
        if STYLES[self.word].whole_outside:
            parts = self._cut(module, "weight", dim, group.size)

            forward = module.forward

            def cut_input_forward(x: Tensor) -> Any:
                return forward(take(functions.summing_gradients(x, group), -1, parts, group.rank, group.size))

            wrap(module, cut_input_forward, f"input cut over tp {group.size}")
        return placements


class EmbeddingStyle(Style):
    """Embeddings: _rowwise, each rank has some ids, and vectors are summed; _colwise, some features, gathered."""

    def prepare(self, module: nn.Module, runtime: Runtime) -> dict[str, Placement]:
        if not isinstance(module, nn.Embedding):
            raise self.refuse(module, "an embedding")
        rows, features = module.weight.shape
        by_rows = self.word == "embedding_rowwise"
        placements = self.placements(module, {"weight": 0 if by_rows else 1}, runtime.group.size)
        if by_rows:
            ends.vocabulary_embedding(module, runtime, rows, is_hidden=False)
        else:
            gathers = f"output gathered over tp {runtime.group.size}"
            _change_output(module, lambda output: functions.whole_vocabulary(output, features, runtime.group), gathers)
        use_local_parameters(module)
        return placements


class WholeStyle(Style):
    """The styles whose module stays whole on every rank.

    replicated_with_grad_allreduce and sequence_parallel: each rank uses it for its part (some heads, some tokens),
    and the gradients of its own parameters are summed. local, local_params: parameters keep their placements, and the
    forward sees this rank's parts of them.
    """

    def prepare(self, module: nn.Module, runtime: Runtime) -> dict[str, Placement] | None:
        is_summed = self.word in ("replicated_with_grad_allreduce", "sequence_parallel")
        own = tuple(name for name, parameter in module._parameters.items() if parameter is not None)
        use_local_parameters(module, LocalView.of(module, summing=own if is_summed else (), group=runtime.group))
        return None if self.word.startswith("local") else {}


class SequenceStyle(WholeStyle, SequenceParallel):
    """Sequence parallelism: the module acts on this rank's tokens."""

    def __init__(self, word: str):
        super().__init__(word)
        SequenceParallel.__init__(self, use_local_output=True)


class SumStyle(Style):
    """The style all_reduce: the module's output is a partial sum, and is summed."""

    def prepare(self, module: nn.Module, runtime: Runtime) -> None:
        def summed(output: Any) -> Any:
            if isinstance(output, Tensor):
                return functions.summed(output, runtime.group)
            return type(output)((summed(output[0]), *output[1:]))

        _change_output(module, summed, f"output summed over tp {runtime.group.size}")


class MlaStyle(Style):
    """The style mla_kv_a_proj: a whole layer with ``qk_rope_head_dim`` last features, which ranks use for own heads.

    The gradient of these features is summed; the others go through a column-parallel layer, which sums theirs.
    """

    def prepare(self, module: nn.Module, runtime: Runtime) -> dict[str, Placement]:
        config = getattr(module, "config", None)
        features = getattr(module, "qk_rope_head_dim", None) or getattr(config, "qk_rope_head_dim", None)
        if not features:
            raise ConfigError(
                f"style '{self.word}' needs qk_rope_head_dim, which neither this {type(module).__name__} nor a config"
                f" of it has: set module.qk_rope_head_dim, or use replicate"
            )

        use_local_parameters(module)
        forward = module.forward

        def latent_forward(x: Tensor) -> Tensor:
            output = forward(x)
            passed, rotated = output.split([output.shape[-1] - features, features], dim=-1)
            return torch.cat([passed, functions.summing_gradients(rotated, runtime.group)], dim=-1)

        wrap(module, latent_forward, f"gradient of rotary features summed over tp {runtime.group.size}")
        return {}


def _change_output(module: nn.Module, change: Callable[[Any], Any], words: str) -> None:
    """Wrap the module's forward so that it returns ``change`` of its output."""
    forward = module.forward

    def changed_output_forward(*args: Any, **kwargs: Any) -> Any:
        return change(forward(*args, **kwargs))

    wrap(module, changed_output_forward, words)


class ExpertsStyle(Style):
    """The styles of stacked experts, which plans may name but which cannot be applied yet."""

    def prepare(self, module: nn.Module, runtime: Runtime) -> None:
        raise UnsupportedError(
            f"style '{self.word}': experts cannot be cut in this version. Leave it out of the plan: they stay whole"
            f" on every rank."
        )


_CLASSES: dict[str, type[Style]] = {
    "column": ColumnStyle,
    "row": RowStyle,
    "embedding": EmbeddingStyle,
    "whole": WholeStyle,
    "sum": SumStyle,
    "mla": MlaStyle,
    "experts": ExpertsStyle,
}


def translate_to_torch_parallel_style(style: str | ParallelStyle) -> ParallelStyle:
    """Return the ParallelStyle of a plan's style name, usable with torch's ``parallelize_module``, or a given style.

    Styles of linear layers are also torch's ColwiseParallel and RowwiseParallel, and that of norms its
    SequenceParallel, with their layouts. Names are those of transformers (plans of the model, of 5.x and of 4.x).

    Raises:
        ConfigError (a ValueError): no such name; the text lists all.
    """
    if isinstance(style, ParallelStyle):
        return style
    if style not in STYLES:
        raise ConfigError(unknown_style(f"style {style!r}", style))
    return SequenceStyle(style) if style == "sequence_parallel" else _CLASSES[STYLES[style].kind](style)


def is_transposed(module: nn.Module) -> bool | None:
    """Test on a copy whether a linear layer's weight is stored (in, out); None for any other module."""
    weight = module._parameters.get("weight")
    if isinstance(module, nn.Linear) or weight is None or weight.dim() != 2 or isinstance(module, nn.Embedding):
        return False if isinstance(module, nn.Linear) else None
    asked = copy.deepcopy(module).to_empty(device="cpu").double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in asked.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator))
        bias = asked._parameters.get("bias")
        for transposed in (False, True):
            matrix = asked.get_parameter("weight").T if transposed else asked.get_parameter("weight")
            x = torch.randn((2, matrix.shape[1]), dtype=matrix.dtype, generator=generator)
            try:
                found = asked(x)
            except Exception:  # noqa: BLE001  (its code may raise anything if the sizes do not fit)
                continue
            expected = nn.functional.linear(x, matrix, bias)
            if isinstance(found, Tensor) and found.shape == expected.shape and torch.allclose(found, expected):
                return transposed
    return None


# --- read plans that users pass to a function, torch's own styles among them, as rows of style names


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
