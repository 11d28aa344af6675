"""Intercept calls of attention: through interfaces, of torch's function, of modules that compute with masks.

Nothing global is patched. A model of transformers is told the name of an implementation that is registered here, by
the public registry; of other modules the forward runs under torch's function mode.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.core.errors import UnsupportedError
from meshwright.core.record import recall, remember, wrap
from meshwright.core.torch_private import tree_map_with_path
from meshwright.introspection.calls import watching
from meshwright.introspection.module_kinds import name_attention, name_of_attention
from meshwright.introspection.small.copies import copy_of

from .masks import MaskFunction, TokenMask, sdpa_arguments

PREFIX = "meshwright_"
"""Registered names are this and the name of the implementation that computes: ``meshwright_sdpa``."""
ADDING = ("eager", "flex_attention")
"""Implementations that add a mask tensor to scores."""


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call of attention.

    Attributes:
        query: (rows, heads, queries, features).
        key, value: (rows, key heads, keys, features).
        mask: made by a handler, or the model's own tensor, or None.
        is_causal: without a mask: attend to earlier tokens only.
        compute: (query, key, value, mask, is_causal) -> (rows, heads, queries, features), as the model would; a mask
            of (rows or 1, 1, queries, keys) may be bool whatever the model's own are.
        interface: the call came through transformers' interface, and masks by rules of places.
        scale: factor of the products; None: features^-0.5.
        dropout: probability.
        extras: other arguments by which transformers' models change attention (a soft cap, sinks, biases).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Any
    is_causal: bool
    compute: Callable[[Tensor, Tensor, Tensor, Any, bool], Tensor]
    interface: bool = False
    scale: float | None = None
    dropout: float = 0.0
    extras: Mapping[str, Any] = field(default_factory=dict)

    def as_given(self) -> Tensor:
        """Compute the call as the model would."""
        return self.compute(self.query, self.key, self.value, self.mask, self.is_causal)


class Handler:
    """Computes the calls of attention that are intercepted: as the model would, unless a subclass says otherwise."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Return (rows, heads, queries, features)."""
        return call.as_given()

    def mask(self, function: MaskFunction, padding: Tensor | None, plain: Callable[[], Any]) -> Any:
        """Return a mask by a rule of places; ``plain`` makes the one that the model would have."""
        return plain()


@dataclass(frozen=True, eq=False)
class Handled:
    """The handler of one module's calls, kept on the module."""

    handler: Handler


_running = threading.local()


@contextmanager
def handling(handler: Handler) -> Iterator[None]:
    """Let a handler make the masks of transformers' models whose forward runs inside, on this thread."""
    before = getattr(_running, "handler", None)
    _running.handler = handler
    try:
        yield
    finally:
        _running.handler = before


# --- F.scaled_dot_product_attention


class SdpaCalls(TorchFunctionMode):
    """Hands calls of ``F.scaled_dot_product_attention`` to a handler."""

    def __init__(self, handler: Handler):
        super().__init__()
        self.handler = handler

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self.handler.attend(sdpa_call(sdpa_arguments(args, kwargs or {})))


def sdpa_call(given: dict[str, Any]) -> AttentionCall:
    """Describe a call of ``F.scaled_dot_product_attention`` by its named arguments."""
    others = {key: value for key, value in given.items() if key in ("scale", "enable_gqa", "dropout_p")}

    def compute(query: Tensor, key: Tensor, value: Tensor, mask: Any, is_causal: bool = False) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=is_causal, **others)

    query, key, value = given["query"], given["key"], given["value"]
    return AttentionCall(
        query,
        key,
        value,
        given.get("attn_mask"),
        bool(given.get("is_causal", False)),
        compute,
        scale=given.get("scale"),
        dropout=given.get("dropout_p", 0.0),
    )


def intercept_calls(module: nn.Module, intercepting: Callable[[], SdpaCalls], change: str) -> None:
    """Run a module's forward inside a mode that hands calls to a handler, also when the forward is recomputed."""
    forward = module.forward

    def intercepted_forward(*args: Any, **kwargs: Any) -> Any:
        with intercepting():
            return forward(*args, **kwargs)

    wrap(module, intercepted_forward, change)


# --- transformers


