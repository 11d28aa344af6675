"""Measuring one block: which features of which layers move which others.

All linear layers' outputs are held at recorded values, one output feature of one of them is pushed at one token, and the inputs of all
of them are watched. What moves is *directly* influenced. The direct influence is block-sparse exactly where a block can be cut: features
of one head move together, features of an MLP alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .adapters import Adapted, find_adapted

PUSHED = 1
"""The token that is pushed. Not the first: it attends to nothing but itself, whatever its query."""


@dataclass
class Reach:
    """Which input features of a consumer each output feature of a producer moves.

    Attributes:
        places: (features of the producer, features of the consumer) bool.
        later: (features of the producer,) bool: whether it moves them at later tokens too.
    """

    places: Tensor
    later: Tensor


Influence = dict[tuple[str, str], Reach]
"""By (producer, consumer)."""


@dataclass(frozen=True)
class Call:
    """One call of a module, as it was recorded. The tensors are kept, so that their identity can be asked for."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    entered: Tensor | None
    """A copy of the first tensor among the arguments, which may be changed in place later."""
    left: Tensor | None
    """A copy of the output, or of the first tensor of a tuple."""

    @classmethod
    def of(cls, args: tuple, kwargs: dict, output: Any) -> Call:
        first = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        result = output[0] if isinstance(output, (tuple, list)) and output else output
        result = result.clone() if isinstance(result, Tensor) else None
        return cls(args, kwargs, output, None if first is None else first.clone(), result)

    @property
    def tensors(self) -> dict[int | str, Tensor]:
        """The tensors among the arguments, by position or name."""
        found = {key: value for key, value in enumerate(self.args) if isinstance(value, Tensor)}
        return found | {key: value for key, value in self.kwargs.items() if isinstance(value, Tensor)}


