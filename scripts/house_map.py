"""Write docs/house.md: every room of the package and every file in it, in their own words.

python scripts/house_map.py [--check]       --check: change nothing; exit with 1 if the page would be another
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOUSE = ROOT / "src" / "meshwright"
PAGE = ROOT / "docs" / "house.md"
FLOORS = (
    "cli",
    "verification",
    "training",
    "checkpoint",
    "data",
    "distributed",
    "planning",
    "introspection",
    "comparison",
    "core",
    "models",
)
"""From the top of the house to its ground."""


def page() -> str:
    """The page's text: a section for each floor, and in it a list for each room."""
    lines = [
        "# Rooms",
        "",
        "Written by `python scripts/house_map.py`. How the rooms belong together: [architecture.md](architecture.md).",
    ]
    for floor in FLOORS:
        rooms = sorted({path.parent for path in (HOUSE / floor).rglob("*.py")})
        for room in rooms:
            name = room.relative_to(HOUSE).as_posix()
            lines += [
                "",
                f"{'##' if room == HOUSE / floor else '###'} {name}",
                "",
                first_line(room / "__init__.py"),
                "",
            ]
            lines += [
                f"- `{path.stem}`: {first_line(path)}" for path in sorted(room.glob("*.py")) if path.stem != "__init__"
            ]
    return "\n".join(lines) + "\n"


def first_line(path: Path) -> str:
    """The first line of a file's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n", 1)[0]


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        sys.exit(PAGE.read_text(encoding="utf-8") != page())
    PAGE.write_text(page(), encoding="utf-8")
