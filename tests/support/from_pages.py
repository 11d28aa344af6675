"""Pages "from another tool to meshwright": the diff that a page prints, and the two scripts that it is made of.

A page ``docs/from/NAME.md`` has one ```` ```diff ```` block for each pair ``examples/from/PAIR_before.py`` and
``PAIR_after.py``. A script has a function ``train()`` that returns its losses, and calls it when it is started.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SCRIPTS, PAGES = ROOT / "examples" / "from", ROOT / "docs" / "from"


def script(name: str) -> Path:
    """``script("trainer_before")``: its path."""
    return SCRIPTS / f"{name}.py"


def script_diff(pair: str) -> str:
    """The unified diff of a pair of scripts without headers: what has changed, with three lines around; ``@@`` between
    places that lie apart.
    """
    before, after = (script(f"{pair}_{side}").read_text().splitlines() for side in ("before", "after"))
    lines = list(difflib.unified_diff(before, after, lineterm=""))[2:]
    return "\n".join("@@" if line.startswith("@@ ") else line for line in lines[1:]) + "\n"


def page_diffs(page: str) -> list[str]:
    """The text of every diff block of a page, in order."""
    return re.findall(r"^```diff\n(.*?)^```$", (PAGES / f"{page}.md").read_text(), re.DOTALL | re.MULTILINE)


def page_diff(page: str) -> str:
    """The diff of a page that has one."""
    (only,) = page_diffs(page)
    return only


def changed_lines(pair: str) -> tuple[int, int]:
    """Lines that a pair of scripts takes away and adds, without empty ones, imports and docstrings' first line."""
    lines = [line for line in script_diff(pair).splitlines() if line != "@@" and line[1:].strip()]
    told = [line for line in lines if not line[1:].startswith(('"""', "import ", "from "))]
    return sum(line.startswith("-") for line in told), sum(line.startswith("+") for line in told)


def function_of(name: str, function: str = "train") -> Callable[..., Any]:
    """A function of a script, which is not started by this."""
    found = importlib.util.spec_from_file_location(f"from_{name}", script(name))
    assert found is not None and found.loader is not None
    if str(SCRIPTS) not in sys.path:  # as a script finds its neighbours
        sys.path.insert(0, str(SCRIPTS))
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return getattr(module, function)


def losses_of(name: str, options: dict[str, Any] | None = None) -> list[float]:
    """Run ``train(**options)`` of a script on this rank: a job for the pool (``spmd(2, losses_of, name)``).

    The processes are those of torchrun to a tool: they have met.
    """
    meet()
    return [float(loss) for loss in function_of(name)(**(options or {}))]


def meet() -> None:
    """Join this rank of the pool to the others, in its file store, before a tool looks for a port."""
    import torch.distributed as dist

    world = int(os.environ["WORLD_SIZE"])
    if not dist.is_initialized():
        store = dist.FileStore(os.environ["MESHWRIGHT_FILE_STORE"], world)
        dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=world)


def furthest(losses: list[float], others: list[float]) -> float:
    """The largest difference of two lists of as many losses."""
    return max(abs(one - other) for one, other in zip(losses, others, strict=True))
