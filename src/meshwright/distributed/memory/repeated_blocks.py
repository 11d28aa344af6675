"""Run only some of the blocks that are alike in a dry run, and add the memory that the others would hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from meshwright.core.names import clean, is_within
from meshwright.planning.plan import Plan

from .account import MemoryAccount, MemoryUse

Kind = tuple[Any, ...]
PLAYED = 4
"""Number of blocks of a kind that run: the first, the second, which is measured, and the last two, around which memory
peaks (activations in host memory come back one block ahead).
"""


class RepeatedBlocks:
    """Wraps the blocks of a module that is ready for the dry run.

    A block is skipped only after another of its kind was measured and returned one tensor with the shape and dtype of
    one of its inputs. Otherwise it runs.
    """

    def __init__(self, module: nn.Module, plan: Plan, blocks: Sequence[str], account: MemoryAccount):
        self._account = account
        self._ways: dict[Kind, Callable[[tuple, dict[str, Any]], Any]] = {}
        self._kept: dict[Kind, Counter[MemoryUse]] = {}
        self._passed: dict[str, Kind] = {}
        self._entered: tuple[Kind, Counter[MemoryUse]] | None = None
        members: dict[Kind, list[str]] = {}
        for number, path in enumerate(blocks):
            members.setdefault(_kind(module.get_submodule(path), path, number, plan), []).append(path)
        for kind, paths in members.items():
            for place, path in enumerate(paths):
                is_repeated = len(paths) > PLAYED and 1 < place < len(paths) - 2
                self._wrap(module.get_submodule(path), path, kind, is_repeated=is_repeated, is_measured=place == 1)

    def kept(self) -> Counter[MemoryUse]:
        """Return the bytes, by kind, that the skipped blocks would hold."""
        total: Counter[MemoryUse] = Counter()
        for kind in self._passed.values():
            total.update(self._kept[kind])
        return total

    def _wrap(self, block: nn.Module, path: str, kind: Kind, *, is_repeated: bool, is_measured: bool) -> None:
        forward = block.forward

        def run_or_skip(*args: Any, **kwargs: Any) -> Any:
            self._enter(kind if is_measured else None)
            if is_repeated and kind in self._kept and kind in self._ways:
                self._passed[path] = kind
                return self._ways[kind](args, kwargs)
            output = forward(*args, **kwargs)
            if kind not in self._ways and (way := _way(args, kwargs, output)) is not None:
                self._ways[kind] = way
            return output

        block.forward = run_or_skip

    def _enter(self, kind: Kind | None) -> None:
        """Measure the memory that a block holds, from its entry to that of the next block."""
        if self._entered is not None:
            entered, before = self._entered
            self._kept.setdefault(entered, self._account.now() - before)
        self._entered = None if kind is None or kind in self._kept else (kind, self._account.now())


def _kind(block: nn.Module, path: str, number: int, plan: Plan) -> Kind:
    """Return a key, equal for blocks that hold equally much: modules, sizes, settings, and the plan's checkpointing."""
    modules = tuple((name, type(module), _settings(module, number)) for name, module in block.named_modules())
    parameters = tuple((clean(name), p.shape, p.requires_grad) for name, p in block.named_parameters())
    treated = tuple(other.removeprefix(path) for other in plan.checkpointed if is_within(other, path))
    return modules, parameters, treated


def _settings(module: nn.Module, number: int) -> tuple[tuple[str, Any], ...]:
    """Return the plain values among a module's attributes, except the number of its block."""
    plain = (bool, int, float, str, type(None))
    return tuple(
        sorted(
            (k, repr(v))
            for k, v in vars(module).items()
            if isinstance(v, plain) and (isinstance(v, bool) or v != number)
        )
    )


def _way(args: tuple, kwargs: dict[str, Any], output: Any) -> Callable[[tuple, dict[str, Any]], Any] | None:
    """Return a function that passes on the argument with the shape of a block's one output; None if there is none."""
    is_tuple = type(output) is tuple and len(output) == 1
    given = output[0] if is_tuple else output
    if not isinstance(given, Tensor):
        return None
    taken = [*enumerate(args), *kwargs.items()]
    keys = [
        key
        for key, value in taken
        if isinstance(value, Tensor) and value.shape == given.shape and value.dtype == given.dtype
    ]
    if not keys:
        return None
    key = keys[0]

    def way(args: tuple, kwargs: dict[str, Any]) -> Any:
        hidden = args[key] if isinstance(key, int) else kwargs[key]
        return (hidden,) if is_tuple else hidden

    return way
