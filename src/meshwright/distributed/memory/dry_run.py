"""Estimate the memory of a rank's step by a dry run on tensors without memory.

The very code of a run lays the model out and runs a step, for one rank of a world in which no other answers
(``absent_peers``), on fake tensors. The account of a run's first step follows every storage.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn

from meshwright.core.axes import Axis
from meshwright.core.devices import CPU, is_accelerator
from meshwright.core.losses import PreferenceLoss
from meshwright.core.record import remember
from meshwright.core.torch_private import TorchDispatchMode, fake_mode, is_grouped_product, with_values
from meshwright.distributed import order
from meshwright.distributed.context.runtime import first_tokens
from meshwright.distributed.data.replicated import GradientBuckets
from meshwright.distributed.mesh import build_mesh
from meshwright.distributed.optimizer import low_bit
from meshwright.distributed.optimizer.low_bit import LowBitStates
from meshwright.distributed.optimizer.muon import Muon, optimizer_class
from meshwright.distributed.optimizer.parameter_groups import split_by_role
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.distributed.pipeline import run as messages
from meshwright.distributed.process.absent_peers import absent_peers
from meshwright.distributed.recompute import recompute
from meshwright.distributed.step.batch import with_value
from meshwright.distributed.step.part import ModelPart, OpenedStep
from meshwright.distributed.weights.constructed import tie
from meshwright.distributed.weights.shards import apply_to_tensors, memory_of
from meshwright.introspection.calls import SeenEnough, watching
from meshwright.introspection.constructor import seeded
from meshwright.introspection.facts import ModelFacts, model_facts
from meshwright.introspection.images import ImageSize, length_for, pictured
from meshwright.introspection.module_kinds import brings_initialiser, whole_rows
from meshwright.introspection.signature import IMAGES_PER_ROW, REFERENCE, Signature
from meshwright.introspection.small.copies import meta_copy_of
from meshwright.planning.collectives import resolved
from meshwright.planning.layout import Layout
from meshwright.planning.memory import (
    MemoryEstimate,
    MemoryUse,
    RankMemory,
    assumptions,
    composition,
    plan_memory,
)
from meshwright.planning.pipeline.plan import PipelinePlan
from meshwright.planning.pipeline.schedule import peak_live
from meshwright.planning.plan import Plan
from meshwright.planning.values import Batch, DataParallel

from .account import MemoryAccount, dims_of_logits
from .live import LiveStorages, addresses, storage_of, stored, tensors_in

if TYPE_CHECKING:
    from meshwright.core.torch_private import FakeTensorMode


PATIENCE, PATIENCE_PER_BLOCK = 100_000, 4_000
"""Largest number of operators in a dry run, about ten seconds, and how many each repeated block adds: three
microbatches of a decoder's block over a context axis have a thousand."""


@contextmanager
def imagining(*, blocks: int = 0, mode: FakeTensorMode | None = None) -> Iterator[None]:
    """Make every tensor created inside fake.

    Args:
        blocks: number of repeated blocks.
        mode: makes them; tensors of two modes do not go together.

    Raises:
        DryRunError: the step has more operators than any model of so many blocks, like a Python loop over tokens.
    """
    with mode or fake_mode(), _Operators(PATIENCE + blocks * PATIENCE_PER_BLOCK):
        yield


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Check that a dry run of a copy of ``model`` gives no gradients to the original, and restore them if it does.

    Functions that were set on a copied module may still refer to the original.

    Raises:
        DryRunError: a gradient of the original changed.
    """
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        touched = [parameter for parameter, gradient in before if parameter.grad is not gradient]
        for parameter, gradient in before:
            parameter.grad = gradient
    if touched:
        raise DryRunError(
            "a function that was set on one of its modules computes with the model itself, but the dry run uses a copy"
        )


class DryRunError(Exception):
    """Raised if a model cannot be dry-run; the text gives the reason."""


class _Operators(TorchDispatchMode):
    """Limits the number of operators, and gives grouped products their shapes in every dtype, without computing them.

    torch limits them to bfloat16 on fake tensors, although their kernels take other dtypes too.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._operators, self._most = 0, most

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self._operators += 1
        if self._operators > self._most:
            raise DryRunError(f"its step has more than {self._most:,} operators, too many for a dry run")
        if not is_grouped_product(func):
            return func(*args, **(kwargs or {}))
        first, second = args[:2]
        if first.dim() == second.dim() == 2:  # a weight's gradient: as many products as there are groups
            groups = (args[2] if len(args) > 2 else (kwargs or {})["offs"]).shape[0]
            return first.new_empty((groups, first.shape[0], second.shape[1]))
        return first.new_empty((*first.shape[:-1], second.shape[-1]))


