"""Proves cases: runs one process, the sound twin and the faulty run, and compares printed losses and saved states.

``python prove.py cases/NAME …`` prints a line for each case. A saved state is ``rank{r}.pt``: a dict of name to
tensor, or to ``(piece, dim, index, count)`` for a rank's piece of a tensor that is cut along ``dim``.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import socket
import sys
import tempfile
import time
import tomllib
import traceback
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
import torch  # noqa: E402
import torch.distributed.fsdp  # noqa: E402
import torch.distributed.tensor.parallel  # noqa: E402

EXACT, STATE, APART = 1e-5, 2e-5, 20.0
"""Relative bounds of tier 1: of losses, of a sound state, and of a faulty state in multiples of the sound one's."""
BEYOND, LOST = 3.0, 3.0
"""Bounds of tier 2: a faulty state is at least so many times as far from one process as the sound twin's, or its
ranks disagree, while its losses are at most so many times as far (of at least 1e-4)."""


def start(script: Path, processes: int, faulty: bool, save: str) -> list[int]:
    """Starts a script and returns its processes; zero processes mean ``--one``.

    Ranks are forks of this process, which has imported torch, with the environment that torchrun sets; with
    ``TORCHRUN=1`` torchrun starts them.
    """
    flags = [*(() if processes else ("--one",)), *(("--faulty",) if faulty else ()), "--save", save]
    output = [Path(save) / name for name in ("stdout", "stderr")]
    children: list[int] = []
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    launched = processes and os.environ.get("TORCHRUN")
    heavy = "transformers" in script.read_text() or "accelerate" in script.read_text()  # start threads when imported
    for rank in range(1 if launched else max(processes, 1)):
        children.append(os.fork())
        if children[-1]:
            continue
        for stream, file in zip((1, 2), output):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        os.chdir(save)
        if launched:
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
            os.execv(sys.executable, [sys.executable, *launcher, str(script), *flags])
        if processes:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
            os.environ |= {"LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        if heavy:
            os.execv(sys.executable, [sys.executable, str(script), *flags])
        signal.alarm(240)
        sys.argv, sys.path[0], code = [str(script), *flags], str(script.parent), 1
        try:
            runpy.run_path(str(script), run_name="__main__")
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)
    return children


def finish(children: list[int], save: str) -> tuple[list[float], str]:
    """Waits for a script's processes and returns its printed losses and its standard error."""
    codes = [os.waitpid(child, 0)[1] for child in children]
    said, noise = (Path(save, name).read_text() for name in ("stdout", "stderr"))
    if any(codes):
        raise RuntimeError(f"exits with {codes}: {noise[-2500:]}")
    losses = re.findall(r"^step (\d+) loss (\S+)$", said, re.MULTILINE)
    return [float(loss) for _, loss in losses], noise


def states(folder: str) -> dict[str, list[torch.Tensor]]:
    """Returns the whole tensors that ranks hold by name: one for each rank, or the first and the last set of pieces."""
    found: dict[str, list[torch.Tensor]] = {}
    pieces: dict[str, tuple[int, dict[int, list[torch.Tensor]], int]] = {}
    for file in sorted(Path(folder).glob("rank*.pt")):
        for name, value in torch.load(file).items():
            if isinstance(value, torch.Tensor):
                found.setdefault(name, []).append(value.double())
            else:
                piece, dim, index, count = value
                pieces.setdefault(name, (dim, {}, count))[1].setdefault(index, []).append(piece.double())
    for name, (dim, held, count) in pieces.items():
        if len(held) != count:
            raise RuntimeError(f"of {name}, {len(held)} of {count} pieces were saved")
        for copy in (0, -1):
            found.setdefault(name, []).append(torch.cat([held[index][copy] for index in range(count)], dim))
    return found


def distances(truth: dict[str, list[torch.Tensor]], other: dict[str, list[torch.Tensor]]) -> dict[str, float]:
    """Returns, by name, how far the farthest copy is from the truth, relative to the truth's largest entry."""
    if truth.keys() != other.keys():
        raise RuntimeError(f"states differ in names: {sorted(truth.keys() ^ other.keys())[:6]}")
    return {
        name: max(float((copy - whole[0]).abs().max() / whole[0].abs().max().clamp(min=1e-12)) for copy in other[name])
        for name, whole in truth.items()
    }


def spread(state: dict[str, list[torch.Tensor]]) -> float:
    """Returns how far copies of one tensor are from one another, relative to its largest entry."""
    return max(
        float((copy - copies[0]).abs().max() / copies[0].abs().max().clamp(min=1e-12))
        for copies in state.values()
        for copy in copies
    )


def relative(truth: list[float], other: list[float]) -> float:
    """Returns the largest relative difference of two lists of losses."""
    if len(truth) != len(other) or not truth:
        raise RuntimeError(f"{len(truth)} losses against {len(other)}")
    return max(abs(a - b) / max(abs(a), 1e-12) for a, b in zip(truth, other))


def prove(folder: Path) -> dict[str, object]:
    """Runs a case's three programs and returns figures and whether they prove it."""
    case = tomllib.loads((folder / "case.toml").read_text())
    sound_only, tier, script = case.get("sound", False), case.get("tier", 1), (folder / "case.py").resolve()
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as sound:
        with tempfile.TemporaryDirectory() as faulty:
            began, single = time.monotonic(), start(script, 0, False, one)
            twin, quiet = finish(start(script, case["processes"], False, sound), sound)
            (losses, _), seconds = finish(single, one), time.monotonic() - began
            truth, twin_state = states(one), states(sound)
            near = distances(truth, twin_state)
            row: dict[str, object] = {"id": case["id"], "tier": tier, "seconds": round(seconds, 1)}
            row |= {"sound_loss": relative(losses, twin), "sound_state": max(near.values())}
            exact = row["sound_loss"] <= EXACT and row["sound_state"] <= STATE
            if not sound_only:
                wrong, noisy = finish(start(script, case["processes"], True, faulty), faulty)
                wrong_state = states(faulty)
                far = distances(truth, wrong_state)
                ratio = {name: far[name] / max(near[name], 1e-6) for name in far}
                worst = max(ratio, key=lambda name: ratio[name])
                row |= {"faulty_loss": relative(losses, wrong), "faulty_state": far[worst], "apart": ratio[worst]}
                row["where"] = worst
                words = [line for line in noisy.splitlines() if line not in quiet and re.search("rror|arning", line)]
                row["said"] = words[:1]
                exact = exact and not words and ratio[worst] >= APART
                apart = spread(wrong_state) >= APART * max(spread(twin_state), 1e-6)
                hidden = row["faulty_loss"] <= LOST * max(row["sound_loss"], 1e-4)
                loose = not words and (ratio[worst] >= BEYOND or apart) and hidden
                row["proven"] = exact if tier == 1 else loose
            else:
                row["proven"] = exact if tier == 1 else True
    return row


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        try:
            row = prove(Path(argument))
        except (RuntimeError, KeyError) as error:
            row = {"id": Path(argument).name, "proven": False, "error": str(error)[-2500:]}
        print(json.dumps(row), flush=True)
