"""Run a model on a mesh: the one step that every layout shares, and a module's calls, names and state."""

from __future__ import annotations

import math
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from meshwright.comparison.sketch import TokensOfRank
from meshwright.core import readers
from meshwright.core.axes import Axis
from meshwright.core.devices import current_device
from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.core.losses import Loss, PreferenceLoss
from meshwright.core.names import clean, under
from meshwright.core.record import remember
from meshwright.introspection.facts import ModelFacts
from meshwright.introspection.signature import Signature
from meshwright.planning.layout import TOKENS
from meshwright.planning.pipeline.schedule import Action
from meshwright.planning.plan import Plan

from . import experts
from .averaging import WeightCopy, averaged, begin_anew, evaluating, load_within
from .context import runtime
from .context.context_parallel import runtime_of
from .data import accumulation, fully_sharded, replicated
from .loss import preference
from .loss.declared import DeclaredLosses
from .loss.first_batch import problem_of
from .mesh import data_groups, data_position, get_pp_rank, groups_of, is_first_of_stage, tensor_position
from .optimizer import step as optimizer_step
from .optimizer.grad_clip import EPSILON, gradients_times, local_gradients, scale_gradients, total_norm
from .optimizer.parameter_groups import make_parameter_groups, trained_names
from .order import Applied, applied
from .pipeline.run import Pipeline
from .pipeline.split import Absent, StagePart, counted_once
from .process import agree
from .step import batch as step_batch
from .step import opening
from .step.generation import Cacheless, Heard, Sampling, generate, next_logits
from .step.objective import LossFunction
from .step.part import LaidOut, ModelPart, OpenedStep, Runner, StepLoss, StepResult
from .step.whole_model import WholeModel, without_backward
from .weights import audit, shards


