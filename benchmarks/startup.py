"""Time of a fresh process: ``import meshwright``, help, a TAB of completion, and ``meshwright train`` up to its first
line.

    python benchmarks/startup.py [repeats]

The goal for each is 0.3 s, and for the first line 1 s; the line "python" is what an empty interpreter costs and is part
of the others. On a busy machine the processor time says more than the wall time.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
import time

COMMANDS = {
    "python": ["-c", ""],
    "import meshwright": ["-c", "import meshwright"],
    "meshwright --help": ["-m", "meshwright", "--help"],
    "meshwright train --help": ["-m", "meshwright", "train", "--help"],
    "meshwright train --help layout": ["-m", "meshwright", "train", "--help", "layout"],
    "a TAB: train --layout.": ["-m", "meshwright", "completion", "--candidates", "meshwright train --layout."],
    "completion bash": ["-m", "meshwright", "completion", "bash"],
}


def seconds(arguments: list[str]) -> tuple[float, float]:
    """Wall and processor time of one process, in seconds."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - start, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def first_line() -> float:
    """Wall time until a training run prints its first line, in seconds; the run is ended behind it."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "meshwright", "train", "--model.size=debug", f"--out={folder}"]
        start = time.perf_counter()
        run = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert run.stdout is not None and run.stdout.readline().startswith("meshwright ")
        took = time.perf_counter() - start
        run.terminate()
        run.communicate()
    return took


def main(repeats: int = 9) -> None:
    for name, arguments in COMMANDS.items():
        seconds(arguments)  # compiles and warms the disk cache
        wall, processor = zip(*(seconds(arguments) for _ in range(repeats)), strict=True)
        medians = f"median {statistics.median(wall):.3f} s   processor {statistics.median(processor):.3f} s"
        print(f"{name:<31} {medians}   best {min(wall):.3f} s   of {repeats}")
    wall = [first_line() for _ in range(repeats)]
    name = "meshwright train, first line"
    print(f"{name:<31} median {statistics.median(wall):.3f} s   best {min(wall):.3f} s   of {repeats}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
