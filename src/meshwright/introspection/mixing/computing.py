"""Find modules of transformers that compute with the masks of attention themselves, as sparse attention does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.errors import UnsupportedError
from meshwright.core.names import clean
from meshwright.core.record import remember
from meshwright.core.torch_private import tree_map_with_path
from meshwright.introspection.small.copies import copy_of

from .interception import AttentionCall, Handled, handling
from .masks import MaskFunction, TokenMask


class _MasksByPlaces:
    """A handler whose masks are no tensors."""

    def mask(self, function: MaskFunction, padding: Tensor | None, plain: Callable[[], Any]) -> Any:
        return TokenMask(function, padding, lambda **given: given["value"])

    def attend(self, call: AttentionCall) -> Tensor:
        if isinstance(call.mask, Tensor):
            raise UnsupportedError("attention is called with another mask than the interface made")
        return call.query.new_zeros((*call.query.shape[:3], call.value.shape[-1]))


def computing_modules(model: nn.Module, inputs: dict[str, Any]) -> dict[str, list[str]]:
    """Map the modules of a small copy that compute with masks to the arguments by which they are given them.

    Args:
        model: whose attention is intercepted (``intercept_transformers``).
    """
    made, outputs, found = copy_of(model), _outputs(model, inputs), dict[str, list[str]]()
    handler = _MasksByPlaces()
    for module in made.modules():
        remember(module, Handled(handler))
    while True:
        entered: list[tuple[str, list[str]]] = []
        try:
            with torch.no_grad(), handling(handler), _following(made, entered):
                made(**inputs)
            return found
        except UnsupportedError:
            path, keys = entered[-1]
            if not path or path in found or path not in outputs:
                return found
            found[path] = keys
            made.get_submodule(path).forward = _giving(outputs[path])
        except Exception:  # noqa: BLE001  (whatever a model's code raises whose attention gives zeros)
            return found


def _outputs(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return what each module of a forward gives in its first call."""
    found: dict[str, Any] = {}

    def note(path: str, module: nn.Module, args: tuple, output: Any) -> None:
        found.setdefault(path, output)

    hooks = [module.register_forward_hook(partial(note, clean(path))) for path, module in model.named_modules()]
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _giving(output: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: output


@contextmanager
def _following(model: nn.Module, entered: list[tuple[str, list[str]]]) -> Iterator[None]:
    """Keep the modules whose forwards run now, with the arguments that are masks."""

    def enter(path: str) -> Callable[..., None]:
        def note(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            given: dict[str, Any] = {}
            tree_map_with_path(given.__setitem__, (args, kwargs))
            entered.append((path, [key for key, leaf in given.items() if isinstance(leaf, TokenMask)]))

        return note

    def leave(*_: Any) -> None:
        entered.pop()

    hooks = []
    for path, module in model.named_modules():
        hooks += [
            module.register_forward_pre_hook(enter(clean(path)), with_kwargs=True),
            module.register_forward_hook(leave),
        ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
