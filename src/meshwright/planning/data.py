"""Decide data parallelism: ZeRO stages and the units whose parameters travel together."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from meshwright.core.dtypes import FLOATING, dtype_bytes
from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.core.host import installed, is_at_least
from meshwright.core.names import is_within, owner, pattern
from meshwright.core.parts import mixes_copies
from meshwright.introspection.facts import ModelFacts, ParameterFact
from meshwright.planning.experts import ExpertPlan
from meshwright.planning.float8 import Float8Plan
from meshwright.planning.layout import SHARDS, Layout, Shares, sharded_dim, shares_of
from meshwright.planning.optimizer import OptimizerPlan
from meshwright.planning.plan import Plan
from meshwright.planning.premise_rules import may_be_idle
from meshwright.planning.quantize import QuantizePlan
from meshwright.planning.techniques import Techniques
from meshwright.planning.tensor.plan import TensorPlan
from meshwright.planning.values import Case, Found, PrecisionPlan, Unit, no_blocks, stored_shape

# --- resolve a ZeRO stage

SHARED_OUT = {
    1: "optimizer state",
    2: "optimizer state and gradients",
    3: "optimizer state, gradients and parameters",
}
"""Stage -> the model states that it shards over dp_shard × cp."""


def with_zero_stage(requested: Techniques, layout: Layout) -> Techniques:
    """Resolve the keys left "auto" by the stage; without a stage, by what suits the layout best."""
    stage = requested.zero_stage
    syncs = stage in (2, 3) and shares_of(layout).size(*SHARDS) > 1
    reshards = layout.pp == 1 if stage == "auto" else stage in (0, 3)
    if requested.reshard_after_forward == "auto":
        requested = replace(requested, reshard_after_forward=reshards)
    if requested.sync_grad_accum == "auto":
        requested = replace(
            requested, sync_grad_accum=("shard" if layout.dp_replicate > 1 else True) if syncs else False
        )
    return requested


def gathers_per_step(requested: Techniques, layout: Layout) -> bool:
    """Decide whether gathered parameters stay through all microbatches of a step."""
    return requested.zero_stage in (1, 2) or (layout.pp > 1 and requested.reshard_after_forward is False)


def zero_fits(case: Case) -> Found:
    """Require that the stage agrees with the mesh and with the keys that set a part of it."""
    t, layout = case.techniques, case.layout
    stage, shards = t.zero_stage, shares_of(layout).size(*SHARDS)
    if stage == 0 and layout.dp_shard > 1:
        yield ConfigError(
            f"techniques.zero_stage = 0 keeps everything whole on every rank, but layout.dp_shard = {layout.dp_shard}"
            f" cuts it. Set layout.dp_shard = 1 and layout.dp_replicate = {case.data_ranks}, or another stage."
        )
    if stage not in SHARED_OUT:
        return
    if t.data_parallel == "ddp":
        yield ConfigError(
            f"techniques.zero_stage = {stage} shards {SHARED_OUT[stage]}, and techniques.data_parallel = ddp keeps all"
            f" of it whole. Leave one of them out."
        )
    if case.data_ranks > 1 and shards == 1:
        yield ConfigError(
            f"techniques.zero_stage = {stage} shards {SHARED_OUT[stage]} over layout.dp_shard, which is 1 here beside"
            f" layout.dp_replicate = {layout.dp_replicate}. Set layout.dp_shard = {case.data_ranks} and"
            f" layout.dp_replicate = 1 (or a part of each), or techniques.zero_stage = 0."
        )
    keeps = t.reshard_after_forward is False
    if keeps != (stage < 3):
        does = (
            "frees gathered parameters after each use"
            if stage == 3
            else "keeps gathered parameters through all microbatches of a step"
        )
        yield ConfigError(
            f"techniques.zero_stage = {stage} {does}, and techniques.reshard_after_forward ="
            f" {str(t.reshard_after_forward).lower()} says"
            f' otherwise. Leave it at "auto".'
        )
    syncs = t.sync_grad_accum is not False
    if shards > 1 and syncs != (stage > 1):
        does = (
            "shards gradients with every microbatch" if stage > 1 else "keeps whole gradients until the last microbatch"
        )
        yield ConfigError(
            f"techniques.zero_stage = {stage} {does}, and techniques.sync_grad_accum ="
            f" {str(t.sync_grad_accum).lower()} says otherwise."
            f' Leave it at "auto".'
        )


def units_fit(case: Case) -> Found:
    """Require that blocks that are to be gathered together are sharded, and are there."""
    most, blocks = case.techniques.blocks_per_unit, len(case.facts.blocks)
    request = f"techniques.blocks_per_unit = {most}"
    if most > 1 and case.technique != "fully_shard":
        yield ConfigError(f"{request} is about sharded parameters, and {case.technique} has none. Leave it out.")
    elif most > 1 and not blocks:
        yield ConfigError(no_blocks(request, case.facts))
    elif most > max(blocks, 1):
        yield ConfigError(
            f"{request}: {case.facts.kind} has {blocks} blocks. Legal are 0 (by their bytes) to {blocks}."
        )
    elif most > 1 and not JOINS_BLOCKS:
        yield UnsupportedError(f"{request} needs torch 2.13, and this is torch {installed('torch')}. Set it to 1.")


def zero_notes(requested: Techniques, layout: Layout, technique: str) -> Iterator[str]:
    """Note the traffic of a step by stage, with P parameter elements."""
    stage, ranks = requested.zero_stage, shares_of(layout).batch_ranks
    if stage not in ("auto", 0) and ranks == 1:
        yield f"zero_stage = {stage}: there is one data rank, so nothing is sharded"
    elif stage == 1:
        yield "ZeRO-1: 2P travel per step, whatever its microbatches; whole gradients are kept while they accumulate"
    elif stage == 2:
        yield "ZeRO-2: P + m·P travel per step of m microbatches; each rank keeps its shard of the gradients"
    elif stage == 3:
        yield "ZeRO-3: 3P travel per microbatch; each rank keeps its shard of parameters and gradients"
    elif stage == "auto" and shares_of(layout, technique).shards > 1 and requested.sync_grad_accum is False:
        yield (
            "gradients of several microbatches accumulate whole: P elements on every rank; zero_stage = 2 or 3"
            " keeps shards of them"
        )


def stage_of(plan: Plan) -> int:
    """Return the ZeRO stage of a plan: 0 (nothing sharded) to 3."""
    data = plan.data
    if data.technique != "fully_shard" or plan.shares.shards == 1:
        return 0
    if not data.gathers_per_step:
        return 3
    return 2 if data.sync_grad_accum else 1


# --- group parameters into the communication units of fully_shard

FULL = OptimizerPlan()
JOINED_BYTES, JOINED_PART = 8 * 2**20, 4
"""Blocks are joined up to so many bytes as they are gathered, and up to one of so many parts of the model's blocks, so
that parameters are still freed, gradients sharded, and messages sent beside work. By benchmarks/units.py, joining up to
4 MiB saves time, and above 26 MiB it costs time.
"""
JOINS_BLOCKS = is_at_least("torch", "2.13")
"""Whether fully_shard treats each of several modules as it treats one; older torch casts the inputs of the first."""


@dataclass(frozen=True)
class Holding:
    """How ranks hold the parameters of a model.

    Attributes:
        shards: number of ranks that shard dense parameters.
        float8, quantize: whose weights may be gathered in float8, and rest and are gathered in 4 bits.
    """

    shards: int
    precision: PrecisionPlan
    tensor: TensorPlan | None = None
    experts: ExpertPlan | None = None
    float8: Float8Plan | None = None
    quantize: QuantizePlan | None = None
    optimizer: OptimizerPlan = FULL

    def local_shape(self, p: ParameterFact) -> tuple[int, ...]:
        """Return a parameter's shape on the first rank, one dim divided by the shards and rounded up, as FSDP2 pads."""
        if self.of_experts(p):
            assert self.experts is not None
            return (self.experts.padded(p.shape) // self.experts.shards,)
        whole = p.shape if self.tensor is None else self.tensor.local_shape(p.name, p.shape)
        shape = list(whole) or [1]
        dim = sharded_dim(shape, self.shards) if whole == p.shape else 0
        shape[dim] = -(-shape[dim] // self.shards)
        return tuple(shape)

    def of_experts(self, p: ParameterFact) -> bool:
        return self.experts is not None and self.experts.has(p.name)

    def elements(self, p: ParameterFact) -> int:
        """Count a parameter's elements on all ranks that shard it, those of padding included."""
        if self.of_experts(p):
            assert self.experts is not None
            return self.experts.padded(p.shape)
        return self.shards * math.prod(self.local_shape(p))

    def stored(self, p: ParameterFact) -> int:
        """Count the bytes on all those ranks of a parameter that rests in 4 bits."""
        return self.shards * math.prod(stored_shape(self.local_shape(p)))

    def in_4_bits(self, p: ParameterFact) -> bool:
        return self.quantize is not None and p.name in self.quantize.weights

    def gathered_in(self, p: ParameterFact) -> str:
        if self.in_4_bits(p) or (self.shards > 1 and self.float8 is not None and p.name in self.float8.gathered):
            return "uint8"
        return self.precision.computed_in(p.dtype)

    def unit(
        self,
        name: str,
        parameters: Sequence[ParameterFact],
        reshard: bool | int,
        gathers: bool,
        blocks: tuple[str, ...] = (),
    ) -> Unit:
        trained = [p for p in parameters if p.trainable]
        elements = {p: self.elements(p) for p in parameters}
        sent = {p: self.gathered_in(p) for p in parameters}
        stored = sum(self.stored(p) for p in parameters if self.in_4_bits(p))
        full = [p for p in parameters if not self.in_4_bits(p)]
        sizes = {p: math.prod(self.local_shape(p)) for p in trained}
        rounded = []
        for p, size in sizes.items():
            if self.optimizer.rounds(size):
                cut = self.tensor.cut_of(p.name, p.shape) if self.tensor and not self.of_experts(p) else None
                if cut is None or not (self.tensor and mixes_copies(cut[1], self.tensor.ranks)):
                    rounded.append(size)
        row = self.optimizer.row
        state = [row.state_elements(self.local_shape(p), hidden=p.hidden, whole=p.shape) for p in trained]
        return Unit(
            name,
            sum(elements.values()),
            sum(elements[p] for p in trained),
            stored + sum(elements[p] * dtype_bytes(p.dtype) for p in full),
            stored + sum(elements[p] * (1 if sent[p] == "uint8" else dtype_bytes(sent[p])) for p in full),
            sent[parameters[0]] if len(set(sent.values())) == 1 else "uint8",
            trained[0].dtype if trained else self.precision.master,
            reshard,
            gathers,
            experts=any(map(self.of_experts, parameters)),
            largest=max(sizes.values(), default=0),
            state_elements=sum(state),
            rounded_tensors=len(rounded),
            rounded_elements=sum(rounded),
            blocks=blocks,
        )


def at_rest(facts: ModelFacts, precision: PrecisionPlan) -> ModelFacts:
    """Return the facts with the dtypes in which a plan's parameters rest."""

    def dtype(p: ParameterFact) -> str:
        return p.dtype if precision.is_kept and p.dtype in FLOATING else precision.master

    return replace(facts, parameters=tuple(replace(p, dtype=dtype(p)) for p in facts.parameters))


def joins_blocks(shares: Shares) -> bool:
    """Return whether blocks may be joined unasked: a single data rank sends nothing."""
    return shares.shards * shares.replicas > 1 and JOINS_BLOCKS


def blocks_by_bytes(gathered: int, run: int, blocks: int) -> int:
    """Return how many blocks a unit has by ``JOINED_BYTES`` and ``JOINED_PART``, so that all have about as many.

    Args:
        gathered: bytes of a block as it is gathered.
        run: number of blocks that can be joined.
        blocks: number of the model's blocks.
    """
    most = min(JOINED_BYTES // max(gathered, 1), blocks // JOINED_PART)
    return -(-run // -(-run // max(most, 1)))


def units_of(
    facts: ModelFacts, holding: Holding, reshard: bool | int, most: int = 1, starts: Collection[str] = ()
) -> tuple[Unit, ...]:
    """List the communication units in forward order.

    Those outside the blocks are first, stay gathered, and the root ("") is first of all. A unit precedes those inside
    it.

    Args:
        most: most blocks of a unit; 0: as many as ``blocks_by_bytes`` says.
        starts: blocks that begin a pipeline's stages.

    Raises:
        ConfigError: no two blocks can be joined, and ``most`` is above 1.
    """
    names = [p.name for p in facts.parameters]
    before = next((names.index(p.name) for block in facts.blocks[:1] for p in facts.of_unit(block)), len(names))
    flows = any(p.trainable for p in facts.parameters[:before])  # gradients flow into the first block
    units = units_outside_blocks(facts, holding)
    parts = {block: apart(facts, block, holding) for block in facts.blocks}
    for blocks in _joined(parts, holding, most, starts):
        flows = flows or any(p.trainable for block in blocks for p in facts.of_unit(block))
        keeps = facts.blocks[-1] in blocks or reshard is False  # the last block is needed at once in backward
        frees, gathers = False if keeps else reshard, flows and not keeps
        first, *others = blocks
        if others:
            together = [p for block in blocks for _, parameters in parts[block] for p in parameters]
            units.append(holding.unit(first, together, frees, gathers, blocks))
            continue
        for path, parameters in parts[first]:
            inside = bool(frees) if any(map(holding.of_experts, parameters)) else frees
            units.append(holding.unit(path, parameters, inside, gathers, blocks if path == first else ()))
    return tuple(units)


def _joined(
    parts: dict[str, list[tuple[str, list[ParameterFact]]]], holding: Holding, most: int, starts: Collection[str]
) -> list[tuple[str, ...]]:
    """Join blocks that follow each other in one stack and stage, are trained alike, and have no units inside."""
    runs: list[list[str]] = []
    before: tuple | None = None
    for block, inside in parts.items():
        kind = (owner(block), {p.dtype for _, parameters in inside for p in parameters if p.trainable})
        if before == kind and [path for path, _ in inside] == [block] and block not in starts:
            runs[-1].append(block)
        else:
            runs.append([block])
        before = kind if [path for path, _ in inside] == [block] else None
    found: list[tuple[str, ...]] = []
    for run in runs:
        size = max(holding.unit(block, parts[block][0][1], False, False).bytes_gathered for block in run)
        step = most or blocks_by_bytes(size, len(run), len(parts))
        found += [tuple(run[start : start + step]) for start in range(0, len(run), step)]
    if most > 1 and len(found) == len(parts):
        raise ConfigError(
            f"techniques.blocks_per_unit = {most}: no two blocks that follow each other can be gathered together. Those"
            f" of {pattern(next(iter(parts)))} have units inside them (experts that layout.ep shares out, weights of"
            f" another dtype), are not all trained, or are in other stages. Set techniques.blocks_per_unit = 1."
        )
    return found


def units_outside_blocks(facts: ModelFacts, holding: Holding) -> list[Unit]:
    """List the units of the parameters outside the blocks."""
    inside = {p.name for block in facts.blocks for p in facts.of_unit(block)}
    outside = {p.name for p in facts.of_unit("")}
    last = max((number for number, p in enumerate(facts.parameters) if p.name in inside), default=len(facts.parameters))
    # registered after the blocks, or tied: used at both ends
    behind = {p.name for number, p in enumerate(facts.parameters) if p.name in outside and (number > last or p.aliases)}
    found = []
    for path, parameters in apart(facts, "", holding):
        late = sum(holding.elements(p) for p in parameters if p.trainable and p.name in behind)
        unit = holding.unit(path, parameters, False, False)
        found.append(replace(unit, outside_blocks=True, trainable_behind=late))
    return found


def apart(facts: ModelFacts, unit: str, holding: Holding) -> list[tuple[str, list[ParameterFact]]]:
    """Split the parameters of a block, or of the modules outside the blocks (""), into groups by module and dtype.

    torch wants one dtype of a group's trained parameters. A group is a module that is wrapped by itself, with all that
    is inside it and in no further group. Two groups of one module are parameters that cannot be told apart so.

    Returns:
        (path of the module, parameters), a module before those inside it.
    """
    every = facts.of_unit(unit)
    dense = [p for p in every if not holding.of_experts(p)]
    trained = [p for p in dense if p.trainable]
    # of the trained parameters that only the unit itself can gather, else of most elements
    around = dict.fromkeys((p.dtype for p in trained), 0)
    if len(around) > 1:
        for p in [p for p in trained if _home(p, unit, facts) == unit] or trained:
            around[p.dtype] += p.numel
    dtypes = {unit: max(around, key=lambda dtype: around[dtype], default="")}
    several = trained if len({p.dtype for p in trained}) > 1 else []  # where there is one, nothing is measured
    for home, p in sorted(((_home(p, unit, facts), p) for p in several), key=lambda pair: pair[0].count(".")):
        if p.dtype != dtypes[_innermost(home, dtypes, unit)]:
            dtypes.setdefault(home, p.dtype)
    groups: dict[tuple[str, str], list[ParameterFact]] = {(path, dtype): [] for path, dtype in dtypes.items()}
    for p in dense:
        for name in (p.name, *p.aliases):
            path = _innermost(owner(name), dtypes, unit)
            group = groups.setdefault((path, p.dtype if p.trainable else dtypes[path]), [])
            if p not in group:
                group.append(p)
    for p in every:
        if holding.of_experts(p):
            groups.setdefault((owner(p.name), p.dtype if p.trainable else ""), []).append(p)
    return [(path, parameters) for (path, _), parameters in groups.items() if parameters]


def _home(p: ParameterFact, unit: str, facts: ModelFacts) -> str:
    """Return the innermost module of a unit during whose calls alone a parameter is used."""
    found: list[str] | None = None
    homes = facts.measurements.homes()
    for name in (p.name, *p.aliases):
        path, home = owner(name), homes.get(pattern(name))
        while home is not None and path and pattern(path) != home:
            path = owner(path)
        steps = path.split(".") if path else []
        alike = zip(steps if found is None else found, steps, strict=False)
        found = [step for step, _ in takewhile(lambda both: both[0] == both[1], alike)]
    home = ".".join(found or ())
    return home if not unit or is_within(home, unit) else unit


def _innermost(path: str, groups: Iterable[str], unit: str) -> str:
    """Return the innermost of the groups that a module is in."""
    return max((group for group in groups if group and is_within(path, group)), key=len, default=unit)


def without_skipped(facts: ModelFacts, layout: Layout) -> ModelFacts:
    """Drop blocks that some batches skip: all ranks gather or none, so their weights join those outside blocks.

    Those of images also on one rank: torch does not accumulate gradients of what no microbatch has gathered yet.
    """
    skipped = {block for block in facts.blocks if facts.is_of_images(block)}
    if shares_of(layout).batch_ranks > 1:
        idle = may_be_idle(facts)
        skipped |= {block for block in facts.blocks if all(p.name in idle for p in facts.of_unit(block))}
    return replace(facts, blocks=tuple(block for block in facts.blocks if block not in skipped)) if skipped else facts


def trained_cuts(facts: ModelFacts, tensor: TensorPlan | None) -> tuple[bool, ...]:
    """Return whether the tensor axis leaves trained parameters whole (False), cuts them (True), or both."""
    trained = [p for p in facts.parameters if p.trainable]
    return tuple(sorted({tensor is not None and tensor.cut_of(p.name, p.shape) is not None for p in trained}))
