"""Collect the facts about a model in a frozen value, ``ModelFacts``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from torch import nn

from meshwright.core.dtypes import FLOATING, count_text
from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.core.host import without_collector
from meshwright.core.names import LENGTHS, around, clean, is_within, owner, pattern, under
from meshwright.core.record import values_of
from meshwright.core.torch_private import is_persistent
from meshwright.introspection.adapter_request import Adapters
from meshwright.introspection.blocks import Hints, attention_modules, repeated_blocks
from meshwright.introspection.images import ImageArguments
from meshwright.introspection.measurements import Measurements, measurements_of, stated
from meshwright.introspection.premises.premises import hooks_of
from meshwright.introspection.roles import hidden_matrices
from meshwright.introspection.source import as_module, with_adapters
from meshwright.introspection.structure.experts import asks_for_router_loss, find_stacks
from meshwright.introspection.structure.structure import legal_degrees
from meshwright.models.layers import Router

Value = TypeVar("Value")


@dataclass(frozen=True)
class ParameterFact:
    """One distinct parameter.

    Attributes:
        aliases: its other names (ties).
        hidden: whether it is a matrix inside the blocks, or a stack of them (``roles.hidden_matrices``).
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

    ``balances``: its bias follows its experts' load. ``sums_batches``: one of its losses needs sums over all ranks'
    microbatches; ``counts_sequences``: one is about each sequence by itself. ``capacity_factor``: 0: no token is
    dropped.
    """

    path: str
    experts: int
    balances: bool
    sums_batches: bool
    counts_sequences: bool
    capacity_factor: float


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
    module: nn.Module = field(repr=False, compare=False, kw_only=True)
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
    def capacity_factor(self) -> float:
        """The factor of experts' capacity in meshwright's own mixtures; 0: they drop no token."""
        return next((router.capacity_factor for router in self.routers if router.capacity_factor), 0)

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
        if unit and unit not in self._of_units:
            return tuple(p for p in self.parameters if is_within(p.name, unit))
        return tuple(self._of_units[unit])

    @cached_property
    def _of_units(self) -> dict[str, list[ParameterFact]]:
        found: dict[str, list[ParameterFact]] = {unit: [] for unit in ("", *self.blocks)}
        for p in self.parameters:
            for unit in [path for path in around(p.name) if path in found] or [""]:
                found[unit].append(p)
        return found


@without_collector()
def model_facts(model: nn.Module) -> ModelFacts:
    """Read the facts off a module (best on meta, where only the walk costs time)."""
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
    outside = [m for n, m in model.named_modules() if set(blocks).isdisjoint(around(clean(n)))]
    heads = [m.out_features for m in outside if isinstance(m, nn.Linear)]
    return ModelFacts(
        kind=type(model).__name__,
        parameters=parameters,
        buffers=tuple(
            BufferFact(under(clean(path), name), tuple(buffer.shape), _dtype(buffer), is_persistent(module, name))
            for path, module in model.named_modules()
            for name, buffer in module.named_buffers(recurse=False)
        ),
        blocks=blocks,
        attentions=attention_modules(model, blocks),
        max_seq_len=stated(model, *LENGTHS),
        vocab_size=token_ids,
        label_ids=token_ids if token_ids is None or stated(model, "vocab_size") else max(token_ids, *heads, 0),
        has_experts=bool(find_stacks(model)),
        routers=tuple(
            RouterFact(
                clean(name),
                m.config.n_experts,
                m.bias is not None,
                m.config.batch_loss > 0,
                m.config.sequence_loss > 0,
                m.config.capacity_factor,
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


def _dtype(tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# --- describe facts about a model as text for people


def describe_model(facts: ModelFacts) -> str:
    """Describe parameters by name pattern, ties, blocks, attention and limits."""
    lines = [f"{facts.kind}: {facts.numel:,} parameters ({count_text(facts.numel)})"]
    limits = {"longest sequence": facts.max_seq_len, "vocabulary": facts.vocab_size}
    lines += [f"  {name}: {value:,}" for name, value in limits.items() if value]
    lines.append(f"  repeated blocks: {_patterns(facts.blocks)}")
    lines.append(f"  attention: {_patterns(facts.attentions)}")
    lines += [f"  tied: {p.name} = {', '.join(p.aliases)}" for p in facts.parameters if p.aliases]
    groups: dict[tuple, list[ParameterFact]] = {}
    for p in facts.parameters:
        groups.setdefault((pattern(p.name), p.shape, p.dtype), []).append(p)
    width = max(len(name) for name, _, _ in groups)
    for (name, shape, dtype), found in groups.items():
        lines.append(f"    {name:<{width}}  {len(found):>3} × {'×'.join(map(str, shape)) or 'scalar':<14} {dtype}")
    return "\n".join(lines)


def describe_structure(facts: ModelFacts) -> str:
    """Describe the weights' roles and cuts, measured on a small copy, or the reason why measuring them fails."""
    try:
        structure = facts.measurements.structure(1).structure
    except UnsupportedError as error:
        return f"tensor parallelism: {error}"
    legal = legal_degrees(structure)
    lines = [f"tensor parallelism: up to {legal[-1]} ranks (legal: {', '.join(map(str, legal))})"]
    for kind in structure.kinds:
        lines.append(f"  {pattern(kind.blocks[0])} ({len(kind.blocks)})")
        for region in kind.regions:
            is_attention = region.kind == "attention"
            what = "heads" if is_attention else "hidden features"
            fewer = f" ({region.joint} of keys and values)" if is_attention and region.joint < region.groups else ""
            lines.append(f"    {region.kind.replace('_', '-')}: {region.groups:,} {what}{fewer}")
            for path, role in region.roles:
                cut = region.cut_of(f"{path}.weight")
                how = f"{' + '.join(f'{part.size}' for part in cut.parts)} along dim {cut.dim}" if cut else "whole"
                lines.append(f"      {role:<16} {path} ({how})")
            lines += [f"      {'norm of all':<16} {path}" for path in region.spanning]
            lines += [f"      {'shared':<16} {name}" for name in region.shared if owner(name) not in region.latent]
        if not kind.regions:
            lines.append("    no layers were found whose features fall into groups")
        if kind.mixes_outside:
            lines.append("    tokens meet outside these layers, so the sequence stays whole")
        gathers = (tuple(path for paths in kind.gathers for path in paths),) if kind.norms else kind.gathers
        before = f" (before {', '.join(kind.norms)})" if kind.norms else ""
        lines += [f"    one gather{before}: {', '.join(paths)}" for paths in gathers if len(paths) > 1]
        lines += [f"    reduced together: {', '.join(kind.summed)}"] if kind.summed else []
    lines.append(f"  embedding: {structure.embedding or 'not recognised'}; head: {structure.head or 'not recognised'}")
    if structure.tail.obstacle or structure.tail.steps:
        lines.append(f"  behind the head: {structure.tail.obstacle or ', '.join(structure.tail.steps)}")
    return "\n".join(lines)


