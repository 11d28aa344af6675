"""Sketch tensors as a few numbers, and observe a step: every module's output and its gradient, row by row.

A sketch is a few random projections (Johnson and Lindenstrauss 1984), which preserve distances:
‖sketch(x) − sketch(y)‖ is about ‖x − y‖. The directions are products of signs: two vectors along the last dim, and a
few for each of them along the others. So a tensor is read only twice, tables of signs are small and exact in every
dtype, and a shard's sketch is a partial sum of the whole tensor's.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from meshwright.comparison.equality import relative_error
from meshwright.core.names import clean, is_within
from meshwright.core.record import computed
from meshwright.core.torch_private import compiled_call, is_in_backward, set_compiled_call, version_of

ROW_WIDTH = 8
"""Number of projections per row of a batch."""
TENSOR_WIDTH = 16
"""Number of projections per parameter."""
VECTORS = 2
"""Number of directions along the last dim."""


def sketch_rows(tensor: Tensor, places: Tensor | None = None, length: int | None = None) -> Tensor:
    """Sketch each row: (rows, …, features) of any float dtype → (rows, ROW_WIDTH) float64, on the tensor's device.

    Args:
        places, length: for a tensor that is a part of each row, (rows, tokens, …, features): the (tokens,) places of
            its tokens in a whole row, and the number of a whole row's. The sketches of disjoint parts add up to the
            whole's.
    """
    n_rows, features = tensor.shape[0], tensor.shape[-1]
    whole = tensor.shape[1:-1] if length is None else (length, *tensor.shape[2:-1])
    if math.prod(whole) < ROW_WIDTH:  # too few places for directions that differ
        tensor, whole, features = tensor.unsqueeze(-1), (*whole, features), 1
    along = _products(tensor.reshape(-1, features), _signs(VECTORS, features, "last", tensor.dtype, tensor.device))
    along = along.unflatten(1, (n_rows, math.prod(tensor.shape[1:-1]))).double()  # (VECTORS, rows, places)
    weights = _signs(ROW_WIDTH, math.prod(whole), "others", along.dtype, along.device).view(VECTORS, -1, *whole)
    if places is not None:
        weights = weights.index_select(2, places.to(weights.device))
    weights = weights.flatten(2)
    return (along @ weights.mT).transpose(0, 1).reshape(n_rows, ROW_WIDTH) / ROW_WIDTH**0.5


def sketch_part(part: Tensor, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """Sketch the part of a tensor at ``offset``, (TENSOR_WIDTH,) float64; disjoint parts add up to the whole's.

    Args:
        shape: the whole tensor's shape. Parts may be cut along any dims.
    """
    if part.numel() == 0:
        return torch.zeros(TENSOR_WIDTH, dtype=torch.float64, device=part.device)
    if math.prod(shape[:-1]) < TENSOR_WIDTH:  # too few places for directions that differ
        part, offset, shape = part.unsqueeze(-1), (*offset, 0), (*shape, 1)
    last = _signs(VECTORS, shape[-1], "last", part.dtype, part.device).narrow(1, offset[-1], part.shape[-1])
    along = _products(part.reshape(-1, part.shape[-1]), last).double()  # (VECTORS, places)
    weights = _signs(TENSOR_WIDTH, math.prod(shape[:-1]), "others", along.dtype, along.device).view(-1, *shape[:-1])
    for dim, (start, size) in enumerate(zip(offset[:-1], part.shape[:-1], strict=True), 1):
        weights = weights.narrow(dim, start, size)
    weights = weights.reshape(VECTORS, -1, along.shape[-1])
    return (weights @ along.unsqueeze(-1)).flatten() / TENSOR_WIDTH**0.5


def _products(matrix: Tensor, vectors: Tensor) -> Tensor:
    """Multiply a matrix by vectors: (n, features), (VECTORS, features) → (VECTORS, n)."""
    return torch.stack([matrix @ vector for vector in vectors])


@lru_cache(maxsize=256)
def _signs(number: int, n: int, role: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Draw a table of ±1, (number, n), that depends on (number, n, role) alone."""
    generator = torch.Generator().manual_seed(4 * n + 2 * (role == "last") + (number == TENSOR_WIDTH))
    return (2 * torch.randint(0, 2, (number, n), generator=generator, device="cpu") - 1).to(device, dtype)


# --- observe a step


