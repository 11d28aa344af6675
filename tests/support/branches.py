"""Which code asks whether a device is an accelerator, and which of it was answered yes."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import torch

import meshwright
from meshwright.core import devices

HOUSE = Path(meshwright.__file__).parent
ASKING = ("is_accelerator", "finish_stream", "to_device", "device_in_use")
"""Functions of core/devices whose answer or work differs on an accelerator."""
CHOOSING = ("CUDA",)
"""Names whose comparison chooses what only CUDA has."""


def branches() -> set[str]:
    """List each function that asks, as file:function, tests of a device outside of core/devices."""
    found = set()
    for path in sorted(HOUSE.rglob("*.py")):
        place = path.relative_to(HOUSE).as_posix()
        if place == "core/devices.py":
            continue
        found |= {f"{place}:{name}" for name in _asking(ast.parse(path.read_text(encoding="utf-8")), "<module>")}
    return found


def _asking(tree: ast.AST, function: str) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        inside = node.name if isinstance(node, ast.FunctionDef) else function
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ASKING:
            yield inside
        if isinstance(node, ast.Compare) and any(getattr(n, "id", "") in CHOOSING for n in ast.walk(node)):
            yield inside
        yield from _asking(node, inside)


@contextmanager
def spying() -> Iterator[set[str]]:
    """Note the functions, as file:function, that ask for a device which is an accelerator."""
    taken: set[str] = set()

    def watched(name: str):
        whole = getattr(devices, name)

        def asked(*args):
            answer = whole(*args)
            devices_given = [a for a in args if isinstance(a, (str, torch.device))]
            if answer is True or any(str(d).startswith("pretend") for d in devices_given) or answer == "pretend":
                taken.add(_caller())
            return answer

        return asked

    with ExitStack() as stack:
        for name in ASKING:
            whole, spy = getattr(devices, name), watched(name)
            for module in [m for n, m in list(sys.modules.items()) if n.startswith("meshwright")]:
                if vars(module).get(name) is whole:
                    stack.enter_context(patch.object(module, name, spy))
        yield taken


def _caller() -> str:
    frame = sys._getframe(2)
    while frame.f_code.co_name.startswith("<") and frame.f_code.co_name != "<module>" and frame.f_back is not None:
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    place = path.relative_to(HOUSE).as_posix() if path.is_relative_to(HOUSE) else path.name
    return f"{place}:{frame.f_code.co_name}"
