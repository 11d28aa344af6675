"""Watch the calls of a model's modules: hooks for as long as a forward runs, and records of inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from meshwright.core.names import clean


class SeenEnough(Exception):
    """Ends a forward once what it was run for was seen."""


@contextmanager
def watching(
    modules: Iterable[tuple[str, nn.Module]],
    before: Callable[..., Any] | None = None,
    after: Callable[..., Any] | None = None,
) -> Iterator[None]:
    """Call functions before and after the forwards of modules, inside the context.

    Args:
        modules: paths and modules, as ``named_modules`` yields them; functions are given clean paths.
        before: (path, module, args, kwargs) -> None.
        after: (path, module, args, kwargs, output) -> None, or what takes the output's place.
    """
    with ExitStack() as stack:
        for path, module in modules:
            if before is not None:
                hook = module.register_forward_pre_hook(partial(before, clean(path)), with_kwargs=True)
                stack.callback(hook.remove)
            if after is not None:
                hook = module.register_forward_hook(partial(after, clean(path)), with_kwargs=True)
                stack.callback(hook.remove)
        yield


@contextmanager
def tracking(modules: Iterable[tuple[str, nn.Module]], running: list[str]) -> Iterator[None]:
    """Keep in ``running`` the paths of the modules whose forwards run, the innermost last."""
    with watching(modules, lambda path, *_: running.append(path), lambda *_: (running.pop(), None)[1]):
        yield


@dataclass(frozen=True)
class Call:
    """One recorded call of a module, which holds the tensors themselves for identity checks."""

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