def keep_in_buckets(model: nn.Module, microbatches: int, *, syncs: bool) -> None:
    """Allocate a gradient for each trained parameter now, and move gradients there as DDP does.

    Args:
        microbatches: backwards of a step; gradients accumulate elsewhere until the last one.
        syncs: whether each backward reduces, and so moves, its gradients.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    buckets = GradientBuckets(None)
    remember(model, buckets)
    done: Counter[int] = Counter()
    for number, parameter in enumerate(trained):
        bucket = torch.empty_like(parameter, requires_grad=False)
        buckets.note(storage_of(bucket))

        def move(tensor: Tensor, number: int = number, bucket: Tensor = bucket) -> None:
            done[number] += 1
            if syncs or done[number] % microbatches == 0:
                tensor.grad = bucket

        parameter.register_post_accumulate_grad_hook(move)


BuildOptimizer = Callable[[ParallelModel], torch.optim.Optimizer]


def default_optimizer(model: ParallelModel) -> torch.optim.Optimizer:
    """Make an optimizer of the plan's kind, with torch's default implementation."""
    plan = model.plan.optimizer
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if plan.needs_torchao:
        return LowBitStates(trained, plan, model.plan.precision.master)
    if plan.row.by_role:
        return Muon(split_by_role([{"params": trained}], model.named_parameters(), plan.matrices), lr=1e-3)
    return optimizer_class(plan.row)(trained, lr=1e-3)


def make_states(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer make its state, by a step with gradients of zero."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


# --- estimate the memory of all ranks of a pipeline from dry runs of a few, with few microbatches

RunRank = Callable[[int, int], RankMemory]
"""(pipeline rank, microbatches) -> the bytes of its step."""
DIRECT = 16
"""Number of microbatches up to which a step is run as it is."""


def along_pipeline(pipeline: PipelinePlan, microbatches: int, run: RunRank) -> tuple[RankMemory, ...]:
    """Return the bytes of each rank of a pipeline.

    Ranks with equal stages differ by the number of microbatches whose activations they hold. So of these two are run,
    and the others lie on the line through them. Once all stages work, each further microbatch adds as much as the one
    before: nothing, a buffer that was sent, or (GPipe) its activations. So two short steps give a long one.
    """
    held = peak_live(pipeline.order(microbatches))
    alike: dict[tuple[object, ...], list[int]] = {}
    for rank in range(pipeline.ranks):
        alike.setdefault(composition(pipeline, rank), []).append(rank)
    found: dict[int, RankMemory] = {}
    for ranks in alike.values():
        # by what they hold; where that is equal, by their place, since messages travel for longer
        ordered = sorted(ranks, key=lambda rank: (held[rank], rank))
        for rank in ordered if len(ordered) < 3 else (ordered[0], ordered[-1]):
            few = pipeline.legal(2 * pipeline.ranks)
            more = pipeline.legal(few + pipeline.ranks)
            if microbatches <= max(DIRECT, more):
                found[rank] = run(rank, microbatches)
            else:
                share = (microbatches - few) / (more - few)
                found[rank] = run(rank, few).towards(run(rank, more), share)
        first, last = ordered[0], ordered[-1]
        measure = held if held[first] != held[last] else range(pipeline.ranks)
        for rank in ordered[1:-1]:
            share = (measure[rank] - measure[first]) / (measure[last] - measure[first])
            found.setdefault(rank, found[first].towards(found[last], share))
    return tuple(found[rank] for rank in range(pipeline.ranks))


# --- estimate the memory of a rank's step by a dry run on tensors without memory

KEYS = ("tokens", "labels", "positions", "document_ids")
"""Keys of the batches that loaders return."""
ON_META = tuple(name for name in order.NAMES if name not in ("compile", "weights", "ddp"))
"""Techniques that are applied before tensors have memory; what compiled blocks keep is the compiler's choice."""
ALIKE = 3
"""Microbatches of a step without a pipeline: a first, a last, and one that stands for all between."""