def describe_premises(facts: ModelFacts) -> str:
    """Describe hooks, and effects of a forward besides giving each row's tokens their logits; one line each."""
    seen = facts.measurements.premises()
    if seen.unknown:
        return f"forward: could not be rehearsed ({seen.unknown})"
    lines = [
        ("rows depend on each other", seen.mixes_rows),
        ("decides by the values of a whole batch", seen.decides_by_batch),
        ("writes parameters", _names(w.name for w in seen.parameters)),
        ("writes buffers, by what its rows are", _names(w.name for w in seen.buffers if w.by_data)),
        ("writes buffers, whatever its rows are", _names(w.name for w in seen.buffers if not w.by_data)),
        ("later calls compute otherwise", _names(seen.changes)),
        ("an earlier batch changes a later one's results", "by state that is no buffer" if seen.remembers else ""),
        ("only some rows use", _names(seen.conditional)),
        ("no row that was tried uses", _names(seen.unused)),
        ("sparse gradients", _names(seen.sparse)),
        ("a loss of its own in the output", _names(seen.losses)),
        ("hooks on parameters", _names(hook.parameter for hook in hooks_of(facts.module))),
    ]
    found = [f"  {what}: {names}" for what, names in lines if names]
    return "\n".join(["forward, observed on a small copy:", *(found or ["  a function of the weights and each row"])])


def _names(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(pattern(name) for name in names))


def _patterns(names: tuple[str, ...]) -> str:
    counts: dict[str, int] = {}
    for name in names:
        counts[pattern(name)] = counts.get(pattern(name), 0) + 1
    return ", ".join(f"{name} ({count})" for name, count in counts.items()) or "none found"


# --- read facts about a model with the adapters that are requested for it


def facts_with(model: Any, adapters: Adapters | None, hints: Hints | None = None) -> ModelFacts:
    """Return facts about a model, or given ones, with its adapters; the model itself is not changed.

    Adapters for a module that is built already, or for facts, are refused.
    """
    if not isinstance(model, ModelFacts):
        return model_facts(as_module(with_adapters(model, adapters, in_place=False), hints=hints))
    if adapters is not None:
        raise ConfigError("techniques.adapters change the model, and facts about it are given: give the model")
    return model
