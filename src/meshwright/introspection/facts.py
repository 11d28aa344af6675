"""Collect the facts about a model in a frozen value, ``ModelFacts``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import nn

from meshwright.core.dtypes import FLOATING
from meshwright.core.errors import ConfigError
from meshwright.core.names import clean, is_within
from meshwright.core.record import values_of
from meshwright.core.torch_private import is_persistent
from meshwright.models.moe import Router

from .blocks import attention_modules, repeated_blocks
from .images.arguments import ImageArguments
from .measurements import Measurements, measurements_of, stated
from .roles.hidden import hidden_matrices
from .structure.experts import find_stacks
from .structure.router_loss import asks_for_router_loss

Value = TypeVar("Value")


@dataclass(frozen=True)
class ParameterFact:
    """One distinct parameter.

    Attributes:
        aliases: its other names (ties).
        hidden: whether it is a matrix inside the blocks, or a stack of them (``roles.hidden``).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    aliases: tuple[str, ...] = ()
    hidden: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class BufferFact:
    name: str
    shape: tuple[int, ...]
    dtype: str
    persistent: bool


@dataclass(frozen=True)
class RouterFact:
    """A router of meshwright's own mixture of experts.

    ``balances``: its bias follows its experts' load. ``sums_sequences``: its losses need sums over whole sequences;
    ``sums_batches``: over all ranks' microbatches; ``counts_sequences``: one of them is about each sequence by itself.
    """

    path: str
    experts: int
    balances: bool
    sums_sequences: bool
    sums_batches: bool = False
    counts_sequences: bool = False


@dataclass(frozen=True)
class ModelFacts:
    """The facts about one model, with global names: free of wrapper prefixes.

    Attributes:
        kind: class name of the model, for people.
        parameters: distinct parameters in registration order.
        buffers: all buffers.
        blocks: paths of the repeated blocks that can be units of their own, in forward order.
        attentions: paths of the attention modules inside those blocks.
        max_seq_len: longest sequence that the model takes, where its config states one.
        vocab_size: number of token ids that the model takes: as its config states, or as its embedding has rows.
        on_meta: whether the weights do not exist yet.
    """

    kind: str
    parameters: tuple[ParameterFact, ...]
    buffers: tuple[BufferFact, ...]
    blocks: tuple[str, ...]
    attentions: tuple[str, ...]
    max_seq_len: int | None = None
    vocab_size: int | None = None
    label_ids: int | None = None
    """Number of ids that a label can be: those of tokens, or more where a layer outside the blocks has more rows."""
    has_experts: bool = False
    """Whether some module inside the model's blocks looks like a stack of experts."""
    routers: tuple[RouterFact, ...] = ()
    """Routers of meshwright's own mixtures of experts."""
    asks_for_router_loss: bool = False
    """Whether the model is one of transformers whose config includes its routers' loss in its own loss."""
    on_meta: bool = False
    module: nn.Module | None = field(default=None, repr=False, compare=False)
    """The model itself, for measurements that run on request."""
    measurements: Measurements = field(default_factory=Measurements, repr=False, compare=False)
    """Answers found by running small copies of the model."""
    applied: Mapping[type, Any] = field(default_factory=dict, repr=False, compare=False)
    """Plans by which the model is laid out already, by type."""

    def applied_plan(self, kind: type[Value]) -> Value | None:
        """Return the plan of this type by which the model is laid out already."""
        return self.applied.get(kind)

    @property
    def numel(self) -> int:
        return sum(p.numel for p in self.parameters)

    @property
    def floating(self) -> dict[str, int]:
        """The floating dtypes of the parameters, with the number of elements of each."""
        found: dict[str, int] = {}
        for p in self.parameters:
            if p.dtype in FLOATING:
                found[p.dtype] = found.get(p.dtype, 0) + p.numel
        return found

    @property
    def balances_microbatches(self) -> bool:
        """Whether a loss depends on all tokens of a microbatch together."""
        return any(router.sums_batches for router in self.routers) or self.measurements.router_loss() is not None

    @property
    def images(self) -> ImageArguments | None:
        """How the model takes images beside tokens; None if it takes none."""
        return self.measurements.images()

    def is_of_images(self, name: str) -> bool:
        """Return whether a module or parameter is one that batches without images do not use."""
        return any(is_within(name, module) for module in self.measurements.image_modules())

    @property
    def token_blocks(self) -> tuple[str, ...]:
        """Paths of the repeated blocks that every token goes through: those of a vision tower are not among them."""
        return tuple(block for block in self.blocks if not self.is_of_images(block))

    def of_unit(self, unit: str) -> tuple[ParameterFact, ...]:
        """Return the parameters of a block, or (``unit`` = "") those outside every block."""
        if unit:
            return tuple(p for p in self.parameters if is_within(p.name, unit))
        return tuple(p for p in self.parameters if not any(is_within(p.name, block) for block in self.blocks))


def model_facts(model: nn.Module) -> ModelFacts:
    """Read the facts off a module (best on meta, where only the walk costs time).

    Raises:
        ConfigError: the model has no parameters.
    """
    names: dict[int, list[str]] = {}
    tensors = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(clean(name))
        tensors[id(parameter)] = parameter
    if not tensors:
        raise ConfigError(
            f"the model {type(model).__name__} has no parameters: there is nothing to train or to lay out"
        )
    hidden = hidden_matrices(model)
    parameters = tuple(
        ParameterFact(
            found[0],
            tuple(tensors[key].shape),
            _dtype(tensors[key]),
            tensors[key].requires_grad,
            tuple(found[1:]),
            found[0] in hidden,
        )
        for key, found in names.items()
    )
    blocks = repeated_blocks(model)
    token_ids = measurements_of(model).token_ids()
    outside = [m for n, m in model.named_modules() if not any(is_within(clean(n), block) for block in blocks)]
    heads = [m.out_features for m in outside if isinstance(m, nn.Linear)]
    return ModelFacts(
        kind=type(model).__name__,
        parameters=parameters,
        buffers=tuple(_buffer_facts(model)),
        blocks=blocks,
        attentions=attention_modules(model, blocks),
        max_seq_len=stated(model, "max_seq_len", "max_position_embeddings", "n_positions"),
        vocab_size=token_ids,
        label_ids=token_ids if token_ids is None or stated(model, "vocab_size") else max(token_ids, *heads, 0),
        has_experts=bool(find_stacks(model)),
        routers=tuple(
            RouterFact(
                clean(name),
                m.config.n_experts,
                m.bias is not None,
                m.config.sequence_loss > 0 or m.config.batch_loss > 0,
                m.config.batch_loss > 0,
                m.config.sequence_loss > 0,
            )
            for name, m in model.named_modules()
            if isinstance(m, Router)
        ),
        asks_for_router_loss=asks_for_router_loss(model),
        on_meta=any(t.is_meta for t in tensors.values()),
        module=model,
        measurements=measurements_of(model),
        applied=values_of(model),
    )


def _buffer_facts(model: nn.Module):
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            full = clean(f"{path}.{name}" if path else name)
            yield BufferFact(full, tuple(buffer.shape), _dtype(buffer), is_persistent(module, name))


def _dtype(tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