def estimate_memory(
    facts: ModelFacts,
    plan: Plan,
    batch: Batch,
    *,
    keys: tuple[str, ...] = KEYS,
    build_optimizer: BuildOptimizer | None = None,
) -> MemoryEstimate:
    """Estimate the bytes that each pipeline rank holds in a step, without devices.

    The model is not changed. No exception is raised: if the model's code fails on tensors without memory, the result
    has no estimate, and names the reason.

    Args:
        facts: facts of the model before a plan is applied.
        keys: keys of a step's batch.
        build_optimizer: makes the optimizer; by default torch's class for the plan's word.
    """
    try:
        with seeded(0), untouched(facts.module), quiet():
            build = build_optimizer or default_optimizer
            batch = resolved(plan, batch)
            ranks, notes = DryRun(facts, plan, batch, keys, build).ranks(), [*assumptions(plan)]
            least: tuple[int, ...] = ()
            if plan.compiled:
                recomputed = replace(plan, activation_checkpointing="full", checkpointed=plan.compiled)
                least = tuple(rank.total for rank in DryRun(facts, recomputed, batch, keys, build).ranks())
            if facts.images is not None:
                try:
                    shown = DryRun(facts, plan, batch, keys, build, shows=True)
                    without, ranks = least or [rank.total for rank in ranks], shown.ranks()
                    least = tuple(min(pair[0], pair[1].total) for pair in zip(without, ranks, strict=True))
                    notes += ["the range is from rows without images to one image a row; further images add to it"]
                except Exception as error:  # noqa: BLE001  (as below)
                    notes += [f"rows are taken to have no images: {(str(error).splitlines() or [''])[0]}"]
            return MemoryEstimate(ranks, least=least, notes=tuple(notes))
    except DryRunError as error:
        return MemoryEstimate((), f"{facts.kind}: {error}")
    except Exception as error:  # noqa: BLE001  (whatever a model's code raises when its tensors have no values)
        message = (str(error).splitlines() or [""])[0]
        return MemoryEstimate(
            (), f"{facts.kind} cannot be run on tensors without values ({type(error).__name__}: {message})"
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's log of operators that fail on fake tensors: the estimate reports the error."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


class DryRun:
    """Runs a step of one rank after the other on tensors without memory, and accounts for it.

    Args:
        shows: each row has an image, in a batch as a run's reader makes it.

    Raises:
        DryRunError: no image can be made, or none fits a row.
    """

    def __init__(
        self,
        facts: ModelFacts,
        plan: Plan,
        batch: Batch,
        keys: tuple[str, ...],
        build_optimizer: BuildOptimizer,
        *,
        shows: bool = False,
    ):
        self.facts, self.keys, self.batch, self.build_optimizer = facts, keys, batch, build_optimizer
        self.asked, self.copies_gradients = plan, plan.data.technique == "ddp"
        self.plan = _on_cpu(plan)
        own = max(1, batch.global_rows // plan.data_ranks)
        suggested = own if plan.pipeline is None else plan.pipeline.rows_per_microbatch(own, batch.rows_together)
        self.rows = min(own, batch.microbatch_rows or suggested)
        self.microbatches = -(-own // self.rows)
        self.shown: Mapping[str, Tensor] = {}
        if shows and facts.images is not None:
            sizes = [ImageSize(facts.images.size, facts.images.each)]
            if not facts.images.each:
                raise DryRunError("the size of one is not known")
            if (needed := length_for((1,), sizes)) > batch.seq_len:
                raise DryRunError(f"a row with one has at least {needed} tokens, and data.seq_len is {batch.seq_len}")
            tokens, generator = torch.zeros((self.rows, batch.seq_len), dtype=torch.int64), torch.Generator()
            self.shown = pictured(tokens, (1,) * self.rows, facts.images, sizes, generator, torch.float32)
            self.keys = "tokens", "labels"

    def ranks(self) -> tuple[RankMemory, ...]:
        """Run a step of each pipeline rank (without a pipeline, of the first rank, which holds most)."""
        if self.plan.pipeline is None:
            return (self.run(0, min(self.microbatches, ALIKE)),)
        return along_pipeline(self.plan.pipeline, self.plan.pipeline.legal(self.microbatches), self.run)

    def run(self, pipeline_rank: int, microbatches: int) -> RankMemory:
        """Run a step of a pipeline rank's first rank, and return its bytes."""
        rank = pipeline_rank * (self.plan.world // self.plan.size(Axis.PP))
        with self.model_of(rank) as model:
            asked, optimizer = self.asked, self.build_optimizer(model)
            make_states(optimizer)
            vocabulary = dims_of_logits(self.facts.vocab_size or 0, self.plan.size(Axis.TP))
            step = self.step(model, microbatches)
            if self.copies_gradients:
                keep_in_buckets(model.parts[0], microbatches, syncs=bool(self.plan.data.sync_grad_accum))
            states = MemoryUse.PARAMETERS, MemoryUse.GRADIENTS, MemoryUse.OPTIMIZER
            in_host = states if asked.data.cpu_offload else states[2:] if asked.optimizer.in_host_memory else ()
            if not is_accelerator(asked.device):
                in_host = ()
            account = MemoryAccount(model.parts, vocabulary, optimizer=optimizer, in_host=in_host)
            whole = whole_rows() if self.shown and brings_initialiser(model.parts[0]) else nullcontext()
            with _as_on(asked.device, account), account, whole:
                model.run_opened(step := model.refer(step))
                account.look()  # all gradients are there, and are told from activations
                every = [p for group in optimizer.param_groups for p in group["params"]]
                made = stored(plain for p in every if p.grad is not None for plain in memory_of(p.grad))
                absent = tensors_in([optimizer.state.get(p, {}) for p in every if p.grad is None])
                if asked.optimizer.in_host_memory and not in_host:  # a copy of the state in the same memory
                    low_bit.step(optimizer, torch.device(CPU))
                else:
                    optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                model.evaluate(step._replace(pieces=step.pieces[:1]))  # as a validation does
        most, peak = dict(account.most), dict(account.peak)
        # what got no gradient has no state either; buckets, and buffers that are reduced together, have room for it
        held, state = (sum(one.nbytes for t in tensors for one in memory_of(t)) for tensors in (every, absent))
        without = 0 if self.copies_gradients else max(0, held - sum(made.values()))
        idle = {MemoryUse.GRADIENTS: without, MemoryUse.OPTIMIZER: state}
        rests = MemoryUse.HOST if MemoryUse.OPTIMIZER in in_host else MemoryUse.OPTIMIZER
        for kinds in (most, peak) if absent else ():
            kinds[rests] = max(0, kinds.get(rests, 0) - state)
        # the optimizer state that comes from host memory for the step counts, if the peak is then
        beside, moving = (MemoryUse.PARAMETERS, MemoryUse.GRADIENTS, MemoryUse.BUFFERS), plan_memory(asked).moving
        stepping = {kind: most[kind] for kind in beside if kind in most} | {MemoryUse.OPTIMIZER: moving}
        if moving and sum(stepping.values()) > RankMemory(most, peak).total:
            peak = stepping
        return RankMemory(most, peak, idle)

    @contextmanager
    def model_of(self, rank: int) -> Iterator[ParallelModel]:
        """Yield a rank's model on fake tensors, where every tensor is made fake."""
        mode = fake_mode(keeps_known=bool(self.shown))
        with self.laid_out(rank, mode) as laid, self.imagining(mode):
            yield ParallelModel(*laid, loss_fn=PreferenceLoss() if self.batch.pairs else None)

    @contextmanager
    def laid_out(self, rank: int, mode: FakeTensorMode) -> Iterator[tuple[list[ModelPart], Plan, ModelFacts, Any]]:
        """Make this process a rank whose parts have fake memory of a mode; yield what ``ParallelModel`` is made of."""
        with absent_peers(rank, self.plan.world):
            plan, mesh = self.plan, None
            if plan.world > 1 or plan.data.technique == "fully_shard":
                experts = 1 if plan.experts is None else plan.experts.ranks
                mesh = build_mesh(Layout(**dict(plan.mesh), ep=experts), CPU)
            module = meta_copy_of(self.facts.module)
            facts = model_facts(module)
            parts = order.lay_out(module, self.plan, order.Site(mesh, facts), ON_META)
            with self.imagining(mode):
                for part in parts:
                    allocate(part.module)
            yield parts, self.plan, facts, mesh

    def imagining(self, mode: FakeTensorMode) -> AbstractContextManager[None]:
        """Make every tensor fake that is created inside, in a step of this model."""
        return imagining(blocks=len(self.facts.blocks), mode=mode)

    def step(self, model: ParallelModel, microbatches: int) -> OpenedStep:
        """Return a step of so many microbatches of one document each."""
        shape, context = (self.rows, self.batch.seq_len), self.plan.context
        piece: Mapping[str, Tensor] = {key: torch.zeros(shape, dtype=torch.int64) for key in self.keys}
        piece = piece | {key: with_values(value) for key, value in self.shown.items() if key != IMAGES_PER_ROW}
        if context is not None:  # the first rank's tokens
            piece = first_tokens(piece, context, Signature.of(model.parts[0]))
        weight = tokens = piece["tokens"].numel() * microbatches * self.plan.data_ranks
        if self.batch.pairs:
            if model.reference_refusal or self.plan.pipeline is not None:  # the others of a pipeline are absent
                piece = with_value(piece, REFERENCE, torch.zeros(len(piece["tokens"]), dtype=torch.float64))
            weight = tokens // (2 * self.batch.seq_len)
        return OpenedStep([piece] * microbatches, tokens, float(weight), tokens)


def _on_cpu(plan: Plan) -> Plan:
    """Return the plan as the dry run applies it: on the CPU, without what needs an accelerator or has no address."""
    data = replace(plan.data, pin_memory=False)
    if plan.data.technique == "ddp":
        data = DataParallel("none", sync_grad_accum=data.sync_grad_accum)
    tensor = plan.tensor if plan.tensor is None else replace(plan.tensor, async_tensor_parallel=False)
    return replace(plan, device=CPU, data=data, tensor=tensor)


@contextmanager
def _as_on(device: str, account: MemoryAccount) -> Iterator[None]:
    """On an accelerator, offloaded activations are in another memory, and messages say when they have been sent."""
    is_apart = is_accelerator(device)
    notice = recompute.notice.set(account.note_host if is_apart else None)
    sent = messages.sends_complete.set(is_apart)
    try:
        yield
    finally:
        recompute.notice.reset(notice)
        messages.sends_complete.reset(sent)


def allocate(model: nn.Module) -> None:
    """Give a model on meta fake memory on the CPU; tied parameters stay tied, shared buffers shared."""
    first: dict[int, str] = {}
    names = model.named_parameters(remove_duplicate=False)
    ties = {name: other for name, p in names if (other := first.setdefault(id(p), name)) != name}

    made: dict[Tensor, Tensor] = {}

    def bare(tensor: Tensor) -> Tensor:
        if tensor not in made:
            made[tensor] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=CPU)
        return made[tensor]

    apply_to_tensors(model, bare)
    tie(model, ties)


@dataclass(frozen=True)
class SavedByBlock:
    """Bytes that a block saves of a microbatch for its backward.

    Attributes:
        all: of tensors that no earlier block saved, parameters and ``given`` left out.
        in_attention: those among them that its attention saves.
        kept: those that stay between forward and backward, by the plan's recomputation.
        pairs: those among all that have a number for each pair of a row's tokens, such as masks.
        given: of such tensors that it is given, and that no earlier block saved: all blocks keep the same.
        hidden: those among all that have as many elements as the block's input, and are not its attention's own: hidden
            states, and what norms compute from them.
    """

    all: int
    in_attention: int
    kept: int = 0
    pairs: int = 0
    given: int = 0
    hidden: int = 0


def saved_by_blocks(
    facts: ModelFacts, plan: Plan, batch: Batch, blocks: Sequence[str] = ()
) -> tuple[SavedByBlock, ...]:
    """Measure repeated blocks of a model in a forward of one microbatch under a plan of one rank.

    The model is not changed. Empty where its code fails on tensors without memory.

    Args:
        facts: facts of the model before a plan is applied.
        plan: a plan of one rank that compiles nothing.
        blocks: paths of those that are measured; empty: all.
    """
    blocks = blocks or facts.blocks
    if plan.world != 1:
        return ()
    try:
        dry = DryRun(facts, plan, resolved(plan, batch), KEYS, default_optimizer)
        with seeded(0), untouched(facts.module), dry.model_of(0) as model:
            step, seen = dry.step(model, 1), _BlockSaves(model.parts[0], batch.seq_len, set(blocks))
            with suppress(SeenEnough), seen.live, seen.watch(facts):
                model.run_opened(step)
    except Exception:  # noqa: BLE001  (whatever a model's code raises when its tensors have no values)
        return ()
    names = [field.name for field in fields(SavedByBlock)]
    return tuple(SavedByBlock(**{name: seen.bytes[block, name] for name in names}) for block in blocks)


class _BlockSaves:
    """Counts saved bytes by the block that computes, of those that are wanted."""

    def __init__(self, model: nn.Module, seq_len: int, wanted: set[str]):
        self.model, self.seq_len, self.wanted, self.live = model, seq_len, wanted, LiveStorages()
        self.bytes = Counter[tuple[str, str]]()  # of a block and a field of SavedByBlock
        self._block, self._attends, self._elements = "", 0, 0
        self._entered: tuple[str, ref[torch.UntypedStorage], int] | None = None  # the block before, its input and size
        self._parameters: set[int] = set()
        self._inputs: set[int] = set()
        self._attended: set[int] = set()
        self._known: WeakValueDictionary[int, torch.UntypedStorage] = WeakValueDictionary()  # saved, by address
        self._saved: list[tuple[ref[torch.UntypedStorage], dict[str, bool]]] = []

    @contextmanager
    def watch(self, facts: ModelFacts) -> Iterator[None]:
        """Watch a forward, and end it before the block behind those that are wanted."""

        def leave(*_: Any) -> None:
            self.wanted.discard(self._block)
            self.bytes[self._block, "kept"] += self.live.bytes()
            for one, counts in self._saved:  # what a detached result was computed from is gone
                size = 0 if (storage := one()) is None else storage.nbytes()
                self.bytes.update({(self._block, name): size * does for name, does in counts.items()})
            self._block, self._saved = "", []

        def attend(_path: str, _module: nn.Module, *given: Any) -> None:
            self._attends, self._attended = self._attends + 1, addresses(tensors_in(given))

        def attended(*_: Any) -> None:
            self._attends -= 1

        def save(tensor: Tensor) -> Tensor:
            storage = storage_of(tensor)
            key = id(storage)
            if self._block and key not in self._parameters and key not in self._known:
                self._known[key] = storage
                has_pairs = tensor.dim() > 3 and tensor.shape[-2:] == (self.seq_len, self.seq_len)
                if has_pairs and key in self._inputs:
                    self.bytes[self._block, "given"] += storage.nbytes()
                else:
                    attends = self._attends > 0
                    hidden = tensor.numel() == self._elements and (not attends or key in self._attended)
                    counts = {"all": True, "in_attention": attends, "pairs": has_pairs, "hidden": hidden}
                    self._saved.append((ref(storage), counts))
            return tensor

        blocks, attentions = (
            [(path, self.model.get_submodule(path)) for path in paths] for paths in (facts.blocks, facts.attentions)
        )
        attending = watching(attentions, attend, attended)
        saving = torch.autograd.graph.saved_tensors_hooks(save, lambda saved: saved)
        with watching(blocks, self._enter, leave), attending, saving:
            yield

    def _enter(self, path: str, module: nn.Module, *given: Any) -> None:
        if self._entered is not None and self._entered[1]() is None:  # its output was counted in its input's place
            self.bytes[self._entered[0], "kept"] -= self._entered[2]
        if not self.wanted:
            raise SeenEnough
        inputs = tensors_in(given)
        self._block, self._parameters, self._inputs = path, addresses(module.parameters()), addresses(inputs)
        self._entered = (path, ref(first := storage_of(inputs[0])), first.nbytes()) if inputs else None
        self._elements = inputs[0].numel() if inputs else 0
        self.bytes[path, "kept"] -= self.live.bytes()