@dataclass(frozen=True, eq=False)
class TokensOfRank:
    """The tokens of each row that a rank has where ranks have parts of rows.

    Attributes:
        places: (rows of a step or 1, tokens) int64: the places of these tokens in each row; 1: alike in all rows.
        filled: number of tokens in the rank's tensors, those included that only fill up.
        length: number of tokens of a whole row.
        now: returns the places for the rows that are computed at the moment, where rows differ.
    """

    places: Tensor = field(default_factory=lambda: torch.zeros((1, 0), dtype=torch.int64))
    filled: int = 0
    length: int = 0
    now: Callable[[], Tensor] | None = None

    @classmethod
    def run(cls, rank: int, ranks: int, length: int) -> TokensOfRank:
        """The ``rank``-th of ``ranks`` equal runs of ⌈length / ranks⌉ tokens, the last one filled up."""
        share = -(-length // ranks)
        places = torch.arange(min(rank * share, length), min((rank + 1) * share, length))
        return cls(places[None], share, length)

    @property
    def count(self) -> int:
        """Tokens of a row, without those that fill up."""
        return self.places.shape[1]

    def of_step(self) -> TokensOfRank:
        """Return the value without ``now``, for other processes."""
        return replace(self, now=None)

    def are_those_of(self, tensor: Tensor) -> bool:
        """Return whether a module's output (rows, tokens, …, features) is this rank's part of a whole one."""
        return (
            self.filled < self.length
            and tensor.dim() > 2
            and tensor.shape[1] == self.filled
            and not hasattr(tensor, "full_tensor")
        )

    def sketch(self, part: Tensor) -> Tensor:
        """Sketch a part without its filling; the ranks' sketches add up to the sketch of the whole."""
        places = self.places if self.now is None else self.now()
        part = part[:, : self.count]
        if len(places) == 1:
            return sketch_rows(part, places[0], self.length)
        return torch.cat([sketch_rows(row[None], its, self.length) for row, its in zip(part, places, strict=True)])


@dataclass
class Observed:
    """Sketches by module, in the order in which modules first ended (forward) and were first reached (backward).

    A module that is called several times in a forward has a name for each call: ``norm``, ``norm (call 2)``. Outputs
    without a row for each row of the batch, such as a table of positions, are not observed. The sketch of an output
    that is this rank's ``tokens`` of each row is a partial sum of the whole output's sketch.
    """

    tokens: TokensOfRank = TokensOfRank()
    forward: dict[str, list[Tensor]] = field(default_factory=dict)
    backward: dict[str, list[Tensor]] = field(default_factory=dict)
    compiled: list[str] = field(default_factory=list)
    """Modules that run compiled: their outputs are observed, nothing inside them."""
    recomputed: dict[str, float] = field(default_factory=dict)
    """The largest relative error of a module's outputs that the backward recomputed, by module."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Shape of each call's first output without its rows; of the whole row where the output is a part of each row."""
    _homes: dict[str, int] = field(default_factory=dict)
    _calls: Counter[str] = field(default_factory=Counter)
    _computed: dict[str, list[Tensor]] = field(default_factory=dict)
    _without_graph: set[str] = field(default_factory=set)
    _n_rows: int = 0
    _last: _Seen | None = None

    def rows(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Concatenate all microbatches' sketches: (rows, ROW_WIDTH) float64 for each module, on its device."""
        forward = {name: torch.cat(parts) for name, parts in self.forward.items()}
        return forward, {name: torch.cat(parts) for name, parts in self.backward.items()}

    def graphless(self) -> tuple[str, ...]:
        """List the modules whose outputs had no graph in some microbatch."""
        return tuple(sorted(self._without_graph))

    def begin(self, root: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Begin a forward of the whole model (one per microbatch)."""
        if not is_in_backward():
            self._calls.clear()
            self._n_rows = next((len(value) for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), 0)

    def note(self, name: str, part: PartOfModel | None, module: nn.Module, args: Any, output: Any) -> None:
        """Sketch the output of a module that ended, as its hook.

        Args:
            part: the part of the model that runs a module without parameters. An output without values belongs to
                another part, and one that several parts compute belongs to the first.
        """
        first = output[0] if isinstance(output, tuple | list) and output else output
        first = getattr(first, "logits", first)
        if not (isinstance(first, Tensor) and first.is_floating_point() and first.dim() >= 2):
            return
        tensor = computed(first)
        if len(tensor) != self._n_rows:
            return
        if part is not None and (
            # a parameterless module's output is empty, or computed from a stand-in: another part has it
            (part.ends if tensor.numel() == 0 else part.begins and bool(tensor.flatten()[:1].isnan()))
            or self._homes.setdefault(name, part.number) != part.number
        ):
            return
        if is_in_backward():
            if not is_stand_in(tensor):
                # Compare a recomputed output with the nearest of the module's forward calls, since the call
                # is unknown
                again = self._sketch(tensor.detach())
                before = [sketch for sketch in self._computed.get(name, ()) if sketch.shape == again.shape]
                if before:
                    error = min(relative_error(again, sketch) for sketch in before)
                    self.recomputed[name] = max(error, self.recomputed.get(name, 0.0))
                if (
                    name in self._without_graph and tensor.requires_grad
                ):  # reentrant checkpointing makes the graph only now
                    self._without_graph.discard(name)
                    tensor.register_hook(partial(self._came_back, [name]))
            return
        self._calls[name] += 1
        call = name if self._calls[name] == 1 else f"{name} (call {self._calls[name]})"
        if is_stand_in(tensor):
            self.shapes.setdefault(call, ())
            return
        if self._last is None or self._last.tensor() is not tensor or self._last.version != version_of(tensor):
            self._last = _Seen(weakref.ref(tensor), version_of(tensor), self._sketch(tensor.detach()))
            if tensor.requires_grad:
                tensor.register_hook(partial(self._came_back, self._last.calls))
        self._last.calls.append(call)  # several where a module returns its last child's output
        self.forward.setdefault(call, []).append(self._last.sketch)
        length, *others = tensor.shape[1:]
        self.shapes.setdefault(call, (self.tokens.length if self.tokens.are_those_of(tensor) else length, *others))
        self._computed.setdefault(name, []).append(self._last.sketch)
        if not tensor.requires_grad:
            self._without_graph.add(call)

    def outside(
        self, name: str, module: nn.Module, compiled: Callable[..., Any], *, is_root: bool
    ) -> Callable[..., Any]:
        """Return a compiled module's call that sketches its output."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if is_root:
                self.begin(module, args, kwargs)
            output = compiled(*args, **kwargs)
            self.note(name, None, module, args, output)
            return output

        return call

    def _came_back(self, calls: list[str], gradient: Tensor) -> None:
        found = self._sketch(gradient)
        for call in calls:
            self.backward.setdefault(call, []).append(found)

    def _sketch(self, tensor: Tensor) -> Tensor:
        if self.tokens.are_those_of(tensor):
            return self.tokens.sketch(tensor)
        gathered: Any = getattr(tensor, "full_tensor", None)  # collective, of a tensor that is sharded over ranks
        return sketch_rows(tensor if gathered is None else gathered())


@dataclass(frozen=True)
class PartOfModel:
    """One of several parts that a process has of a model.

    Attributes:
        number: the part's index.
        begins: the part's first blocks receive another process's output.
        ends: the part's last blocks send their output to another process.
    """

    number: int
    begins: bool
    ends: bool


@dataclass
class _Seen:
    """A tensor that the modules of ``calls`` returned."""

    tensor: weakref.ref[Tensor]
    version: int
    sketch: Tensor
    calls: list[str] = field(default_factory=list)


def is_stand_in(tensor: Tensor) -> bool:
    """Return whether a tensor stands in for values that are elsewhere.

    Such a tensor is one expanded NaN (another rank has the values) or has no elements (the logits of a head that
    computed the loss instead)."""
    if tensor.numel() == 0:
        return True
    return (
        tensor.is_floating_point()
        and not any(tensor.stride())
        and tensor.dim() > 0
        and bool(tensor.flatten()[:1].isnan().any())
    )


@contextmanager
def observing(
    *models: nn.Module,
    opaque: Collection[str] = (),
    tokens: TokensOfRank = TokensOfRank(),
    unobserved: Collection[str] = (),
) -> Iterator[Observed]:
    """Sketch the outputs of ``models``, a model or parts of one, inside the block.

    Args:
        opaque: modules whose inside is not observed.
        tokens: each row's tokens on this rank, where ranks share out sequences.
        unobserved: modules whose outputs have no dim of rows, and neither have those inside: a tower of images.

    A compiled module is observed from outside: hooks on or in it would be compiled with it, and break its graph.
    """
    observed = Observed(tokens)
    with ExitStack() as stack:
        stack.enter_context(set_checkpoint_early_stop(False))  # else the module that is recomputed last does not end
        for number, model in enumerate(models):
            if compiled_call(model) is None:
                stack.callback(model.register_forward_pre_hook(observed.begin, with_kwargs=True).remove)
            ended = [clean(raw) for raw, module in model.named_modules() if getattr(module, "ends_part", False)]
            begins = any(getattr(module, "begins_part", False) for module in model.modules())
            part = PartOfModel(number, begins, bool(ended)) if begins or ended else None
            for raw, module in model.named_modules():
                name = clean(raw)
                if is_inside(name, (*observed.compiled, *opaque)) or isinstance(module, nn.ModuleList | nn.ModuleDict):
                    continue
                if any(is_within(name, other) for other in unobserved):
                    continue
                if isinstance(module, nn.Identity) and module is not model:
                    continue  # it gives what it took: the tensor, and what comes back to it, are another module's
                if getattr(module, "is_absent", False) or any(is_within(end, name) for end in ended):
                    continue  # another part has the module or its output
                if (compiled := compiled_call(module)) is not None:
                    observed.compiled.append(name)
                    set_compiled_call(module, observed.outside(name, module, compiled, is_root=module is model))
                    stack.callback(set_compiled_call, module, compiled)
                    continue
                computes = any(parameter is not None for parameter in module._parameters.values())
                note = partial(observed.note, name, None if computes else part)
                stack.callback(module.register_forward_hook(note).remove)
        yield observed


def is_inside(name: str, modules: Collection[str]) -> bool:
    """Return whether a module (or a call of it) is inside one of ``modules``."""
    return any(name.startswith(f"{module}.") if module else name for module in modules)