def intercept_transformers(model: nn.Module) -> str:
    """Let a model of transformers compute attention, and make masks, through the handler of each module.

    Returns:
        The name of the implementation that computes ("sdpa", "eager" …); "" for models without the interface, which
        are left as they are.
    """
    name = name_of_attention(getattr(model, "config", None))
    choose = getattr(model, "set_attn_implementation", None)
    if not name or not callable(choose) or "transformers" not in sys.modules:
        return ""
    from transformers import AttentionInterface, AttentionMaskInterface

    base = name.removeprefix(PREFIX)
    AttentionInterface.register(PREFIX + base, functools.partial(_attention, base))

    def mask(**given: Any) -> Any:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

        plain = functools.partial(ALL_MASK_ATTENTION_FUNCTIONS[base], **given)
        handler: Handler | None = getattr(_running, "handler", None)
        return plain() if handler is None else handler.mask(given["mask_function"], given.get("attention_mask"), plain)

    AttentionMaskInterface.register(PREFIX + base, mask)
    choose(PREFIX + base)  # warns, and changes nothing, for models that call no interface
    return base if name_of_attention(model.config) == PREFIX + base else ""


@contextmanager
def not_intercepted(module: nn.Module, base: str) -> Iterator[None]:
    """Give a module's configs back the name of their own implementation, which models' code may ask for."""
    configs = {id(config): config for part in module.modules() if (config := getattr(part, "config", None)) is not None}
    changed = [config for config in configs.values() if name_of_attention(config) == PREFIX + base]
    try:
        for config in changed:
            name_attention(config, base)
        yield
    finally:
        for config in changed:
            name_attention(config, PREFIX + base)


def _attention(
    base: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any
) -> tuple[Tensor, None]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    homes = map(inspect.getmodule, type(module).__mro__)
    eager = (getattr(home, "eager_attention_forward", None) for home in homes)
    function: Any = next(filter(callable, eager), None) if base == "eager" else ALL_ATTENTION_FUNCTIONS[base]
    if function is None:
        raise UnsupportedError(f"{type(module).__name__} has no eager attention that takes keys of other ranks")
    handled = recall(module, Handled)
    if handled is None and not isinstance(attention_mask, TokenMask):
        return function(module, query, key, value, attention_mask, **given)
    handler = getattr(_running, "handler", None) if handled is None else handled.handler
    is_causal = given.pop("is_causal", None)
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal

    def compute(query: Tensor, key: Tensor, value: Tensor, mask: Any, is_causal: bool | None = None) -> Tensor:
        if base in ADDING and isinstance(mask, Tensor) and mask.dtype is torch.bool:
            blocked = torch.finfo(query.dtype).min
            mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(~mask, blocked)
        output, _ = function(module, query, key, value, mask, is_causal=is_causal, **given)
        return output.transpose(1, 2)

    known = ("scaling", "dropout")
    extras = {key: value for key, value in given.items() if isinstance(value, (Tensor, float)) and key not in known}
    call = AttentionCall(
        query,
        key,
        value,
        attention_mask,
        bool(is_causal),
        compute,
        interface=True,
        scale=given.get("scaling"),
        dropout=given.get("dropout", 0.0),
        extras=extras,
    )
    assert handler is not None
    return handler.attend(call).transpose(1, 2).contiguous(), None


# --- find modules of transformers that compute with the masks of attention themselves, as sparse attention does


class _MasksByPlaces(Handler):
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
    outputs: dict[str, Any] = {}  # of each module's first call

    def note(path: str, module: nn.Module, args: tuple, kwargs: Any, output: Any) -> None:
        outputs.setdefault(path, output)

    with torch.no_grad(), watching(model.named_modules(), after=note):
        model(**inputs)
    made, found = copy_of(model), dict[str, list[str]]()
    handler = _MasksByPlaces()
    for module in made.modules():
        remember(module, Handled(handler))
    while True:
        entered: list[tuple[str, list[str]]] = []  # modules whose forwards run now, with the arguments that are masks

        def enter(path: str, module: nn.Module, args: tuple, kwargs: Any, entered: list[Any] = entered) -> None:
            given: dict[str, Any] = {}
            tree_map_with_path(given.__setitem__, (args, kwargs))
            entered.append((path, [key for key, leaf in given.items() if isinstance(leaf, TokenMask)]))

        following = watching(made.named_modules(), enter, lambda *_, entered=entered: (entered.pop(), None)[1])
        try:
            with torch.no_grad(), handling(handler), following:
                made(**inputs)
            return found
        except UnsupportedError:
            path, keys = entered[-1]
            if not path or path in found or path not in outputs:
                return found
            found[path] = keys
            made.get_submodule(path).forward = lambda *args, output=outputs[path], **kwargs: output
        except Exception:  # noqa: BLE001  (whatever a model's code raises whose attention gives zeros)
            return found
