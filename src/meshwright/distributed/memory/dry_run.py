"""Estimate the memory of a rank's step by a dry run on tensors without memory.

The very code of a run lays the model out and runs a step, for one rank of a world in which no other answers
(``absent_peers``), on fake tensors. The account of a run's first step follows every storage.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright.core.axes import Axis
from meshwright.core.devices import CPU, is_accelerator
from meshwright.core.losses import PreferenceLoss
from meshwright.core.torch_private import fake_mode
from meshwright.distributed import order
from meshwright.distributed.context.runtime import first_tokens
from meshwright.distributed.mesh import build_mesh
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.distributed.pipeline import messages
from meshwright.distributed.pipeline.absent import on_meta
from meshwright.distributed.process.absent_peers import absent_peers
from meshwright.distributed.recompute import host_activations
from meshwright.distributed.step.part import ModelPart
from meshwright.distributed.step.results import OpenedStep
from meshwright.distributed.weights.shards import apply_to_tensors
from meshwright.distributed.weights.weights import tie
from meshwright.introspection.facts import ModelFacts, model_facts
from meshwright.introspection.signature import REFERENCE, Signature
from meshwright.planning.layout import Layout
from meshwright.planning.memory.states import plan_memory
from meshwright.planning.memory.step import MemoryEstimate, MemoryUse, RankMemory, assumptions
from meshwright.planning.plan import Plan
from meshwright.planning.traffic import resolved
from meshwright.planning.values import Batch, DataParallel

from .account import MemoryAccount, dims_of_logits
from .buckets import keep_in_buckets
from .fake import DryRunError, imagining, same_random_numbers, untouched
from .optimizers import BuildOptimizer, default_optimizer, make_states
from .pipeline_ranks import along_pipeline

if TYPE_CHECKING:
    from meshwright.core.torch_private import FakeTensorMode

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
    if facts.module is None:
        return MemoryEstimate((), "the model itself is not at hand")
    try:
        with same_random_numbers(), untouched(facts.module), quiet():
            build = build_optimizer or default_optimizer
            batch = resolved(plan, batch)
            ranks = DryRun(facts, plan, batch, keys, build).ranks()
            least: tuple[int, ...] = ()
            if plan.compiled:
                recomputed = replace(plan, activation_checkpointing="full", checkpointed=plan.compiled)
                least = tuple(rank.total for rank in DryRun(facts, recomputed, batch, keys, build).ranks())
            return MemoryEstimate(ranks, least=least, notes=tuple(assumptions(plan)))
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
    """Runs a step of one rank after the other on tensors without memory, and accounts for it."""

    def __init__(
        self, facts: ModelFacts, plan: Plan, batch: Batch, keys: tuple[str, ...], build_optimizer: BuildOptimizer
    ):
        self.facts, self.keys, self.batch, self.build_optimizer = facts, keys, batch, build_optimizer
        self.asked, self.copies_gradients = plan, plan.data.technique == "ddp"
        self.plan = _on_cpu(plan)
        own = max(1, batch.global_rows // plan.data_ranks)
        suggested = own if plan.pipeline is None else plan.pipeline.rows_per_microbatch(own, batch.rows_together)
        self.rows = min(own, batch.microbatch_rows or suggested)
        self.microbatches = -(-own // self.rows)

    def ranks(self) -> tuple[RankMemory, ...]:
        """Run a step of each pipeline rank (without a pipeline, of the first rank, which holds most)."""
        if self.plan.pipeline is None:
            return (self.run(0, min(self.microbatches, ALIKE)),)
        return along_pipeline(self.plan.pipeline, self.plan.pipeline.legal(self.microbatches), self.run)

    def run(self, pipeline_rank: int, microbatches: int) -> RankMemory:
        """Run a step of a pipeline rank's first rank, and return its bytes."""
        rank = pipeline_rank * (self.plan.world // self.plan.size(Axis.PP))
        with self.model_of(rank) as model:
            return self._account(model, microbatches)

    @contextmanager
    def model_of(self, rank: int) -> Iterator[ParallelModel]:
        """Yield a rank's model on fake tensors, where every tensor is made fake."""
        mode = fake_mode()
        with self.laid_out(rank, mode) as laid, self.imagining(mode):
            yield ParallelModel(*laid, loss_fn=PreferenceLoss() if self.batch.pairs else None)

    @contextmanager
    def laid_out(self, rank: int, mode: FakeTensorMode) -> Iterator[tuple[list[ModelPart], Plan, ModelFacts, Any]]:
        """Make this process a rank whose parts have fake memory of a mode; yield what ``ParallelModel`` is made of."""
        with absent_peers(rank, self.plan.world):
            mesh, module = self._mesh(), on_meta(cast("nn.Module", self.facts.module))
            facts = model_facts(module)
            parts = order.lay_out(module, self.plan, order.Site(mesh, facts), ON_META)
            with self.imagining(mode):
                for part in parts:
                    allocate(part.module)
            yield parts, self.plan, facts, mesh

    def imagining(self, mode: FakeTensorMode) -> AbstractContextManager[None]:
        """Make every tensor fake that is created inside, in a step of this model."""
        return imagining(experts=self.facts.has_experts, blocks=len(self.facts.blocks), mode=mode)

    def _account(self, model: ParallelModel, microbatches: int) -> RankMemory:
        optimizer = self.build_optimizer(model)
        make_states(optimizer)
        vocabulary = dims_of_logits(self.facts.vocab_size or 0, self.plan.size(Axis.TP))
        step = self.step(model, microbatches)
        if self.copies_gradients:
            keep_in_buckets(model.parts[0], microbatches, syncs=bool(self.plan.data.sync_grad_accum))
        account = MemoryAccount(model.parts, vocabulary, optimizer=optimizer, in_host=_in_host(self.asked))
        with _as_on(self.asked.device, account), account:
            model.run_opened(model.refer(step))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return _with_moving_state(RankMemory(dict(account.most), dict(account.peak)), self.asked)

    def _mesh(self) -> DeviceMesh | None:
        plan = self.plan
        if plan.world == 1 and plan.data.technique != "fully_shard":
            return None
        return build_mesh(Layout(**dict(plan.mesh), ep=1 if plan.experts is None else plan.experts.ranks), CPU)

    def step(self, model: ParallelModel, microbatches: int) -> OpenedStep:
        """Return a step of so many microbatches of one document each."""
        piece = self._piece(self.rows, self.batch.seq_len, Signature.of(model.parts[0]))
        tokens = piece["tokens"].numel() * microbatches * self.plan.data_ranks
        weight = tokens
        if self.batch.pairs:
            if model.reference_refusal or self.plan.pipeline is not None:  # the others of a pipeline are absent
                piece = {**piece, REFERENCE: torch.zeros(len(piece["tokens"]), dtype=torch.float64)}
            weight = tokens // (2 * self.batch.seq_len)
        return OpenedStep([piece] * microbatches, tokens, float(weight), tokens)

    def _piece(self, rows: int, length: int, signature: Signature) -> Mapping[str, Tensor]:
        """Return a microbatch of whole rows of one document, or the first rank's tokens of it."""
        whole = {key: torch.zeros((rows, length), dtype=torch.int64) for key in self.keys}
        return whole if self.plan.context is None else first_tokens(whole, self.plan.context, signature)


def _on_cpu(plan: Plan) -> Plan:
    """Return the plan as the dry run applies it: on the CPU, without what needs an accelerator or has no address."""
    data = replace(plan.data, pin_memory=False)
    if data.technique == "ddp":
        data = DataParallel("none", sync_grad_accum=data.sync_grad_accum)
    tensor = plan.tensor if plan.tensor is None else replace(plan.tensor, async_tensor_parallel=False)
    return replace(plan, device=CPU, data=data, tensor=tensor)


def _in_host(plan: Plan) -> tuple[MemoryUse, ...]:
    """List the kinds that a plan keeps in host memory beside an accelerator's."""
    if not is_accelerator(plan.device):
        return ()
    if plan.data.cpu_offload:
        return MemoryUse.PARAMETERS, MemoryUse.GRADIENTS, MemoryUse.OPTIMIZER
    return (MemoryUse.OPTIMIZER,) if plan.optimizer.in_host_memory else ()


@contextmanager
def _as_on(device: str, account: MemoryAccount) -> Iterator[None]:
    """On an accelerator, offloaded activations are in another memory, and messages say when they have been sent."""
    is_apart = is_accelerator(device)
    notice = host_activations.notice.set(account.note_host if is_apart else None)
    sent = messages.sends_complete.set(is_apart)
    try:
        yield
    finally:
        host_activations.notice.reset(notice)
        messages.sends_complete.reset(sent)


def _with_moving_state(memory: RankMemory, plan: Plan) -> RankMemory:
    """Add the optimizer state that comes from host memory for the step, if the peak is then."""
    moving = plan_memory(plan).moving
    kinds = MemoryUse.PARAMETERS, MemoryUse.GRADIENTS, MemoryUse.BUFFERS
    stepping = {kind: memory.most[kind] for kind in kinds if kind in memory.most} | {MemoryUse.OPTIMIZER: moving}
    return replace(memory, peak=stepping) if moving and sum(stepping.values()) > memory.total else memory


def allocate(model: nn.Module) -> None:
    """Give a model on meta fake memory on the CPU; tied parameters stay tied."""
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for module in model.modules():
        places: tuple[Any, ...] = module._parameters, module._buffers
        for held in places:
            for name, tensor in held.items():
                if tensor is not None and not isinstance(tensor, DTensor):
                    if id(tensor) not in made:
                        made[id(tensor)] = tensor, _allocated(tensor)  # held: else its id could be reused
                    held[name] = made[id(tensor)][1]
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        names = dict(model.named_parameters(remove_duplicate=False))
        first: dict[int, str] = {}
        ties = {name: other for name, p in names.items() if (other := first.setdefault(id(p), name)) != name}
        apply_to_tensors(model, lambda tensor: _bare(tensor) if tensor.is_meta else tensor)
        tie(model, ties)


def _allocated(tensor: Tensor) -> Tensor:
    bare = _bare(tensor)
    if not isinstance(tensor, nn.Parameter):
        return bare
    made = nn.Parameter(bare, tensor.requires_grad)
    for name, value in vars(tensor).items():
        setattr(made, name, value)
    return made


def _bare(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=CPU)
