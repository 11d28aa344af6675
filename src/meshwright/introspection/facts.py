"""ModelFacts: what a model is made of, as a frozen value."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.core.names import clean, is_within
from meshwright.core.torch_private import is_persistent
from meshwright.models.moe import Router

from .blocks import attention_modules, repeated_blocks
from .constructor.recording import seeded
from .premises import premises
from .premises.hooks import lies_on_mesh
from .premises.premises import Premises
from .signature import Signature
from .structure import Measured, measured
from .structure.experts import Stack, find_stacks, measure_stacks
from .structure.router_loss import RouterLoss, asks_for_router_loss, measure_router_loss

CUT_BY = "_meshwright_tensor_plan"
"""Under this name a model that was cut for tensor parallelism remembers the plan."""
ROUNDED_BY = "_meshwright_float8_plan"
"""Under this name a model whose linear layers were converted to float8 remembers the plan."""
SHARED_OUT_BY = "_meshwright_expert_plan"
"""Under this name a model whose experts were shared out remembers the plan."""


@dataclass(frozen=True)
class ParameterFact:
    """One distinct parameter; ``aliases`` are its other names (ties)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    aliases: tuple[str, ...] = ()

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
    """A router of ours. ``balances``: its bias follows its experts' load. ``sums_sequences``: its losses need sums over whole sequences;
    ``sums_batches``: over all ranks' microbatches."""

    path: str
    experts: int
    balances: bool
    sums_sequences: bool
    sums_batches: bool = False


@dataclass(frozen=True)
class ModelFacts:
    """Facts about one model. Names are global: free of wrapper prefixes.

    Attributes:
        kind: class name of the model, for people.
        parameters: distinct parameters in registration order.
        buffers: all buffers.
        blocks: paths of the repeated blocks that can be units of their own, in forward order.
        attentions: paths of the attention modules inside those blocks.
        max_seq_len: longest sequence that the model takes, where it says so.
        vocab_size: number of token ids that it takes, where it says so.
        on_meta: whether the weights do not exist yet.
    """

    kind: str
    parameters: tuple[ParameterFact, ...]
    buffers: tuple[BufferFact, ...]
    blocks: tuple[str, ...]
    attentions: tuple[str, ...]
    max_seq_len: int | None = None
    vocab_size: int | None = None
    has_experts: bool = False
    """Whether some module inside its blocks looks like a stack of experts."""
    routers: tuple[RouterFact, ...] = ()
    """Those of our own mixtures of experts."""
    asks_for_router_loss: bool = False
    """Whether it is one of transformers whose config has its routers' loss in its own."""
    on_meta: bool = False
    module: nn.Module | None = field(default=None, repr=False, compare=False)
    """The model itself, for what is only measured when it is asked for."""
    tensor_plan: Any = field(default=None, repr=False, compare=False)
    """The TensorPlan that the model is cut by already."""
    expert_plan: Any = field(default=None, repr=False, compare=False)
    """The ExpertPlan by which its experts are shared out already."""
    float8_plan: Any = field(default=None, repr=False, compare=False)
    """The Float8Plan by which its linear layers are converted already."""

    @property
    def numel(self) -> int:
        return sum(p.numel for p in self.parameters)

    @property
    def balances_microbatches(self) -> bool:
        """Whether a loss is about all tokens of a microbatch together."""
        return any(router.sums_batches for router in self.routers) or router_loss_of(self) is not None

    def of_unit(self, unit: str) -> tuple[ParameterFact, ...]:
        """Parameters of a block, or (``unit`` = "") those outside every block."""
        if unit:
            return tuple(p for p in self.parameters if is_within(p.name, unit))
        return tuple(p for p in self.parameters if not any(is_within(p.name, block) for block in self.blocks))


def measure_structure(facts: ModelFacts, ranks: int) -> Measured:
    """How the model can be cut among ``ranks``, measured on a small copy of it. Remembered for as long as the model is there.

    Raises:
        UnsupportedError: it cannot be measured.
    """
    model = facts.module
    if model is None:
        raise UnsupportedError(f"{facts.kind} cannot be cut inside its blocks or between them: the model itself is not at hand")
    if facts.vocab_size is None and not any(isinstance(module, nn.Embedding) for module in model.modules()):
        raise UnsupportedError(
            f"{facts.kind} cannot be cut inside its blocks or between them: it has no nn.Embedding and says nowhere how many token ids it"
            f" takes (config.vocab_size)"
        )
    known = _MEASURED.setdefault(model, {})
    if ranks not in known:
        with seeded(0):
            known[ranks] = measured(model, Signature.of(model).takes, ranks)
    return known[ranks]


