"""Tests whose body runs on every rank, and the words of what is refused there."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from meshwright.core.errors import MeshwrightError


def ranks(world: int | Callable[..., int], *, timeout: float = 120.0, pool: str = "pool") -> Callable[..., Any]:
    """Run a test's body in as many processes; its arguments travel there.

    Args:
        world: the number, or a function of some of the test's arguments.
        pool: the fixture whose workers run it; "device_pool" has the pretend accelerator.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**given: Any) -> None:
            workers = given.pop(pool)
            size = world if isinstance(world, int) else world(*(given[n] for n in inspect.signature(world).parameters))
            job = on_rank if pool == "pool" else on_device_rank
            workers.run(job, test, given, world=size, timeout=timeout)

        asked = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in (pool,)]
        test.__signature__ = inspect.Signature([*asked, *inspect.signature(body).parameters.values()])  # type: ignore[attr-defined]
        test.body = body  # type: ignore[attr-defined]
        return test

    return decorate


def on_rank(test: Any, given: dict[str, Any]) -> None:
    """Run a test's body; what it fails by says what its variables were, as pytest would."""
    try:
        test.body(**given)
    except AssertionError as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        known = {} if trace is None else trace.tb_frame.f_locals
        lines = (f"  {name} = {repr(value)[:2000]}" for name, value in known.items())
        raise AssertionError("\n".join([str(error), *lines])) from error


def on_device_rank(test: Any, given: dict[str, Any]) -> None:
    from .pretend import with_device

    with_device(on_rank, test, given)


def refusal(call: Callable[[], object], kind: type[Exception] = MeshwrightError) -> str:
    """Return the words in which a call is refused; none where it goes through."""
    try:
        call()
    except kind as error:
        return str(error)
    return ""


def told(call: Callable[[], object]) -> Any:
    """Return what a call returns, or the class and the words of its error."""
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
