"""Judge by the losses that are printed, or by another number after a word: ``step 1 loss 3.1 norm 0.4``."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess


def numbers(command: str, word: str) -> dict[int, float]:
    """Run a command; return the numbers after a word, by step."""
    printed = subprocess.run(shlex.split(command), capture_output=True, text=True).stdout
    pattern = rf"step (\d+)\b.*?\b{word}\S* ([-+.\deE]+|nan|inf)"
    return {int(step): float(number) for step, number in re.findall(pattern, printed)}


def main() -> None:
    """Print the first step whose numbers differ by more than a bound."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--one")
    parser.add_argument("--many")
    parser.add_argument("--keep")
    parser.add_argument("--bound", type=float, default=1e-4)
    parser.add_argument("--word", default="loss")
    given = parser.parse_args()
    one, many = numbers(given.one, given.word), numbers(given.many, given.word)
    off = [step for step in one if not abs(many.get(step, one[step]) - one[step]) <= given.bound * abs(one[step])]
    answer = {"verdict": "fault", "place": ".+", "step": min(off)} if off else {"verdict": "sound"}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
