"""Judge by the losses that are printed, or by another number after a word: ``step 1 loss 3.1 norm 0.4``."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from forks import finish, serve


def numbers(command: str, word: str, printed: Path) -> dict[int, float]:
    """Run a command, unless it has printed already; return the numbers after a word, by step."""
    if not printed.exists():
        finish(command, str(printed.parent), str(printed))
    pattern = rf"step (\d+)\b.*?\b{word}\S* ([-+.\deE]+|nan|inf)"
    return {int(step): float(number) for step, number in re.findall(pattern, printed.read_text(errors="replace"))}


def main() -> None:
    """Answer with the first step whose numbers differ by more than a bound."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", action="store_true", required=True)
    parser.add_argument("--bound", type=float, default=1e-4)
    parser.add_argument("--word", default="loss")
    given = parser.parse_args()

    def asked(one: str, many: str, keep: str) -> dict[str, Any]:
        theirs = numbers(one, given.word, Path(keep, "one.txt"))
        mine = numbers(many, given.word, Path(keep, f"{Path(many.split()[-1]).parent.name}.txt"))
        both = [(step, number, mine.get(step, number)) for step, number in theirs.items()]
        off = [step for step, number, other in both if not abs(other - number) <= given.bound * abs(number)]
        return {"verdict": "fault", "place": ".+", "step": min(off)} if off else {"verdict": "sound"}

    serve(asked)


if __name__ == "__main__":
    main()
