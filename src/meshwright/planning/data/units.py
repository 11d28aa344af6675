"""Group parameters into the communication units of fully_shard."""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshwright.core.names import owner
from meshwright.core.parts import mixes_copies
from meshwright.introspection.facts import ModelFacts, ParameterFact
from meshwright.planning.experts.plan import ExpertPlan
from meshwright.planning.float8.plan import Float8Plan
from meshwright.planning.optimizer.plan import OptimizerPlan
from meshwright.planning.quantize.format import stored_shape
from meshwright.planning.quantize.plan import QuantizePlan
from meshwright.planning.tensor.plan import TensorPlan
from meshwright.planning.values import Unit

FULL = OptimizerPlan()


@dataclass(frozen=True)
class Narrow:
    """The names of weights that take fewer bits than their dtype.

    Attributes:
        in_float8: those gathered in float8.
        in_4_bits: those that rest, and are gathered, in 4 bits.
    """

    in_float8: frozenset[str] = frozenset()
    in_4_bits: frozenset[str] = frozenset()

    @classmethod
    def of(cls, float8: Float8Plan | None, quantize: QuantizePlan | None = None) -> Narrow:
        return cls(
            frozenset() if float8 is None else float8.gathered, frozenset() if quantize is None else quantize.weights
        )


NONE = Narrow()


def units_of(
    facts: ModelFacts,
    shards: int,
    reshard: bool | int,
    tensor: TensorPlan | None,
    experts: ExpertPlan | None = None,
    narrow: Narrow = NONE,
    optimizer: OptimizerPlan = FULL,
) -> tuple[Unit, ...]:
    """List the communication units in forward order; the root ("") is first, gathered first, and stays gathered."""
    early = _trains_before_blocks(facts)
    units = [make_unit(facts, "", shards, False, False, tensor, optimizer=optimizer)]
    flows = early
    for block in facts.blocks:
        flows = flows or any(p.trainable for p in facts.of_unit(block))
        keeps = block == facts.blocks[-1] or reshard is False  # the last block is needed at once in backward
        frees = False if keeps else reshard
        units.append(make_unit(facts, block, shards, frees, flows and not keeps, tensor, experts, narrow, optimizer))
        if experts is not None and (inside := experts.only((block,))) is not None:
            frees, gathers = not keeps and bool(reshard), flows and not keeps
            units += [_stack_unit(facts, stack.path, frees, gathers, experts, optimizer) for stack in inside.stacks]
    return tuple(unit for unit in units if unit.elements)


def make_unit(
    facts: ModelFacts,
    name: str,
    shards: int,
    reshard: bool | int,
    gathers: bool,
    tensor: TensorPlan | None,
    experts: ExpertPlan | None = None,
    narrow: Narrow = NONE,
    optimizer: OptimizerPlan = FULL,
) -> Unit:
    parameters = [p for p in facts.of_unit(name) if experts is None or not experts.has(p.name)]
    total = sum(_padded(p, shards, tensor) for p in parameters)
    trained = sum(_padded(p, shards, tensor) for p in parameters if p.trainable)
    behind = 0 if name else sum(_padded(p, shards, tensor) for p in _behind_blocks(facts) if p.trainable)
    rounded = sum(_padded(p, shards, tensor) for p in parameters if p.name in narrow.in_float8 and shards > 1)
    packed = [p for p in parameters if p.name in narrow.in_4_bits]
    in_4_bits = sum(_padded(p, shards, tensor) for p in packed)
    stored = sum(shards * math.prod(stored_shape(_local_shape(p, shards, tensor))) for p in packed)
    trains = [p for p in parameters if p.trainable]
    sizes = [(_local_shape(p, shards, tensor), _mixes_copies(p, tensor), p) for p in trains]
    return Unit(
        name, total, trained, reshard, gathers, False, behind, rounded, in_4_bits, stored, *_states(sizes, optimizer)
    )


def _mixes_copies(p: ParameterFact, tensor: TensorPlan | None) -> bool:
    cut = tensor.cut_of(p.name, p.shape) if tensor is not None else None
    return tensor is not None and cut is not None and mixes_copies(cut[1], tensor.ranks)


def _states(
    shapes: list[tuple[tuple[int, ...], bool, ParameterFact]], optimizer: OptimizerPlan
) -> tuple[int, int, int, int]:
    """Count (most elements of a parameter, elements of state, parameters whose state is low-bit, their elements).

    ``shapes``: (shape on the first rank, whether it has copies, the parameter) of each trained one.
    """
    sizes = [(math.prod(shape), mixes) for shape, mixes, _ in shapes]
    rounded = [size for size, mixes in sizes if optimizer.rounds(size) and not mixes]
    largest = max((size for size, _ in sizes), default=0)
    elements = sum(optimizer.row.state_elements(shape, hidden=p.hidden, whole=p.shape) for shape, _, p in shapes)
    return largest, elements, len(rounded), sum(rounded)


def _behind_blocks(facts: ModelFacts) -> list[ParameterFact]:
    """List parameters registered after the blocks, and tied ones outside them, which are used at both ends."""
    inside = {p.name for block in facts.blocks for p in facts.of_unit(block)}
    last = max((number for number, p in enumerate(facts.parameters) if p.name in inside), default=len(facts.parameters))
    outside = {p.name for p in facts.of_unit("")}
    return [p for number, p in enumerate(facts.parameters) if p.name in outside and (number > last or p.aliases)]


def _stack_unit(
    facts: ModelFacts, path: str, reshard: bool, gathers: bool, experts: ExpertPlan, optimizer: OptimizerPlan
) -> Unit:
    parameters = [p for p in facts.parameters if owner(p.name) == path]
    trained = [(experts.padded(p.shape), p) for p in parameters if p.trainable]
    states = _states([((size // experts.shards,), False, p) for size, p in trained], optimizer)
    total = sum(experts.padded(p.shape) for p in parameters)
    return Unit(path, total, sum(size for size, _ in trained), reshard, gathers, True, 0, 0, 0, 0, *states)


def _padded(p: ParameterFact, shards: int, tensor: TensorPlan | None) -> int:
    """Count elements on the first tensor rank, dim 0 padded to a multiple of ``shards``, as FSDP2 sends them."""
    return shards * math.prod(_local_shape(p, shards, tensor))


def _local_shape(p: ParameterFact, shards: int, tensor: TensorPlan | None) -> tuple[int, ...]:
    """Return the shape on the first rank, dim 0 divided by ``shards`` and rounded up."""
    rows, *others = (p.shape if tensor is None else tensor.local_shape(p.name, p.shape)) or (1,)
    return (-(-rows // shards), *others)


def _trains_before_blocks(facts: ModelFacts) -> bool:
    """Decide whether gradients flow into the first block: a trainable parameter is registered before it."""
    names = [p.name for p in facts.parameters]
    first = next((names.index(p.name) for block in facts.blocks[:1] for p in facts.of_unit(block)), len(names))
    return any(p.trainable for p in facts.parameters[:first])


def trained_cuts(facts: ModelFacts, tensor: TensorPlan | None) -> tuple[bool, ...]:
    """Return whether the tensor axis leaves trained parameters whole (False), cuts them (True), or both."""
    trained = [p for p in facts.parameters if p.trainable]
    return tuple(sorted({tensor is not None and tensor.cut_of(p.name, p.shape) is not None for p in trained}))
