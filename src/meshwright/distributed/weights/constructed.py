"""Give weights the constructor's values, on every layout.

Each rank replays the constructor's recorded steps (``introspection/constructor/recording``) for the parameters of
which it holds a shard. A value is freed after the last step that needs it, so the peak is the rank's own share plus
the largest parameter. Up to ``STREAM_ELEMENTS`` elements, all random steps share one stream, and the weights are
bitwise those of the constructor in one process under the same seed. In a larger model every rank would draw the whole
model for its share, so each random step draws values by (seed, name, position): the same distributions, and the same
values on every layout. A parameter that one step fills is then drawn block by block.

A constructor that cannot be recorded runs whole, on one rank of a node after the other, and each rank takes its shards.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from meshwright.core.errors import UnsupportedError
from meshwright.core.names import clean
from meshwright.distributed.process import agree
from meshwright.distributed.process.world import get_world_info, ranks_per_node
from meshwright.introspection.adapted.names import host_of_magnitude, is_adapter
from meshwright.introspection.constructor.recording import STREAM_ELEMENTS, NotRecordedError, built, record, seeded
from meshwright.introspection.constructor.steps import ConstructorSteps, Step, Values, View, pass_over
from meshwright.introspection.source import builder_of
from meshwright.introspection.transformers_private import brings_initialiser, build_again

from .destinations import Destinations
from .shards import draw_rows, pieces, seed_of


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
