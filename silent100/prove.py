"""Proves cases: runs one process, the sound twin and the faulty run, and compares printed losses and saved states.

``python prove.py cases/NAME …`` prints a line of JSON for each. A saved state is ``rank{r}.pt``: a dict of name to
tensor, or to ``(piece, dim, index, count)`` for a rank's piece of a tensor that is cut along ``dim``.
"""

import json
import os
import re
import runpy
import signal
import socket
import sys
import tempfile
import tomllib
import traceback
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MASTER_ADDR": "localhost"}
import torch

# Bounds of relative differences: of losses, of a sound state; how many times as far a faulty state is in tier 1.
EXACT, STATE, APART = 1e-5, 2e-5, 20.0
# In tier 2, a faulty state is so many times as far (or its ranks disagree), its losses at most so many times as far.
BEYOND, LOST = 3.0, 3.0


def start(script: Path, processes: int, flags: list[str], folder: str) -> list[int]:
    """Starts a script and returns its processes: forks, or what torchrun starts with ``TORCHRUN=1``."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, str(script), *flags, "--save", folder]
    if by_torchrun := bool(processes and os.environ.get("TORCHRUN")):
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    children = []
    for rank in range(1 if by_torchrun else max(processes, 1)):
        children.append(os.fork())
        if children[-1]:
            continue
        for stream, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        os.chdir(folder)
        if processes and not by_torchrun:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
            os.environ |= {"LOCAL_WORLD_SIZE": str(processes), "MASTER_PORT": port}
        if by_torchrun or re.search(
            "import .*(transformers|accelerate)|from (transformers|accelerate)", script.read_text()
        ):
            os.execv(sys.executable, command)
        signal.alarm(240)
        sys.argv, sys.path[0], code = command[1:], str(script.parent), 0
        try:
            runpy.run_path(str(script), run_name="__main__")
        except BaseException:  # noqa: BLE001  a fork must not return
            code = 1
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)
    return children


def finish(children: list[int], folder: str) -> tuple[list[float], str]:
    """Waits for a script's processes and returns its printed losses and its standard error."""
    codes = [os.waitpid(child, 0)[1] for child in children]
    said, noise = (Path(folder, name).read_text() for name in ("stdout", "stderr"))
    assert not any(codes), f"exits with {codes}: {noise[-2000:]}"
    return [float(x) for x in re.findall(r"^step \d+ loss (\S+)$", said, re.MULTILINE)], noise


def states(folder: str) -> dict[str, list[torch.Tensor]]:
    """Returns whole tensors by name: one for each rank that holds it, or one of the first and of the last pieces."""
    found: dict[str, list[torch.Tensor]] = {}
    pieces: dict[tuple[str, int, int], dict[int, list[torch.Tensor]]] = {}
    for file in sorted(Path(folder).glob("rank*.pt")):
        for name, value in torch.load(file).items():
            if isinstance(value, torch.Tensor):
                numbers = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
                found.setdefault(name, []).append(numbers.double())
            else:
                pieces.setdefault((name, value[1], value[3]), {}).setdefault(value[2], []).append(value[0].double())
    for (name, dim, count), held in pieces.items():
        found[name] = [torch.cat([held[i][copy] for i in range(count)], dim) for copy in (0, -1)]
    return found


def far(truth: torch.Tensor, copies: list[torch.Tensor]) -> float:
    """Returns the largest difference of copies from a tensor, relative to its largest entry."""
    return max(float((copy - truth).abs().max() / truth.abs().max().clamp(min=1e-12)) for copy in copies)


def prove(folder: Path) -> dict[str, object]:
    """Runs a case's programs and returns figures and whether they prove it."""
    case, script = tomllib.loads((folder / "case.toml").read_text()), (folder / "case.py").resolve()
    ranks, tier, (one, sound, faulty) = case["processes"], case.get("tier", 1), (tempfile.mkdtemp() for _ in range(3))
    single = start(script, 0, ["--one"], one)
    twin, quiet = finish(start(script, ranks, [], sound), sound)
    losses, _ = finish(single, one)
    truth, near = {name: copies[0] for name, copies in states(one).items()}, states(sound)
    apart = {name: far(truth[name], near[name]) for name in truth}
    off = lambda other: max(abs(a - b) / max(abs(a), 1e-12) for a, b in zip(losses, other, strict=True))  # noqa: E731
    row = {"id": case["id"], "tier": tier, "sound_loss": off(twin), "sound_state": max(apart.values())}
    exact = off(twin) <= EXACT and row["sound_state"] <= STATE and near.keys() == truth.keys()
    if case.get("sound"):
        return row | {"proven": bool(exact or tier == 2)}
    wrong, noise = finish(start(script, ranks, ["--faulty"], faulty), faulty)
    state, known = states(faulty), {re.sub(r"\d+", "", line) for line in quiet.splitlines()}
    new = [line for line in noise.splitlines() if re.sub(r"\d+", "", line) not in known]
    words = [line for line in new if re.search("error|warn|deprecat", line, re.IGNORECASE)]
    ratio = {name: far(truth[name], state[name]) / max(apart[name], 1e-6) for name in truth}
    worst = max(truth, key=lambda name: ratio[name])
    split, usual = (max(far(copies[0], copies) for copies in s.values()) for s in (state, near))
    row |= {"faulty_loss": off(wrong), "faulty_state": far(truth[worst], state[worst]), "times": ratio[worst]}
    loose = (ratio[worst] >= BEYOND or split >= APART * max(usual, 1e-6)) and off(wrong) <= LOST * max(off(twin), 1e-4)
    proven = exact and ratio[worst] >= APART if tier == 1 else loose
    return row | {"ranks_disagree": split, "where": worst, "words": words[:1], "proven": bool(proven and not words)}


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(json.dumps(prove(Path(argument))), flush=True)
