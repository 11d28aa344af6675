"""``python -m benchmarks.peers``: ask every system every question, each in two processes, and print the table."""

from __future__ import annotations

import argparse
import json
import operator
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

from benchmarks import peers

ROOT = Path(__file__).resolve().parents[2]
SYSTEMS = {
    "ours": "ours",
    **{path.stem.removeprefix("with_"): path.stem for path in Path(__file__).parent.glob("with_*.py")},
}
LAYOUTS = "zero3", "zero2", "ddp", "tensor", "sequence", "pipeline", "context"
OPTIONS = "clip", "accumulate", "recompute"
WORLD = 2


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description=peers.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("systems", nargs="*", default=[*SYSTEMS], metavar="SYSTEM[=PYTHON]", help=", ".join(SYSTEMS))
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, choices=LAYOUTS)
    parser.add_argument("--shapes", nargs="+", default=["24x64", "8x256", "8x512"], help="blocks x width")
    parser.add_argument("--with", nargs="*", default=["clip"], choices=OPTIONS, dest="options")
    parser.add_argument("--pairs", type=int, default=40, help="of steps, in turn; 0: starts alone")
    parser.add_argument("--starts", type=int, default=1, help="runs of each, in turn, whose start is measured")
    parser.add_argument("--json", type=Path, help="also write every figure here")
    options = parser.parse_args()
    for system in options.systems:
        if system.partition("=")[0] not in SYSTEMS:
            parser.error(f"no system {system.partition('=')[0]!r}: {', '.join(SYSTEMS)}")
    return options


def run(system: str, python: str, layout: str, shape: str, options: list[str], pairs: int) -> list[dict]:
    """Start the processes of one question, and return what each of them found (``said``: its own error)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        question = json.dumps({"system": system, "layout": layout, "shape": shape, "options": options, "pairs": pairs})
        kept = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        shared = kept | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(WORLD)}
        paths = [ROOT, ROOT / "src", *filter(None, [os.environ.get("PYTHONPATH")])]
        shared |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, paths))}
        ranks = []
        for rank in range(WORLD):
            shared |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(WORLD)}
            with (Path(folder) / f"{rank}.log").open("w") as log:
                command = [python, "-m", "benchmarks.peers.rank", question, f"{folder}/{rank}.json"]
                ranks.append(subprocess.Popen(command, env=shared, cwd=ROOT, stdout=log, stderr=log))
        for rank in ranks:
            try:
                rank.wait(timeout=900)
            except subprocess.TimeoutExpired:
                rank.kill()
        written = [Path(folder) / f"{rank}.json" for rank in range(WORLD)]
        if all(file.exists() for file in written):
            return [json.loads(file.read_text()) for file in written]
        lines = (Path(folder) / "0.log").read_text().strip().splitlines() or ["it wrote nothing"]
        return [{"said": lines[-1]}]


def row(paired: list[dict], starts: list[tuple[list[dict], list[dict]]]) -> str:
    """Return the figures of a question in one line: of both processes, over torch by hand, and errors of losses.

    Args:
        starts: runs of a system alone, each with one of torch by hand.
    """
    if "said" in paired[0]:
        return paired[0]["said"]
    figures = []
    if "bare" in paired[0]:
        for place, kind in enumerate(("cpu", "wall")):
            theirs, by_hand = (
                [sum(step[place] for step in steps) for steps in zip(*(rank[name] for rank in paired), strict=True)]
                for name in ("system", "bare")
            )
            figures.append(f"{kind} {statistics.median(a / b for a, b in zip(theirs, by_hand, strict=True)):.2f}")
        figures.append(f"calls {paired[0]['calls'] / paired[0]['bare_calls']:.2f}")
    if all("said" not in ranks[0] for pair in starts for ranks in pair):
        later, more = (
            statistics.median(join(measure(alone), measure(bare)) for alone, bare in starts)
            for measure, join in (
                (lambda ranks: sum(rank["start_s"] for rank in ranks), operator.sub),
                (lambda ranks: max(rank["peak_mib"] for rank in ranks), operator.truediv),
            )
        )
        figures += [f"start {later:+.2f} s", f"memory {more:.2f}"]
    if "equal" in paired[0]:
        figures.append(f"off by {paired[0]['equal']:.0e}, with uneven labels {paired[0]['uneven']:.0e}")
    return "  ".join(figures)


def main() -> None:
    options = asked()
    asked_with = ", ".join(options.options) or "nothing else"
    print(f"{WORLD} processes; ratios to torch by hand, medians of {options.pairs} pairs; with {asked_with}")
    found = []
    for layout, shape in product(options.layouts, options.shapes):
        print(f"\n{layout}, {shape}", flush=True)
        by_hand = "bare", sys.executable, layout, shape, options.options, 0
        for system in options.systems:
            name, _, python = system.partition("=")
            question = SYSTEMS[name], python or sys.executable, layout, shape, options.options
            starts = [(run(*question, 0), run(*by_hand)) for _ in range(options.starts)]
            alone = starts[0][0]
            paired = run(*question, options.pairs) if options.pairs and "said" not in alone[0] else alone
            print(f"  {name:13} {row(paired, starts)}"[:160], flush=True)
            found.append({"system": name, "layout": layout, "shape": shape, "paired": paired, "starts": starts})
    if options.json:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
