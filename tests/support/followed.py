"""Provoke a message in this process, and follow what it advises until nothing, or something further on, is said."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any
from unittest.mock import patch

from meshwright.cli.main import VERBS
from meshwright.core.errors import MeshwrightError

from .advice import expanded


class Reached(BaseException):
    """The work that a request asks for was about to begin."""


def _begin(*args: Any, **kwargs: Any) -> Any:
    raise Reached


def said(call: Callable[[], Any], *stops: str) -> str:
    """Return what a call refuses or warns of; "" where it does its work, or begins it at one of ``stops``.

    Args:
        stops: functions of the package, as "module.function", at which the work begins.
    """
    spoken = io.StringIO()
    handler = logging.StreamHandler(spoken)
    logging.getLogger("meshwright").addHandler(handler)
    with contextlib.ExitStack() as stack:
        stack.callback(logging.getLogger("meshwright").removeHandler, handler)
        heard = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        for where, *_ in VERBS.values():
            import_module(where.partition(":")[0])  # a verb that is read under a patch would keep it
        for stop in stops:
            stack.enter_context(patch(f"meshwright.{stop}", _begin))
        try:
            call()
        except MeshwrightError as error:
            return str(error)
        except Reached:
            pass
    return "\n".join([*(str(one.message) for one in heard), spoken.getvalue()]).strip()


def command(words: str) -> Callable[[], None]:
    """Return a call of ``meshwright words``, which fails where the command has another status than 0."""

    def call() -> None:
        verb, *rest = words.split()
        module, _, function = VERBS[verb][0].partition(":")
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
            status = getattr(import_module(module), function)(rest)
        assert not status, f"{words}: {status}, {out.getvalue()}"

    return call


def printed(words: str, text: str) -> str:
    """Put what a message prints behind a flag in the place of ``{--flag}``, and its command in that of ``{verb}``.

    Its words CONFIG and N stand for a file and one rank.
    """

    def found(place: re.Match[str]) -> str:
        name = place[1]
        if name.startswith("--"):
            behind = re.search(rf'{name}[ =]("[^"]*"|[^\s,;]*\w)', text)
            assert behind, f"{name} has no value in {text!r}"
            return f"{name}={behind[1].strip(chr(34))}"
        behind = re.search(rf"meshwright ({name}\b[^';,]*)", text)
        assert behind, f"{name} is not in {text!r}"
        return behind[1].rstrip(".)").replace("CONFIG", "small.toml").replace(" N ", " 1 ")

    return re.sub(r"\{([\w.-]+)\}", found, words)


def found_in(pattern: str, text: str) -> str:
    """Return what a message prints in the first group of a pattern."""
    found = re.search(pattern, text)
    assert found, f"{pattern} is not in {text!r}"
    return found[1]


def snippet(text: str, name: str, **known: Any) -> Any:
    """Evaluate the call of ``name`` that a message prints; ``...`` and ``…`` in it are ``known[name]``'s arguments."""
    import meshwright

    if "." in name and name.startswith("meshwright"):
        import_module(name.rpartition(".")[0])
    text = expanded(text)
    begin = text.index(f"{name}(")
    depth, end = 0, begin
    for end in range(text.index("(", begin), len(text)):
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        if not depth:
            break
    return eval(text[begin : end + 1], {"meshwright": meshwright, **vars(meshwright), **known})
