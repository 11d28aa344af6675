"""Find the operators whose results a selective recomputation can save, by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from meshwright.core.errors import ConfigError, MeshwrightError, UnsupportedError, nearest
from meshwright.core.imports import import_object
from meshwright.core.torch_private import schema_of

from .plan import KEPT

OPERATOR, OVERLOADED = type(torch.ops.aten.mm.default), type(torch.ops.aten.mm)
"""torch's classes of one form of an operator, and of an operator with all its forms."""


def check_kept(words: tuple[str, ...], where: str) -> Iterator[MeshwrightError]:
    """Yield errors in a list of results to save: names of groups, of operators, or "module:function"."""
    if not words:
        yield ConfigError(
            f"{where} is empty: nothing would be kept, which is techniques.activation_checkpointing = full"
        )
    for word in words:
        if word in KEPT:
            continue
        try:
            if ":" in word:
                policy_function(word, where)
            else:
                operators(word, where)
        except MeshwrightError as error:
            yield error


def policy_function(path: str, where: str) -> Any:
    """Import a user's policy, (context, operator, *args, **kwargs) → torch.utils.checkpoint.CheckpointPolicy.

    Raises:
        ConfigError: it cannot be imported, or called.
    """
    found = import_object(path)
    if not callable(found):
        raise ConfigError(
            f"{where}: '{path}' is a {type(found).__name__}, and not a function of (context, operator, *args, **kwargs)"
        )
    return found


def operators(name: str, where: str) -> tuple[Any, ...]:
    """Find torch's operator of a full name (``aten.mm.default``), or all savable forms of one (``aten.mm``).

    Raises:
        ConfigError: there is no operator of that name.
        UnsupportedError: its results cannot be saved.
    """
    found: Any = torch.ops
    parts = name.removeprefix("torch.ops.").split(".")
    try:
        for part in parts:
            found = getattr(found, part)
    except (AttributeError, RuntimeError):
        found = None
    if not isinstance(found, OPERATOR | OVERLOADED) or len(parts) not in (2, 3):
        raise ConfigError(
            f"{where}: '{name}' is neither a word nor an operator.{nearest(name, KEPT)} Legal: {', '.join(KEPT)}; an"
            f" operator of torch such as aten.mm.default; or module:function, a policy."
        )
    if parts[0] in ("c10d", "_c10d_functional"):
        raise UnsupportedError(
            f"{where}: '{name}' sends into a buffer that it is given. Say collectives, which keeps all that is"
            f" received."
        )
    forms = [getattr(found, form) for form in found.overloads()] if isinstance(found, OVERLOADED) else [found]
    fresh = tuple(form for form in forms if is_fresh(form))
    if not fresh:
        raise UnsupportedError(
            f"{where}: '{name}' writes into its inputs or gives a view of them, so that there is no result of its own"
            f" to keep. Name the operator that makes the tensor."
        )
    return fresh


def is_fresh(operator: Any) -> bool:
    """Return whether an operator's results are new: it writes into no argument, and returns no view of one."""
    schema = schema_of(operator)
    return bool(schema.returns) and all(value.alias_info is None for value in (*schema.arguments, *schema.returns))
