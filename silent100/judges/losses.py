"""Judge by the losses that are printed: ``step 1 loss 3.1``."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from forks import finish, serve


def losses(command: str, printed: Path) -> dict[int, float]:
    """Run a command, unless it has printed already; return its losses by step."""
    if not printed.exists():
        finish(command, str(printed.parent), str(printed))
    pattern = r"step (\d+)\b.*?\bloss\S* ([-+.\deE]+|nan|inf)"
    return {int(step): float(number) for step, number in re.findall(pattern, printed.read_text(errors="replace"))}


def main() -> None:
    """Answer with the first step whose numbers differ by more than a bound."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", action="store_true", required=True)
    parser.add_argument("--bound", type=float, default=1e-4)
    given = parser.parse_args()

    def asked(one: str, many: str, keep: str) -> dict[str, Any]:
        theirs = losses(one, Path(keep, "one.txt"))
        mine = losses(many, Path(keep, f"{Path(many.split()[-1]).parent.name}.txt"))
        both = [(step, number, mine.get(step, number)) for step, number in theirs.items()]
        off = [step for step, number, other in both if not abs(other - number) <= given.bound * abs(number)]
        return {"verdict": "fault", "place": ".+", "step": min(off)} if off else {"verdict": "sound"}

    serve(asked)


if __name__ == "__main__":
    main()