class ParallelModel(LaidOut):
    """A model laid onto a mesh by a plan, made by ``parallelize``.

    Attributes:
        module: the module to call (a DDP wrapper, or the model itself).
        plan: the plan that was applied.
        facts: facts about the model before the layout.
        mesh: the device mesh, None in one process.
        skipped_steps: number of optimizer steps that were skipped so far.
        loss_scale: factor of the loss while gradients are computed in float16; None in other dtypes.
        reference_refusal: why batches of pairs need ``reference_log_probs``; "" where adapters are switched off for it.
    """

    def __init__(
        self,
        parts: Sequence[ModelPart],
        plan: Plan,
        facts: ModelFacts,
        mesh: DeviceMesh | None,
        *,
        loss_fn: LossFunction | PreferenceLoss | Loss | Mapping[str, Loss] | None = None,
        microbatch_rows: int = 0,
        adds_up: bool = True,
    ):
        super().__init__()
        self._parts, self.training, self._cacheless = tuple(parts), parts[0].model.training, Cacheless()
        self.is_lent = False  # whether its parameters hold those of a ``WeightCopy``
        self.module, self.plan, self.facts, self.mesh = parts[0].module, plan, facts, mesh
        self.microbatch_rows, self.skipped_steps = microbatch_rows, 0
        of_pairs = isinstance(loss_fn, PreferenceLoss)
        self._pairs = preference.PairsOfModel(loss_fn, self.parts, facts, plan) if of_pairs else None
        self.reference_refusal = "the loss is not of pairs" if self._pairs is None else self._pairs.refusal
        remember(self, Applied(applied(parts[0].model)))
        signature = Signature.of(parts[0].model)
        self._declared = DeclaredLosses.of(loss_fn, parts[0].model, signature.takes["tokens"])
        self._adds_up, self._is_checked, self._stepped = adds_up and self._declared is None, False, lambda: None
        self._last_loss: Tensor | None = None
        self._counted, self._laid = counted_once(self.parts, plan), opening.parameters_of(self._parts)
        self._data_groups = data_groups(mesh)
        self._pipeline_groups = groups_of(mesh, Axis.PP)
        self._copy_groups = groups_of(mesh, *plan.shares.copies)
        self._token_groups = groups_of(mesh, *plan.shares.routed)
        self._routers = experts.routers_of(self.parts)
        experts.share_microbatches(self._routers, self._data_groups)
        self._expert_load = experts.ExpertLoad(self.parts) if facts.has_experts else None
        self._router_loss = None
        if plan.router_loss is not None:
            self._router_loss = experts.SharedRouterLoss(plan.router_loss, parts[0].model, self._token_groups)
        self._context = [found for part in self.parts if (found := runtime_of(part)) is not None]
        self.loss_scale = optimizer_step.LossScale(plan.precision.loss_scale) if plan.precision.loss_scale else None
        self._opening = opening.StepOpening(
            plan,
            facts,
            signature,
            own_loss=loss_fn is not None,
            of_pairs=of_pairs,
            may_lack_reference=of_pairs and not self.reference_refusal,
            declared=self._declared,
            context=self._context,
            data_groups=self._data_groups,
            row_groups=groups_of(mesh, *TOKENS),
            counts_routed=bool(self._routers or self._router_loss),
        )
        loss: Any = self._declared or (loss_fn if self._pairs is None else self._pairs.counted)
        own = loss, self._inputs, self.device
        self._runner: Runner = (
            WholeModel(parts[0], *own, self._router_loss)
            if plan.pipeline is None or mesh is None
            else Pipeline(cast("Sequence[StagePart]", parts), plan, mesh, *own, self._enter)
        )

    @property
    def parts(self) -> list[nn.Module]:
        """The local modules: one for each of this rank's pipeline stages."""
        return [part.model for part in self._parts]

    @property
    def device(self) -> torch.device:
        """The device of the computation."""
        return current_device(self.plan.device)

    @property
    def data_rank(self) -> int:
        """The place of this rank among those that bring other rows; ranks that share rows have the same."""
        return data_position(self.mesh)[0]

    @property
    def data_ranks(self) -> int:
        """Number of shares that a step's rows are dealt to."""
        return data_position(self.mesh)[1]

    # --- steps

    def learn_documents(self) -> None:
        """Learn whether positions alone keep packed documents apart in this model (collective: a small forward)."""
        signature = self._opening.signature
        if signature.takes["document_ids"] is None and signature.takes["positions"] is not None:
            with evaluating(self._parts):
                apart = not agree.any_rank(not opening.stay_apart(self._runner.logits))
            self._opening.signature = replace(signature, positions_part_documents=apart)

    def own_tokens(self, batch: step_batch.Batch) -> TokensOfRank:
        """Return which tokens of a step's rows lie on this rank between the model's blocks."""
        if runtime.PLACES in batch:
            raise UnsupportedError("a trace compares whole rows: bring them without places, and they are cut here")
        if self._context:
            is_cut = self.plan.tensor is not None and self.plan.tensor.sequence_parallel
            return self._context[0].tokens_of(batch, *(tensor_position(self.mesh) if is_cut else (0, 1)))
        return TokensOfRank.run(*tensor_position(self.mesh), batch["tokens"].shape[1])

    def accumulation_context(self, is_last_microbatch: bool) -> AbstractContextManager[None]:
        """Delay gradient communication to the last microbatch, unless ``sync_grad_accum``; restored on exceptions."""
        return accumulation.context(self.module, self.plan, is_last_microbatch)

    def forward_backward(self, batch: step_batch.Brought) -> StepLoss:
        """Run forward and backward of this rank's share of one optimizer step; gradients accumulate in ``.grad``.

        Args:
            batch: one dict of (rows, seq) tensors, cut into microbatches by this call, or a list of microbatches.
                Keys: tokens, labels (already shifted, -100: no loss), optional loss_mask (floats other than 0 and 1
                weigh), positions, document_ids, arguments of the model, and, on a context axis, places in whole rows
                (int64), where a rank brings its own tokens. Or the error why this rank has no batch, for all to raise.

        The loss is a sum over real tokens divided by their number in the whole step on all data ranks (with weights:
        by their sum), so accumulation over unequal microbatches and unequal ranks is exact.

        Raises:
            ConfigError: some rank's batch does not fit; raised on every rank before any model code runs.
        """
        return self.run_opened(self._open_step(batch))

    def run_opened(self, step: OpenedStep) -> StepLoss:
        """Run forward and backward of a step whose counts all ranks know (``forward_backward`` opens it)."""
        pieces, tokens, weight, routed = step
        for model in self.parts:
            fully_sharded.reshard(model)  # gathered by somebody else's forward, it would change gradients under tp
        scale = self.loss_scale.value if self.loss_scale is not None else 1.0
        experts.begin_step(self._routers, routed, self.device, scale)
        experts.begin_step([self._router_loss] if self._router_loss else [], routed, self.device)
        try:
            with gradients_times(scale, self.parameters):
                total = self._runner.forward_backward(pieces, weight or 1.0, scale)
        except BaseException:
            experts.end_step(self._routers, [], skipped=True)
            if self._router_loss is not None:
                self._router_loss.logits.take()
            raise
        result = self._of_all_ranks(total, tokens, weight)
        self._last_loss = result.loss
        return result

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, max_norm: float | None = None, *, skip: bool | None = None
    ) -> StepResult:
        """Clip by the global norm, step the optimizer, clear the gradients; all ranks skip what is not finite on one.

        Args:
            max_norm: largest global 2-norm of the gradients; None or 0: no clipping.
            skip: a guard's verdict: true on any rank skips the update on all, which give a verdict; None: no guard.

        Raises:
            ConfigError, UnsupportedError: the optimizer fits neither model nor plan, or the norm is none; in ``lent``.
        """
        if self.is_lent:
            raise ConfigError("inside lent() a step would train the copy's weights: leave the block before stepping")
        if self._stepped() is not optimizer:  # a weak reference to the last one
            self._stepped = optimizer_step.of_model(optimizer, self.named_parameters())
        parts = local_gradients(counted_once(self.parts, self.plan) if self.mesh is None else self._counted)
        norm = agree.largest_of_copies(float(total_norm(parts, self._pipeline_groups)), self._copy_groups)
        for context in self._context:
            context.verdicts.raise_known()
        is_finite = math.isfinite(norm) and (self._last_loss is None or math.isfinite(float(self._last_loss)))
        is_finite = is_finite and bool(parts or self._pipeline_groups)
        skipped = (skip is not None and agree.any_rank(skip)) or not is_finite
        if skipped:
            self.skipped_steps += 1
        else:
            if max_norm and not norm <= max_norm:
                has_copies = self.plan.pipeline is not None and self.plan.pipeline.tied
                every = local_gradients(self.parameters()) if has_copies else parts
                if not max_norm > 0:
                    raise ConfigError(f"max_norm = {max_norm}: the largest norm of gradients is above 0; 0, None: any")
                scale_gradients(every, max_norm / (norm + EPSILON))
            optimizer_step.step(optimizer, self.plan.optimizer, self.device, self.mesh)
        if self.loss_scale is not None:
            self.loss_scale.follow(is_finite=is_finite)
        experts.end_step(self._routers, self._token_groups, skipped=skipped)
        optimizer.zero_grad(set_to_none=True)
        return StepResult(norm, skipped)

    def drop_gradients(self) -> None:
        """Forget what was begun of a step: gradients, also those that are not reduced yet, counts, the loss."""
        self._last_loss = None
        experts.end_step(self._routers, [], skipped=True)
        for part in self.parts:
            fully_sharded.recover(part)
        self.zero_grad()

    def _open_step(self, batch: step_batch.Brought, *, trains: bool = True) -> OpenedStep:
        """Check batches, agree and count (see ``StepOpening``).

        On the first batch all raise ConfigError if losses are not as declared, or rows depend on each other.
        """

        def bring() -> list[step_batch.Batch]:
            if isinstance(batch, Exception):
                raise batch
            if self.mesh is not None:
                opening.refuse_others(self._parts, self._laid)
            replicated.refuse_other_trained(self.module)
            named: Any = self._opening.named(batch)
            tokens = named.get("tokens") if isinstance(named, dict) else None
            rows, pipeline = self.microbatch_rows, self.plan.pipeline
            if not rows and pipeline is not None and isinstance(tokens, Tensor) and tokens.shape[:1].numel():
                rows = pipeline.rows_per_microbatch(len(tokens), 2 if self._pairs else 1)  # keeps its ranks busy
            return step_batch.microbatches(named, rows)

        step = self.refer(self._opening.open(bring, trains=trains))
        if not self._is_checked and not (self._adds_up and ("tokens" in step.pieces[0] or self.plan.premises_known)):
            with evaluating(self._parts):
                problem = problem_of(self._runner, self._declared, self.plan, step.pieces)
            agree.raise_first(problem, [*self._data_groups, *self._pipeline_groups])
            self._is_checked = True
        return step

    def refer(self, step: OpenedStep) -> OpenedStep:
        """Give pairs that bring no reference what the model without its adapters gives to them (collective)."""
        if self._pairs is None or not preference.lack_reference(step.pieces):
            return step
        with evaluating(self._parts):
            return step._replace(pieces=self._pairs.refer(step.pieces, self._runner.row_log_probs))

    def _inputs(self, batch: step_batch.Batch) -> dict[str, Any]:
        """Return the arguments of the model's forward, for whole rows or for this rank's part of them."""
        self._enter(batch)
        with_targets = self._declared is not None
        if with_targets and self.plan.pipeline is not None:  # only the last stage could make a loss of its own
            batch = {key: value for key, value in batch.items() if key != "labels"}
        return self._opening.signature.inputs(batch, self.device, with_targets=with_targets)

    def _enter(self, batch: step_batch.Batch) -> None:
        """Let attention reach the other ranks' tokens of this microbatch."""
        for context in self._context:
            context.enter(batch)

    def _of_all_ranks(self, value: Tensor, tokens: int, weight: float) -> StepLoss:
        """Sum a loss over ranks, and each of several declared ones, or the figures of pairs (collective)."""
        pairs, declared = self._pairs, self._declared
        own = pairs.counted.taken(value) if pairs else declared.shares(value) if declared else {}
        words = torch.stack([value, *own.values()])
        for group in (*self._data_groups, *self._pipeline_groups):
            dist.all_reduce(words, group=group)
        if self._pairs is None:
            return StepLoss(words[0], tokens, dict(zip(own, words[1:], strict=True)), weight)
        return StepLoss(words[0], tokens, {}, weight, dict(zip(own, words[1:] / (weight or 1.0), strict=True)))

    # --- forwards that no step follows

    def evaluate(self, batch: step_batch.Batch | Sequence[step_batch.Batch] | OpenedStep) -> StepLoss:
        """Compute the loss of a batch (as in ``forward_backward``) without gradients, in evaluation mode."""
        pieces, tokens, weight, _ = batch if isinstance(batch, OpenedStep) else self._open_step(batch, trains=False)
        with evaluating(self._parts):
            total = self._runner.evaluate(pieces)
        return self._of_all_ranks(total / (weight or 1.0), tokens, weight)

    def row_log_probs(self, batch: step_batch.Batch) -> Tensor:
        """Return the sum of the labels' log-probabilities in each row, (rows,), without gradients (collective).

        Data ranks bring equally many rows. ``PreferenceLoss`` compares with those of the first weights.
        """
        named = self._opening.named(batch)
        pieces = self._opening.cut_alike(step_batch.microbatches(named, self.microbatch_rows))  # type: ignore[arg-type]
        with evaluating(self._parts):
            return torch.cat([self._runner.row_log_probs(piece) for piece in pieces])

    def generate(
        self,
        prompt: Sequence[int],
        tokens: int,
        *,
        stop: int | Collection[int] | None = None,
        heard: Heard | None = None,
        **sampling: Any,
    ) -> list[int]:
        """Continue a prompt, on every rank with the same arguments, and return the same ids (see ``generation``).

        ``sampling``: the fields of ``Sampling``: temperature, seed, top_k, top_p."""
        of_model = self.parts[0], self.plan, self._opening.signature, self._inputs, self._runner.logits
        with evaluating(self._parts), next_logits(*of_model, self.facts.max_seq_len, self._cacheless) as following:
            return generate(following, prompt, tokens, Sampling(**sampling), stop=stop, heard=heard)

    @property
    def recomputes_text(self) -> str:
        """Why ``generate`` computes the whole window for each id; "" where it keeps keys and values."""
        return self._cacheless.reason or ""

    def logits(self, batch: step_batch.Batch) -> Tensor:
        """Return the logits of whole rows, (rows, seq, vocabulary), on all ranks that have these rows (collective)."""
        with evaluating(self._parts):
            return self._runner.logits(self._opening.named(batch))  # type: ignore[arg-type]

    # --- reports

    def expert_load(self) -> list[experts.LayerLoad]:
        """Report the spread of training tokens over layers' experts, if any, since the last call (collective)."""
        return self._expert_load.take(self._token_groups, self._pipeline_groups) if self._expert_load else []

    def action_times(self) -> tuple[int, list[tuple[Action, float, float]]] | None:
        """Return this rank on the pipeline axis, and its last step's actions with begin and end (epoch seconds).

        None without a pipeline, and on ranks that are not the first of their stage."""
        if self.plan.pipeline is None or self.mesh is None or not is_first_of_stage(self.mesh):
            return None
        return get_pp_rank(self.mesh), self._runner.action_times()

    def copy_shared(self) -> None:
        """Copy a pipeline's shared parameters from the first stage to the last (collective over that axis)."""
        self._runner.copy_shared()

    def __repr__(self) -> str:
        """Describe this rank's model as it is, not as planned: placements, dtypes, bytes, applied techniques."""
        return audit.describe(self.parts, self.plan)

    def audit(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Check the model against the plan, and a given optimizer for exactly the trained parameters (collective)."""
        parts = [part if self.plan.pipeline else replace(part, plan=self.plan) for part in self._parts]
        audit.audit(parts, self._data_groups, optimizer)

    # --- attributes of the user's

    def __setattr__(self, name: str, value: Any) -> None:
        """Set what the model keeps under this name (``model.temperature = 0.5``) on every local part; no module."""
        if "_runner" in self.__dict__ and name not in self.__dict__:
            tables = [table for part in self.parts for table in (part._modules, part._parameters, part._buffers)]
            if isinstance(value, nn.Module) or any(name in table for table in tables):
                self.add_module(name)
        for keeper in self._keeping(name) or [super()]:
            keeper.__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        """Return a plain attribute of the model; its methods would see parts of the model, and are left out."""
        for model in self._keeping(name):
            return getattr(model, name)
        return super().__getattr__(name)

    def _keeping(self, name: str) -> list[nn.Module]:
        """List the local parts that keep a value under a name that this module does not have itself."""
        own = self.__dict__
        if name.startswith("_") or "_runner" not in own or name in own or hasattr(type(self), name):
            return []
        return [model for model in self.parts if name in model.__dict__ and not callable(model.__dict__[name])]

    # --- names

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (global name, parameter) of this rank, tied ones once; sharded parameters are DTensors.

        A parameter that a pipeline's first and last stage share has one name; a rank with both stages holds two
        bitwise equal copies.
        """
        first = {last: one for one, last in self.plan.pipeline.tied} if self.plan.pipeline else {}
        for model in self.parts:
            for name, parameter in model.named_parameters(remove_duplicate=remove_duplicate):
                yield under(prefix, first.get(clean(name), clean(name))), parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (global name, buffer) of the buffers that belong to a checkpoint."""
        persistent = {fact.name for fact in self.facts.buffers if fact.persistent}
        for model in self.parts:
            for name, buffer in model.named_buffers(remove_duplicate=remove_duplicate):
                if clean(name) in persistent:
                    yield under(prefix, clean(name)), buffer

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Generator[tuple[str, nn.Module], None, None]:
        """Yield (global path, module) of this rank, the laid-out model itself first."""
        yield prefix, self
        memo = set() if memo is None else memo
        for model in self.parts:
            for path, module in model.named_modules(memo, remove_duplicate=remove_duplicate):
                if path and not isinstance(module, Absent):
                    yield under(prefix, clean(path)), module

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        for model in self.parts:
            yield from (child for child in model.named_children() if not isinstance(child[1], Absent))

    def get_submodule(self, target: str) -> nn.Module:
        """Return the module at a global path, of this rank."""
        found = next((module for path, module in self.named_modules() if path == target), None)
        if found is None:
            raise AttributeError(f"{self.facts.kind} has no module at '{target}' on this rank")
        return found

    def make_parameter_groups(
        self, *, weight_decay: float = 0.1, overrides: Sequence[tuple[str, dict[str, Any]]] = ()
    ) -> list[dict[str, Any]]:
        """Group parameters for an optimizer: matrices decay, vectors do not, overrides win (``parameter_groups``)."""
        options: dict[str, Any] = {"weight_decay": weight_decay, "overrides": overrides}
        return make_parameter_groups(self.named_parameters(), elsewhere=trained_names(self.facts, self.plan), **options)

    # --- calls and modes

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the outputs of this rank's rows, without gradients (collective; tensor ranks bring the same rows).

        ``forward_backward`` trains: gradients are summed over ranks and divided by the count of the whole step, so a
        backward from here would be another training, and raises.

        Raises:
            UnsupportedError: the layout cuts rows or stages, for which ``evaluate`` is there.
        """
        cut = "layout.pp" if self.plan.pipeline is not None else "layout.cp" if self.plan.context is not None else ""
        if cut:
            raise UnsupportedError(
                f"model(...) computes whole outputs of whole rows, and {cut} gives each rank a part of them: use"
                f" evaluate(batch), generate(...), or {cut} = 1"
            )
        try:
            with torch.no_grad(), self.averaged():
                output = self._parts[0].module(*args, **kwargs)
        finally:
            fully_sharded.reshard(self.parts[0])
        return without_backward(output) if torch.is_grad_enabled() else output

    def train(self, mode: bool = True) -> ParallelModel:
        """Set training or evaluation mode of all local modules."""
        self.training = mode
        for part in self._parts:
            part.module.train(mode)
        return self

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """Register a hook that runs before each forward of the model, in ``forward_backward`` too."""
        return self._whole("register_forward_pre_hook").register_forward_pre_hook(*args, **kwargs)

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """Register a hook that runs behind each forward of the model, in ``forward_backward`` too."""
        return self._whole("register_forward_hook").register_forward_hook(*args, **kwargs)

    def _whole(self, what: str) -> nn.Module:
        if self.plan.pipeline is not None:
            raise UnsupportedError(
                f"{what} is about a whole forward, and layout.pp gives each rank a part of it: register it on a module"
                f" of this rank, model.get_submodule(path), which raises AttributeError for those of other ranks"
            )
        return self.parts[0]

    # --- state

    def state_dict(  # type: ignore[override]
        self,
        *,
        destination: dict[str, Tensor] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        rank0_only: bool = False,
    ) -> dict[str, Tensor]:
        """Return copies of all whole tensors in host memory, under global names, tied ones under each name.

        Collective: all ranks call it, and gather one tensor after the other. On each rank it takes host memory for one
        whole model, and device memory for one whole tensor; ``save`` writes shards, and needs neither.

        Args:
            rank0_only: other ranks get an empty dict, and need no memory for it.
        """
        if keep_vars:
            raise ConfigError("state_dict(keep_vars=True) would return whole parameters, and ranks hold shards of them")
        with self.averaged():
            found = shards.gathered(self._tensors(), groups_of(self.mesh, Axis.PP), keep=not rank0_only)
        aliases = {alias: fact.name for fact in self.facts.parameters for alias in fact.aliases}
        found |= {alias: found[name] for alias, name in aliases.items() if name in found}
        made = {} if destination is None else destination
        made.update({f"{prefix}{name}": tensor for name, tensor in found.items()})
        return made

    @torch.no_grad()
    def load_state_dict(  # type: ignore[override]
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> shards.IncompatibleKeys:
        """Copy whole tensors, by global name, into this rank's shards; every rank gives the whole dict.

        Raises:
            ConfigError: on all ranks; names are missing or unknown and ``strict``, a shape differs, or ``assign`` is
                set.
        """
        if assign:
            raise ConfigError("load_state_dict(assign=True) would replace shards by whole tensors: leave assign out")
        names = {fact.name: fact.aliases for fact in self.facts.parameters}
        names |= {fact.name: () for fact in self.facts.buffers if fact.persistent}
        readers.finish_all()
        keys = shards.scatter(self._tensors(), state_dict, names, strict=strict)
        if not self.is_lent:
            begin_anew(self.parts)
        return keys

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *options: Any) -> None:  # type: ignore[override]
        """Load a part of the state dict of a module around this one."""
        load_within(self, state_dict, prefix, *options)

    def _tensors(self) -> list[tuple[str, Tensor]]:
        for model in self.parts:
            fully_sharded.reshard(model)  # a gathered copy would be older than what is loaded
        return [*self.named_parameters(), *self.named_buffers()]

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightCopy:
        """Return a copy of this rank's weights, which computes by this model: for averages and references."""
        with self.averaged():
            made = memo[id(self)] = WeightCopy(self)
        return made

    def averaged(self) -> AbstractContextManager[None]:
        """Let the parameters hold the average of the optimizer's steps inside, if it has one (schedule-free AdamW).

        ``evaluate``, ``generate``, calls, copies and ``state_dict`` do so by themselves. No messages are sent.
        """
        return averaged(self.parts)