_MEASURED: WeakKeyDictionary[nn.Module, dict[int, Measured]] = WeakKeyDictionary()


def measure_experts(facts: ModelFacts, ranks: int) -> tuple[Stack, ...]:
    """The model's stacks of experts, proven on a small copy of it to be what ``ranks`` can share out. Remembered as long as the model is.

    Raises:
        UnsupportedError: they cannot, or there are none.
    """
    assert facts.module is not None
    known = _STACKS.setdefault(facts.module, {})
    if ranks not in known:
        with seeded(0):
            known[ranks] = measure_stacks(facts.module, Signature.of(facts.module).takes, ranks)
    return known[ranks]


_STACKS: WeakKeyDictionary[nn.Module, dict[int, tuple[Stack, ...]]] = WeakKeyDictionary()


def router_loss_of(facts: ModelFacts) -> RouterLoss | None:
    """The loss of its routers that a model of transformers asks for by its config; None where it asks for none, or for one that its loss
    does not have. Remembered as long as the model is.

    Raises:
        UnsupportedError: it is another loss than the known one.
    """
    if not facts.asks_for_router_loss or facts.module is None:
        return None
    if facts.module not in _ROUTER_LOSSES:
        with seeded(0):
            _ROUTER_LOSSES[facts.module] = measure_router_loss(facts.module, Signature.of(facts.module).takes)
    return _ROUTER_LOSSES[facts.module]


_ROUTER_LOSSES: WeakKeyDictionary[nn.Module, RouterLoss | None] = WeakKeyDictionary()


def premises_of(facts: ModelFacts) -> Premises:
    """What the model's forward does besides giving each row's tokens their logits, seen on a small copy of it. Remembered as long as the
    model is: one that was laid out in part is what it was before."""
    model = facts.module
    if model is None:
        return Premises(unknown="the model itself is not at hand")
    if model not in _PREMISES:
        if lies_on_mesh(model):
            return Premises(unknown="the model is laid out in part already")
        with seeded(0):
            _PREMISES[model] = premises.play(model)
    return _PREMISES[model]


_PREMISES: WeakKeyDictionary[nn.Module, Premises] = WeakKeyDictionary()


def model_facts(model: nn.Module) -> ModelFacts:
    """Read the facts off a module (meta preferred: then it costs nothing but the walk).

    Raises:
        ConfigError: the model has no parameters.
    """
    names: dict[int, list[str]] = {}
    tensors = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(clean(name))
        tensors[id(parameter)] = parameter
    if not tensors:
        raise ConfigError(f"the model {type(model).__name__} has no parameters: there is nothing to train or to lay out")
    parameters = tuple(
        ParameterFact(found[0], tuple(tensors[key].shape), _dtype(tensors[key]), tensors[key].requires_grad, tuple(found[1:]))
        for key, found in names.items()
    )
    blocks = repeated_blocks(model)
    return ModelFacts(
        kind=type(model).__name__,
        parameters=parameters,
        buffers=tuple(_buffer_facts(model)),
        blocks=blocks,
        attentions=attention_modules(model, blocks),
        max_seq_len=_stated(model, "max_seq_len", "max_position_embeddings", "n_positions"),
        vocab_size=_stated(model, "vocab_size"),
        has_experts=bool(find_stacks(model)),
        routers=tuple(
            RouterFact(
                clean(name),
                m.config.n_experts,
                m.bias is not None,
                m.config.sequence_loss > 0 or m.config.batch_loss > 0,
                m.config.batch_loss > 0,
            )
            for name, m in model.named_modules()
            if isinstance(m, Router)
        ),
        asks_for_router_loss=asks_for_router_loss(model),
        on_meta=any(t.is_meta for t in tensors.values()),
        module=model,
        tensor_plan=model.__dict__.get(CUT_BY),
        expert_plan=model.__dict__.get(SHARED_OUT_BY),
        float8_plan=model.__dict__.get(ROUNDED_BY),
    )


def _buffer_facts(model: nn.Module):
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            full = clean(f"{path}.{name}" if path else name)
            yield BufferFact(full, tuple(buffer.shape), _dtype(buffer), is_persistent(module, name))


def _dtype(tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _stated(model: nn.Module, *keys: str) -> int | None:
    config = getattr(model, "config", None)
    if callable(of_text := getattr(config, "get_text_config", None)):  # of transformers: one for text and images has several inside
        config = of_text()
    return next((value for key in keys if isinstance(value := getattr(config, key, None), int) and value > 0), None)
