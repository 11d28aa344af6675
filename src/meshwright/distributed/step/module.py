"""Let a laid-out model behave as a module: calls, modes, names, whole state dicts, texts, copies of its weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from meshwright.core.axes import Axis
from meshwright.core.dtypes import torch_dtype
from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.core.names import clean
from meshwright.core.torch_private import tree_map_only
from meshwright.distributed.averaging import WeightCopy, averaged, begin_anew, load_within
from meshwright.distributed.data import fully_sharded
from meshwright.distributed.mesh import groups_of
from meshwright.distributed.optimizer.parameter_groups import make_parameter_groups, trained_names
from meshwright.distributed.weights import whole_state
from meshwright.introspection.facts import ModelFacts
from meshwright.planning.plan import Plan

from . import batch as step_batch
from .generation import Cacheless, Heard, Sampling, generate, next_logits
from .opening import StepOpening
from .part import ModelPart, Runner

# --- let a laid-out model behave as a module


class IncompatibleKeys(NamedTuple):
    """Names that a state dict lacks, and names that the model does not know."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class PartsAsModule(nn.Module):
    """The local parts of a model as one module, under global names.

    Attributes:
        plan: the plan that was applied.
        facts: facts about the model before the layout.
        mesh: the device mesh, None in one process.
    """

    plan: Plan
    facts: ModelFacts
    mesh: Any

    def __init__(self, parts: Sequence[ModelPart]):
        super().__init__()
        self._parts = tuple(parts)
        self.is_lent = False  # whether its parameters hold those of a ``WeightCopy``
        self.training = parts[0].model.training

    @property
    def parts(self) -> list[nn.Module]:
        """The local modules: one for each of this rank's pipeline stages."""
        return [part.model for part in self._parts]

    # --- attributes of the user's

    def __setattr__(self, name: str, value: Any) -> None:
        """Set what the model keeps under this name (``model.temperature = 0.5``) on every local part."""
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
                yield _under(prefix, first.get(clean(name), clean(name))), parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (global name, buffer) of the buffers that belong to a checkpoint."""
        persistent = {fact.name for fact in self.facts.buffers if fact.persistent}
        for model in self.parts:
            for name, buffer in model.named_buffers(remove_duplicate=remove_duplicate):
                if clean(name) in persistent:
                    yield _under(prefix, clean(name)), buffer

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Generator[tuple[str, nn.Module], None, None]:
        """Yield (global path, module) of this rank, the laid-out model itself first."""
        yield prefix, self
        memo = set() if memo is None else memo
        for model in self.parts:
            for path, module in model.named_modules(memo, remove_duplicate=remove_duplicate):
                if path:
                    yield _under(prefix, clean(path)), module

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        for model in self.parts:
            yield from model.named_children()

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

    def _counted_once(self) -> list[nn.Parameter]:
        """List the parameters without the last stage's copies of the first stage's in a pipeline."""
        copies = {last for _, last in self.plan.pipeline.tied} if self.plan.pipeline else set()
        if not copies:  # a step asks: no name is worth making
            return list(chain.from_iterable(model.parameters() for model in self.parts))
        return [p for model in self.parts for name, p in model.named_parameters() if clean(name) not in copies]

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
        return tree_map_only(Tensor, _guarded, output) if torch.is_grad_enabled() else output

    def train(self, mode: bool = True) -> PartsAsModule:
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

    def register_full_backward_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise UnsupportedError: such a hook would see one microbatch of one rank."""
        raise UnsupportedError(
            "a backward hook of the whole model would see one rank's gradient of one microbatch: register it on a"
            " module (get_submodule), or read the gradients behind forward_backward"
        )

    register_full_backward_pre_hook = register_full_backward_hook
    register_backward_hook = register_full_backward_hook

    def _whole(self, what: str) -> nn.Module:
        if self.plan.pipeline is not None:
            raise UnsupportedError(
                f"{what} is about a whole forward, and layout.pp gives each rank a part of it: register it on a module"
                f" of this rank, model.get_submodule(path)"
            )
        return self.parts[0]

    # --- refusals

    def to(self, *args: Any, **kwargs: Any) -> PartsAsModule:
        """Return the model if it is there already, and of that dtype; else raise ConfigError."""
        for wanted in (*args, kwargs.get("device"), kwargs.get("dtype")):
            if isinstance(wanted, torch.dtype):
                is_so = wanted == torch_dtype(self.plan.precision.master)
            elif isinstance(wanted, (str, torch.device)):
                is_so = torch.device(wanted).type == self.plan.device
            else:
                is_so = wanted is None or isinstance(wanted, bool)
            if not is_so:
                self._apply(None)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> NoReturn:
        raise ConfigError(
            f"the model is laid out: its weights lie on {self.plan.device} in {self.plan.precision.master}, as shards"
            f" that torch's groups and buckets know, so .to, .half and the like can neither move nor cast it. Choose"
            f" the device by the mesh, and dtypes by parallelize(..., techniques={{'precision': {{'master':"
            f" 'bfloat16'}}}})"
        )

    def compile(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise ConfigError: blocks are compiled by the plan."""
        raise ConfigError("the model is laid out: have it compiled by parallelize(..., techniques={'compile': True})")

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
            found = whole_state.gathered(self._tensors(), groups_of(self.mesh, Axis.PP), keep=not rank0_only)
        aliases = {alias: fact.name for fact in self.facts.parameters for alias in fact.aliases}
        found |= {alias: found[name] for alias, name in aliases.items() if name in found}
        made = {} if destination is None else destination
        made.update({f"{prefix}{name}": tensor for name, tensor in found.items()})
        return made

    @torch.no_grad()
    def load_state_dict(  # type: ignore[override]
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> IncompatibleKeys:
        """Copy whole tensors, by global name, into this rank's shards; every rank gives the whole dict.

        Raises:
            ConfigError: on all ranks; names are missing or unknown and ``strict``, a shape differs, or ``assign`` is
                set.
        """
        if assign:
            raise ConfigError("load_state_dict(assign=True) would replace shards by whole tensors: leave assign out")
        names = {fact.name: fact.aliases for fact in self.facts.parameters}
        names |= {fact.name: () for fact in self.facts.buffers if fact.persistent}
        known = {alias for name, aliases in names.items() for alias in (name, *aliases)}
        missing = [name for name, aliases in names.items() if not {name, *aliases} & set(state_dict)]
        unexpected = [name for name in state_dict if name not in known]
        state = {name: state_dict[one] for name, more in names.items() for one in (*more, name) if one in state_dict}
        whole_state.scatter(self._tensors(), state, missing, unexpected, strict=strict)
        if not self.is_lent:
            begin_anew(self.parts)
        return IncompatibleKeys(missing, unexpected)

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


class _Outside(torch.autograd.Function):
    """Passes an output on, and refuses a backward from it."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> NoReturn:
        raise UnsupportedError(
            "model(...) computes without gradients: over ranks, its backward would add up losses that were divided by"
            " each rank's own count. Train by forward_backward(batch), with loss_fn=meshwright.Loss(...)"
        )


def _guarded(output: Tensor) -> Tensor:
    if not output.is_floating_point():
        return output
    return _Outside.apply(output, torch.zeros((), requires_grad=True))


def _under(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


# --- compute without gradients, on any layout


class Inference(PartsAsModule):
    """The forwards of a laid-out model that no step follows."""

    microbatch_rows: int
    _opening: StepOpening
    _runner: Runner
    _inputs: Callable[[step_batch.Batch], dict[str, Any]]

    def __init__(self, parts: Sequence[ModelPart]):
        super().__init__(parts)
        self._cacheless = Cacheless()

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Evaluate the average without gradients; then restore each module's mode, and free gathered parameters."""
        modes = [(module, module.training) for part in self._parts for module in part.module.modules()]
        for part in self._parts:
            part.module.eval()
        try:
            with torch.no_grad(), self.averaged():
                yield
        finally:
            for module, training in modes:
                module.training = training
            for model in self.parts:
                fully_sharded.reshard(model)

    def row_log_probs(self, batch: step_batch.Batch) -> Tensor:
        """Return the sum of the labels' log-probabilities in each row, (rows,), without gradients (collective).

        Data ranks bring equally many rows. ``PreferenceLoss`` compares with those of the first weights.
        """
        named = self._opening.named(batch)
        pieces = self._opening.cut_alike(step_batch.microbatches(named, self.microbatch_rows))  # type: ignore[arg-type]
        with self._evaluating():
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
        how = Sampling(**sampling)
        of_model = self.parts[0], self.plan, self._opening.signature, self._inputs, self._runner.logits
        with self._evaluating(), next_logits(*of_model, self.facts.max_seq_len, self._cacheless) as following:
            return generate(following, prompt, tokens, how, stop=stop, heard=heard)

    @property
    def recomputes_text(self) -> str:
        """Why ``generate`` computes the whole window for each id; "" where it keeps keys and values."""
        return self._cacheless.reason or ""

    def logits(self, batch: step_batch.Batch) -> Tensor:
        """Return the logits of whole rows, (rows, seq, vocabulary), on all ranks that have these rows (collective)."""
        with self._evaluating():
            return self._runner.logits(self._opening.named(batch))  # type: ignore[arg-type]