@dataclass
class Probe:
    """One block of a model in fp64 on the CPU, with a recorded call.

    Attributes:
        block: the module.
        calls: path within the block -> its calls, in order of first call; "" is the block itself.
        linears: path -> whether its weight is stored (in, out); those of adapters are not among them.
        adapted: linear layers with adapters, by path. Their calls are those of the modules around them.
        beside: those of adapters, as ``linears``.
    """

    block: nn.Module
    calls: dict[str, list[Call]]
    linears: dict[str, bool] = field(init=False)
    adapted: dict[str, Adapted] = field(init=False)
    beside: dict[str, bool] = field(init=False)

    def __post_init__(self) -> None:
        ways = {path: way for path, calls in self.calls.items() if (way := self._orientation(path, calls)) is not None}
        self.adapted = {found.host: found for found in find_adapted(self.block, self.calls, ways)}
        self.beside = {path: ways[path] for found in self.adapted.values() for path in found.linears}
        self.linears = {path: way for path, way in ways.items() if path not in self.beside}
        self.calls = self.calls | {host: self.calls[found.around] for host, found in self.adapted.items()}

    @property
    def call(self) -> Call:
        return self.calls[""][0]

    @property
    def hidden(self) -> int | str:
        """Which argument of the block is the residual stream."""
        return next(key for key, value in self.call.tensors.items() if value.is_floating_point() and value.dim() == 3)

    def module(self, path: str) -> nn.Module:
        return self.block.get_submodule(path)

    def place_of(self, path: str) -> str:
        """The module that gives what counts as a linear layer's output: it adds what adapters give, where there are any."""
        return self.adapted[path].around if path in self.adapted else path

    def output_of(self, path: str) -> Tensor:
        result = self.calls[path][0].left
        assert result is not None
        return result

    def _orientation(self, path: str, calls: list[Call]) -> bool | None:
        """Of a module that is y = x Wᵀ + b (False) or y = x W + b (True) on the last dim, called once with all tokens; else None."""
        module = self.module(path)
        weight = module._parameters.get("weight")
        x, result, bias = calls[0].entered, calls[0].left, module._parameters.get("bias")
        if weight is None or weight.dim() != 2 or len(calls) != 1 or x is None or result is None or not x.is_floating_point():
            return None
        entered = self.calls[""][0].entered if "" in self.calls else None
        if not isinstance(calls[0].output, Tensor) or (entered is not None and x[..., 0].numel() != entered.shape[:2].numel()):
            return None
        for transposed in (False, True):
            matrix = weight if transposed else weight.T
            if x.shape[-1] == matrix.shape[0] and result.shape == (*x.shape[:-1], matrix.shape[1]):
                expected = x @ matrix if bias is None else x @ matrix + bias
                if torch.allclose(expected, result, rtol=1e-5, atol=1e-8):
                    return transposed
        return None

    def rerun(self, change: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """The block's output for its recorded arguments; the hidden states among them changed."""
        args, kwargs = list(self.call.args), dict(self.call.kwargs)
        if change is not None:
            (args if isinstance(self.hidden, int) else kwargs)[self.hidden] = change(self.call.tensors[self.hidden])  # type: ignore[index]
        output = self.block(*args, **kwargs)
        return output[0] if isinstance(output, (tuple, list)) else output

    def influence(self, producers: list[str], held: list[str]) -> Influence:
        """Of each output feature of ``producers`` on the inputs of ``held``, all of whose outputs are kept at their recorded values."""
        found: Influence = {}
        with self._holding(held) as state:
            for producer in producers:
                features = self.output_of(producer).shape[-1]
                for feature in range(features):
                    state.push(producer, feature)
                    self._note(found, producer, features, feature, state.moved())
        return found

    def influence_of_tensor(self, name: str, tensor: Tensor, held: list[str]) -> Influence:
        """Of each element of a parameter or buffer of the block on the inputs of ``held``; the producer is called ``name``."""
        found: Influence = {}
        flat = tensor.detach().view(-1)
        with self._holding(held) as state:
            for element in range(flat.numel()):
                before = flat[element].clone()
                flat[element] = before + 0.37
                self._note(found, name, flat.numel(), element, state.moved())
                flat[element] = before
        return found

    def _note(self, found: Influence, producer: str, features: int, feature: int, moved: dict[str, Tensor]) -> None:
        for consumer, places in moved.items():
            by_token = self._by_token(places)
            columns = places.flatten(0, -2).any(0)
            if consumer != producer and columns.any():
                blank = Reach(torch.zeros((features, len(columns)), dtype=torch.bool), torch.zeros(features, dtype=torch.bool))
                reach = found.setdefault((producer, consumer), blank)
                reach.places[feature] = columns
                reach.later[feature] = by_token[:, PUSHED + 1 :].any()

    def is_linear(self, producer: str, feature: int, consumer: str, held: list[str]) -> bool:
        """Whether twice the push moves the consumer's input twice as far."""
        far = []
        with self._holding(held) as state:
            for times in (1.0, 2.0):
                state.push(producer, feature, times)
                far.append(state.inputs()[consumer] - state.rest[consumer])
        return torch.allclose(far[1], 2 * far[0], rtol=1e-4, atol=1e-6)

    def _by_token(self, tensor: Tensor) -> Tensor:
        """(rows, seq, features) of a tensor whose leading dims are the tokens, be they flattened or not; a view."""
        assert self.call.entered is not None
        return tensor.view(*self.call.entered.shape[:2], tensor.shape[-1])

    @contextmanager
    def giving(self, outputs: dict[str, Tensor]) -> Iterator[None]:
        """Modules give these outputs, whatever they compute."""
        places = {self.place_of(path): kept for path, kept in outputs.items()}
        handles = [self.module(path).register_forward_hook(lambda m, a, o, kept=kept: kept.clone()) for path, kept in places.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def _holding(self, held: list[str]) -> Iterator[_Held]:
        """Keep the outputs of ``held`` at what was recorded."""
        state = _Held(self, held)
        handles = [self.module(self.place_of(path)).register_forward_hook(state.hook(path), with_kwargs=True) for path in held]
        try:
            with torch.no_grad():
                state.rest = state.inputs()
                yield state
        finally:
            for handle in handles:
                handle.remove()


class _Held:
    """Modules of a block whose outputs are kept; one feature of one of them may be pushed."""

    def __init__(self, probe: Probe, held: list[str]):
        self.probe = probe
        self.rest: dict[str, Tensor] = {}
        self._pushed: tuple[str, int, float] | None = None
        self._seen: dict[str, Tensor] = {}

    def push(self, path: str, feature: int, times: float = 1.0) -> None:
        """Until the next is pushed."""
        self._pushed = (path, feature, times)

    def inputs(self) -> dict[str, Tensor]:
        """Run the block: what each of the modules is given."""
        self._seen.clear()
        self.probe.rerun()
        return dict(self._seen)

    def moved(self) -> dict[str, Tensor]:
        """Run the block: where each module's input is another than without a push."""
        return {path: value != self.rest[path] for path, value in self.inputs().items() if value.shape == self.rest[path].shape}

    def hook(self, path: str) -> Callable[..., Tensor]:
        recorded = self.probe.output_of(path)
        amount = 2 * recorded.abs().max() + 0.37  # past every kink, up in one row and down in the next
        push = self.probe._by_token(torch.zeros_like(recorded[..., 0]).unsqueeze(-1))
        push[0::2, PUSHED], push[1::2, PUSHED] = amount, -amount
        push = push.reshape(recorded.shape[:-1])

        def hold(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Tensor:
            entered = Call.of(args, kwargs, output).entered
            if entered is not None:
                self._seen[path] = entered
            kept = recorded.clone()
            if self._pushed is not None and self._pushed[0] == path:
                _, feature, times = self._pushed
                kept[..., feature] += times * push
            return kept

        return hold


def record(model: nn.Module, inputs: dict[str, Any], blocks: list[str]) -> tuple[dict[str, Probe], dict[str, list[Call]]]:
    """Run the model once: a Probe for each block, and the calls of the modules outside them, in order."""
    inside: dict[str, dict[str, list[Call]]] = {block: {} for block in blocks}
    outside: dict[str, list[Call]] = {}
    handles = []

    def watch(module: nn.Module, calls: dict[str, list[Call]], path: str) -> None:
        def note(_: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            calls.setdefault(path, []).append(Call.of(args, kwargs, output))

        handles.append(module.register_forward_hook(note, with_kwargs=True))

    for path, module in model.named_modules():
        home = next((block for block in blocks if path == block or path.startswith(block + ".")), None)
        if home is None:
            watch(module, outside, path)
        else:
            watch(module, inside[home], path[len(home) + 1 :])
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    probes = {block: Probe(model.get_submodule(block), calls) for block, calls in inside.items() if "" in calls}
    return probes, outside
