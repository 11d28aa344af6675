"""Give weights the values of their constructor or of their modules' own reset, on every layout.

This is for models whose constructor is unknown; other initialisation in it is lost (see ``constructed``).

Children come before parents, as in a constructor. A module's initialiser runs on unsharded CPU stand-ins of its
parameters and buffers and of those inside it (a parent may set its children's), with torch's generator seeded by
(seed, path of the module). Then each rank copies its shards. So the values do not depend on the layout, and only one
module at a time is unsharded.

Each rank replays the constructor's recorded steps (``introspection/constructor``) for the parameters of
which it holds a shard. A value is freed after the last step that needs it, so the peak is the rank's own share plus
the largest parameter. Up to ``STREAM_ELEMENTS`` elements, all random steps share one stream, and the weights are
bitwise those of the constructor in one process under the same seed. In a larger model every rank would draw the whole
model for its share, so each random step draws values by (seed, name, position): the same distributions, and the same
values on every layout. A parameter that one step fills is then drawn block by block.

A constructor that cannot be recorded runs whole, on one rank of a node after the other, and each rank takes its shards.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshwright.core.errors import UnsupportedError
from meshwright.core.names import clean, owner
from meshwright.core.record import recall, remember
from meshwright.core.torch_private import resetting
from meshwright.distributed.process import agree
from meshwright.distributed.process.world import get_world_info, ranks_per_node
from meshwright.distributed.quantize.nf4 import Rounded, pack, unpack
from meshwright.distributed.torch_private import DTensorSpec, TensorMeta, local_part
from meshwright.introspection.adapted_model import host_of_magnitude, is_adapter
from meshwright.introspection.constructor import (
    STREAM_ELEMENTS,
    ConstructorSteps,
    NotRecordedError,
    Step,
    Values,
    View,
    built,
    pass_over,
    record,
    seeded,
)
from meshwright.introspection.facts import ModelFacts
from meshwright.introspection.module_kinds import brings_initialiser, build_again
from meshwright.introspection.signature import core_of
from meshwright.introspection.source import builder_of
from meshwright.planning.plan import Plan
from meshwright.planning.quantize.format import plain_shape

from .shards import draw_rows, pieces, seed_of

# --- write and read the values of parameters, also of those that rest in 4 bits


class Destinations:
    """The tensors of models as writers of values see them: weights that rest in 4 bits are plain ones.

    Only one of those exists in its plain form at a time, and only this rank's shard of it; more where several
    initialisers write them.
    """

    def __init__(self, *models: nn.Module):
        found = ((module, recall(module, Rounded)) for model in models for module in model.modules())
        self._begun: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._plain = {id(layer._parameters["weight"]): plain.dtype for layer, plain in found if plain is not None}

    def is_packed(self, tensor: Tensor) -> bool:
        return id(tensor) in self._plain

    def shape_of(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the shape of the whole tensor's values."""
        if not self.is_packed(tensor):
            return tuple(tensor.shape)
        return plain_shape(tensor.shape)

    def dtype_of(self, tensor: Tensor) -> torch.dtype:
        """Return the dtype of the tensor's values."""
        return self._plain.get(id(tensor), tensor.dtype)

    @contextmanager
    def opened(self, tensor: Tensor) -> Iterator[Tensor]:
        """Yield the tensor to write values into, placed as ``tensor`` is; packed on exit, unless the body raises."""
        yield self.begun(tensor)
        self.close([id(tensor)])

    def begun(self, tensor: Tensor) -> Tensor:
        """Return the same tensor at each call until ``close``, for several writers of which each writes some values."""
        if not self.is_packed(tensor):
            return tensor
        if id(tensor) not in self._begun:
            here = local_part(tensor)
            values = torch.empty(plain_shape(here.shape), dtype=self._plain[id(tensor)], device=here.device)
            self._begun[id(tensor)] = here, values, self._placed_as(tensor, values)
        return self._begun[id(tensor)][2]

    def close(self, keys: Iterable[int]) -> None:
        """Pack what was written into the tensors with these ids."""
        for key in keys:
            if key in self._begun:
                here, values, _ = self._begun.pop(key)
                with torch.no_grad():
                    here.copy_(pack(values))

    def values_of(self, tensor: Tensor) -> Tensor:
        """Return a tensor's values, placed as the tensor is; the tensor itself if it does not rest in 4 bits."""
        if not self.is_packed(tensor):
            return tensor
        return self._placed_as(tensor, unpack(local_part(tensor).detach(), self.dtype_of(tensor)))

    def values(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the values of several tensors, by name."""
        return {name: self.values_of(tensor) for name, tensor in tensors.items()}

    def _placed_as(self, tensor: Tensor, values: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return values
        shape = torch.Size(self.shape_of(tensor))
        meta = TensorMeta(shape, (shape[1], 1), values.dtype)
        spec = DTensorSpec(tensor.device_mesh, tensor.placements, tensor_meta=meta)
        return type(tensor)(values, spec, requires_grad=False)


# --- initialise a model built on meta by its modules' ``reset_parameters``


def initialise_by_modules(
    model: nn.Module, seed: int, done: Collection[str] = (), *, buffers_only: bool = False
) -> set[str]:
    """Write every parameter and buffer of ``model`` in place (whole or sharded) that is not in ``done``.

    Returns the names written.

    Args:
        done: names of parameters and buffers that have their values already.
        buffers_only: initialise only modules with their own buffers; parameters that they write are not reported.

    Raises:
        UnsupportedError: no module initialises some of them; the text names them and the module that should.
    """
    written: set[str] = set()
    every = model.named_buffers() if buffers_only else (*model.named_parameters(), *model.named_buffers())
    wanted = {id(tensor): name for raw, tensor in every if (name := clean(raw)) not in done}
    asked: list[tuple[str, nn.Module, Callable[[], object]]] = []
    last: dict[int, nn.Module] = {}
    for raw, module in reversed(list(model.named_modules())) if wanted else ():
        held = [
            tensor for inner in module.modules() for tensor in (*inner._parameters.values(), *inner._buffers.values())
        ]
        is_asked = any(id(tensor) in wanted for tensor in held) and (module._buffers or not buffers_only)
        if is_asked and callable(reset := resetting(module)):
            asked.append((clean(raw), module, reset))
            last |= {id(tensor): module for tensor in held}
    destinations = Destinations(model)
    for path, module, reset in asked:
        found = _run(module, reset, seed_of(seed, path), destinations)
        written |= {wanted[key] for key in found if key in wanted}
        destinations.close(key for key, closing in last.items() if closing is module)
    left = [name for name in wanted.values() if name not in written]
    if left:
        path = owner(left[0])
        names = ", ".join(name.rpartition(".")[2] for name in left if owner(name) == path)
        other = (
            ""
            if builder_of(model) is not None
            else ", hand over the function that builds the model instead of the model"
        )
        raise UnsupportedError(
            f"module '{path or 'the model itself'}' ({type(model.get_submodule(path)).__name__}) was built on meta"
            f" and nothing initialises its {names}: give it a reset_parameters() that does{other}, or build the model"
            f" on the CPU with its weights"
        )
    return written


def _run(module: nn.Module, reset: Callable[[], object], seed: int, destinations: Destinations) -> set[int]:
    """Run one initialiser and copy the elements that it set; return the ids of the tensors that it set completely."""
    with _stand_ins(module, destinations) as pairs:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(seed)
            reset()
        made = [(tensor, find().detach()) for tensor, find in pairs]
    whole = set()
    for tensor, value in made:
        untouched = _untouched(value)
        if untouched.all():
            continue
        for piece in pieces(destinations.begun(tensor)):
            local, cut = piece.local, piece.slices
            local.copy_(torch.where(untouched[cut].to(local.device), local, value[cut].to(local)))
        if not untouched.any():
            whole.add(id(tensor))
    return whole


@contextmanager
def _stand_ins(module: nn.Module, destinations: Destinations) -> Iterator[list[tuple[Tensor, Callable[[], Tensor]]]]:
    """Replace all parameters and buffers inside by unwritten CPU tensors; restore them on exit.

    Yields pairs of an original and a function that returns its stand-in.
    """
    kept: list[tuple[dict, dict]] = []
    made: dict[int, Tensor] = {}
    pairs: list[tuple[Tensor, Callable[[], Tensor]]] = []
    for part in module.modules():
        for held in cast("list[dict[str, Any]]", [part._parameters, part._buffers]):
            kept.append((held, dict(held)))
            for name, tensor in list(held.items()):
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    shape, dtype = destinations.shape_of(tensor), destinations.dtype_of(tensor)
                    blank = torch.full(shape, _blank(dtype), dtype=dtype, device="cpu")
                    made[id(tensor)] = nn.Parameter(blank, tensor.requires_grad) if held is part._parameters else blank
                    pairs.append((tensor, lambda held=held, name=name: held[name]))
                held[name] = made[id(tensor)]
    try:
        yield pairs
    finally:
        for held, before in kept:
            held.update(before)


def _blank(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype == torch.bool else torch.iinfo(dtype).max


def _untouched(value: Tensor) -> Tensor:
    """Return a mask of the elements of a stand-in that were not written."""
    if value.is_floating_point() or value.is_complex():
        return torch.isnan(value)
    return ~value if value.dtype == torch.bool else value == _blank(value.dtype)


# --- give weights the constructor's values, on every layout


def write_constructed(
    model: nn.Module, seed: int, draw_on: str | None = None, *, only: Collection[str] | None = None
) -> set[str]:
    """Write the constructor's values into a model on real memory; return the names written.

    A constructor is known for a model that a function, a class or a config built, and for each pretrained model of
    transformers inside. Other tensors are not written, nor are those of which a constructor leaves elements unwritten.
    Collective if a constructor cannot be recorded.

    Args:
        only: names of the parameters and buffers to write; adapters among them are then drawn as if nothing else were,
            as in a process that reads the others from files. None: all.

    Raises:
        UnsupportedError: a module was added after the constructor.
    """
    written: set[str] = set()
    for path, build in _builders(model):
        part = _Part(model, path, only)
        if all(part.full_name(name) in written or host_of_magnitude(name) for name in part.tensors):
            continue
        try:
            recording = record(build, seed)[1]
        except NotRecordedError as error:
            _in_turns(lambda part=part, build=build: part.take(built(build, seed)), str(error), part)
        else:
            part.check(recording)
            _carry_out(part, recording, seed, draw_on)
        written |= part.written
    return written


def _builders(model: nn.Module) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """Yield the path and builder of the model, if known, and of the outermost pretrained models inside."""
    if (build := builder_of(model)) is not None:
        yield "", build
    found: list[str] = []
    for raw, module in model.named_modules():
        path = clean(raw)
        if brings_initialiser(module) and not any(outer == "" or path.startswith(f"{outer}.") for outer in found):
            found.append(path)
            kind = next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))
            yield path, lambda kind=kind, config=module.config: build_again(kind, config)


@dataclass
class _Part:
    """The model, or a module inside, that one constructor built.

    Attributes:
        written: names of the parameters and buffers that have their values.
    """

    model: nn.Module
    path: str
    only: Collection[str] | None
    written: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        module = self.model.get_submodule(self.path) if self.path else self.model
        self.modules = {clean(raw): inner for raw, inner in module.named_modules(remove_duplicate=False)}
        held = {clean(raw): tensor for raw, tensor in (*module.named_parameters(), *module.named_buffers())}
        wanted = held if self.only is None else {name for name in held if self.full_name(name) in self.only}
        self.tensors = {name: tensor for name, tensor in held.items() if name in wanted}
        self.destinations = Destinations(module)

    def check(self, recording: ConstructorSteps) -> None:
        """Raise UnsupportedError for a module with parameters that the constructor did not create."""
        for path, module in self.modules.items():
            if path not in recording.modules and any(tensor is not None for tensor in module._parameters.values()):
                raise UnsupportedError(
                    f"{self.full_name(path)} was put into {type(self.modules['']).__name__} behind its constructor, as"
                    f" adapters are, and is on meta, so its initial values are unknown. Build the model on the CPU"
                    f" with its weights, adapters included"
                )

    def full_name(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path and name else self.path or name

    def write(self, name: str, value: Tensor) -> None:
        with self.destinations.opened(self.tensors[name]) as tensor:
            for piece in pieces(tensor):
                piece.local.copy_(value[piece.slices])
        self.written.add(self.full_name(name))

    def take(self, twin: nn.Module) -> None:
        """Write the values of an equal model."""
        every = (*twin.named_parameters(remove_duplicate=False), *twin.named_buffers(remove_duplicate=False))
        there = {clean(raw): tensor for raw, tensor in every}
        for name in self.tensors.keys() & there.keys():
            self.write(name, there[name].detach())
        for path, inner in twin.named_modules():
            for attribute, value in vars(inner).items():
                if isinstance(value, Tensor):
                    self.keep(clean(path), attribute, value)

    def keep(self, path: str, attribute: str, value: Tensor) -> None:
        """Set a tensor attribute that is neither parameter nor buffer."""
        module = self.modules.get(path)
        if module is not None and isinstance(here := vars(module).get(attribute), Tensor) and here.is_meta:
            device = next((tensor.device for tensor in self.tensors.values()), torch.device("cpu"))
            vars(module)[attribute] = value.detach().to(device)


def _carry_out(part: _Part, recording: ConstructorSteps, seed: int, draw_on: str | None) -> None:
    views = {name: recording.tensors[name] for name in part.tensors if name in recording.tensors}
    names: dict[int, list[str]] = {}
    for name, view in views.items():
        names.setdefault(view.storage, []).append(name)
    attributes: dict[int, list[tuple[tuple[str, str], View]]] = {}
    for place, view in recording.plain.items():
        attributes.setdefault(view.storage, []).append((place, view))

    def give(storage: int, values: Values) -> None:
        for name in names.get(storage, ()):
            if not values.has_unwritten(views[name]):
                part.write(name, values.get(views[name]))
        for (path, attribute), view in attributes.get(storage, ()):
            part.keep(path, attribute, values.get(view).clone())

    storages = names.keys() | attributes.keys()
    if recording.elements <= STREAM_ELEMENTS:
        _in_stream(recording, storages, give, seed, _adapters(recording) if part.only is not None else frozenset())
        return
    # seeded by the first name of a tied tensor, also on a stage that holds it under the other
    firsts = {view.storage: name for name, view in reversed(recording.tensors.items())}
    for storage in sorted(storages):
        if any(host_of_magnitude(name) for name in names.get(storage, ())):
            continue  # a function of another parameter's values, which a stream of its own would draw anew
        steps = [step for step, _ in recording.needed({storage})]
        first = firsts.get(storage, str(storage))
        held = {name: views[name] for name in names.get(storage, ())}
        if held and _in_blocks(part, steps, held, seed, first, draw_on):
            continue
        values = Values(recording)
        for number, step in enumerate(steps):
            with seeded(seed_of(seed, first, number)):
                values.do(step)
        give(storage, values)


def _adapters(recording: ConstructorSteps) -> Set[int]:
    """Return the storages of all adapters of the model, also those that this rank has not."""
    return {view.storage for name, view in recording.tensors.items() if is_adapter(name)}


def _in_stream(
    recording: ConstructorSteps,
    storages: Set[int],
    give: Callable[[int, Values], None],
    seed: int,
    alone: Set[int],
) -> None:
    """Replay all steps in order from one seed; give away each value after the last step that reads it.

    Args:
        alone: storages whose random numbers are drawn as if no others were, if they are all that is to be drawn.
    """
    program = recording.needed(storages)
    drawn = {storage for step, _ in program if step.draws for storage in step.writes | step.creates}
    if drawn:
        program = recording.needed(storages, stream=alone if drawn <= alone else recording.bytes_of)
    last = {
        storage: number for number, (step, is_needed) in enumerate(program) if is_needed for storage in step.storages
    }
    ends: dict[int, list[int]] = {}
    for storage, number in last.items():
        ends.setdefault(number, []).append(storage)
    values = Values(recording)
    with seeded(seed):
        for number, (step, is_needed) in enumerate(program):
            (values.do if is_needed else pass_over)(step)
            for storage in ends.get(number, ()):
                give(storage, values)
                values.forget(storage)
        for storage in storages - last.keys():
            give(storage, values)


def _in_blocks(
    part: _Part, steps: list[Step], views: Mapping[str, View], seed: int, first: str, draw_on: str | None
) -> bool:
    """Fill a tensor block by block, if one step alone fills it with numbers; return whether that was done.

    Args:
        first: the tensor's first name, for the seed.
    """
    fill = steps[0].fills if len(steps) == 1 else None
    if fill is None or any(view != fill for view in views.values()):
        return False
    for name, view in views.items():
        with part.destinations.opened(part.tensors[name]) as tensor:
            for piece in pieces(tensor):
                if steps[0].draws:
                    draw_rows(piece.local, piece.offset, view.size, steps[0].onto, seed, first, draw_on, view.dtype)
                else:
                    steps[0].onto(piece.local, None)
        part.written.add(part.full_name(name))
    return True


def _in_turns(action: Callable[[], None], why: str, part: _Part) -> None:
    """Run ``action`` on one rank of a node after the other, since each then holds a whole model."""
    local, world = get_world_info()[1:]
    if world > 1 and local == 0:
        size = sum(tensor.numel() * tensor.element_size() for tensor in part.tensors.values())
        warnings.warn(
            f"the constructor of {type(part.modules['']).__name__} cannot be recorded: {why}. So it runs whole on every"
            f" rank, one of a node after the other, and takes memory for all weights there ({size / 2**30:.1f} GiB)",
            stacklevel=2,
        )
    for turn in range(ranks_per_node()):
        agree.together(action, here=turn == local)


# --- freeze parameters


@dataclass(frozen=True)
class _Joined:
    """Marks a model whose frozen token embedding takes part in backward."""


def apply(model: nn.Module, plan: Plan) -> nn.Module:
    """Set ``requires_grad`` as planned. It runs before sharding, which reads it."""
    frozen = set(plan.frozen)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(clean(name) not in frozen)
    return model


def join_backward(model: nn.Module, plan: Plan, facts: ModelFacts) -> None:
    """Let a frozen token embedding's output take part in backward, where what makes images' features is trained.

    A batch without images would else need no gradient in front of its first trained block, and none at all where
    images' modules alone are trained: ranks would end their units' backward in other orders, and sum gradients of
    different weights, or have no backward while others wait.
    """
    frozen = {clean(name) for name, parameter in model.named_parameters() if not parameter.requires_grad}
    frozen |= set(plan.frozen)
    trains_images = any(facts.is_of_images(p.name) and p.name not in frozen for p in facts.parameters)
    find = getattr(core_of(model), "get_input_embeddings", None)
    embedding = find() if trains_images and find is not None else None
    if not isinstance(embedding, nn.Module) or recall(model, _Joined) is not None:
        return

    def join(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, Tensor) and torch.is_grad_enabled() and not output.requires_grad:
            return output.requires_grad_().clone()  # a model may write images' features into it
        return output

    embedding.register_forward_hook(join)
    remember(model, _Joined())
