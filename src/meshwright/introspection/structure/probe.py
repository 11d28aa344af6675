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
        linears: path -> whether its weight is stored (in, out).
    """

    block: nn.Module
    calls: dict[str, list[Call]]
    linears: dict[str, bool] = field(init=False)

    def __post_init__(self) -> None:
        self.linears = {path: way for path, calls in self.calls.items() if (way := self._orientation(path, calls)) is not None}

    @property
    def call(self) -> Call:
        return self.calls[""][0]

    def module(self, path: str) -> nn.Module:
        return self.block.get_submodule(path)

    def output_of(self, path: str) -> Tensor:
        result = self.calls[path][0].left
        assert result is not None
        return result

    def _orientation(self, path: str, calls: list[Call]) -> bool | None:
        """Of a module that is y = x Wᵀ + b (False) or y = x W + b (True) on the last dim, called once; else None."""
        module = self.module(path)
        weight = module._parameters.get("weight")
        x, result, bias = calls[0].entered, calls[0].left, module._parameters.get("bias")
        if weight is None or weight.dim() != 2 or len(calls) != 1 or x is None or result is None or not x.is_floating_point():
            return None
        if not isinstance(calls[0].output, Tensor):  # a router, which gives more than its logits
            return None
        for transposed in (False, True):
            matrix = weight if transposed else weight.T
            if x.shape[-1] == matrix.shape[0] and result.shape == (*x.shape[:-1], matrix.shape[1]):
                expected = x @ matrix if bias is None else x @ matrix + bias
                if torch.allclose(expected, result, rtol=1e-5, atol=1e-8):
                    return transposed
        return None

    def rerun(self) -> Tensor:
        """The block's output for its recorded arguments."""
        output = self.block(*self.call.args, **self.call.kwargs)
        return output[0] if isinstance(output, (tuple, list)) else output

    def influence(self, producers: list[str], held: list[str]) -> Influence:
        """Of each output feature of ``producers`` on the inputs of ``held``, all of whose outputs are kept at their recorded values."""
        found: Influence = {}
        with self._holding(held) as (push, moved):
            for producer in producers:
                features = self.output_of(producer).shape[-1]
                for feature in range(features):
                    push(producer, feature)
                    self._note(found, producer, features, feature, moved())
        return found

    def influence_of_tensor(self, name: str, tensor: Tensor, held: list[str]) -> Influence:
        """Of each element of a parameter or buffer of the block on the inputs of ``held``; the producer is called ``name``."""
        found: Influence = {}
        flat = tensor.detach().view(-1)
        with self._holding(held) as (_, moved):
            for element in range(flat.numel()):
                before = flat[element].clone()
                flat[element] = before + 0.37
                self._note(found, name, flat.numel(), element, moved())
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

    def _by_token(self, tensor: Tensor) -> Tensor:
        """(rows, seq, …) of a tensor whose leading dims are the tokens, be they flattened or not."""
        assert self.call.entered is not None
        rows, seq = self.call.entered.shape[:2]
        return tensor.view(rows, seq, *tensor.shape[1:]) if len(tensor) == rows * seq else tensor

    @contextmanager
    def _holding(self, held: list[str]) -> Iterator[tuple[Callable[[str, int], None], Callable[[], dict[str, Tensor]]]]:
        """Hooks that keep outputs at what was recorded.

        Gives (push: one feature of one module's output, until the next is pushed; moved: run the block, and say where each held module's
        input is another than without a push).
        """
        pushed: list[tuple[str, int]] = []
        seen: dict[str, Tensor] = {}

        def hook(path: str):
            recorded = self.output_of(path)
            amount = 2 * recorded.abs().max() + 0.37  # past every kink, up in one row and down in the next
            push = self._by_token(torch.zeros_like(recorded[..., 0]).unsqueeze(-1))
            push[0::2, PUSHED], push[1::2, PUSHED] = amount, -amount
            push = push.reshape(recorded.shape[:-1])

            def hold(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Tensor:
                entered = Call.of(args, kwargs, output).entered
                if entered is not None:
                    seen[path] = entered
                kept = recorded.clone()
                if pushed and pushed[0][0] == path:
                    kept[..., pushed[0][1]] += push
                return kept

            return hold

        def push_next(path: str, feature: int) -> None:
            pushed[:] = [(path, feature)]

        def run() -> dict[str, Tensor]:
            seen.clear()
            self.rerun()
            return dict(seen)

        handles = [self.module(path).register_forward_hook(hook(path), with_kwargs=True) for path in held]
        try:
            with torch.no_grad():
                rest = run()
                yield push_next, lambda: {path: value != rest[path] for path, value in run().items() if value.shape == rest[path].shape}
        finally:
            for handle in handles:
                handle.remove()


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
