"""``meshwright observe TRACE [--steps N] [--noisy TRACE] -- COMMAND …``: record what a training script computes.

The command runs as it is, with torch's global hooks set in every process that it starts: nothing of the script changes.
TRACE is a folder with a file for each rank: the rows of the first steps, outputs of modules and the gradients that came
back to them, the gradients that optimizers saw, and parameters and states after, each as a few numbers. A run whose
script draws its own seeds, or dropout, differs from itself: 'meshwright blame' says so.

  meshwright observe one --noisy one-noisy -- python train.py
  meshwright observe many -- torchrun --nproc-per-node 4 train.py --tp 2
  meshwright blame one many --noisy one-noisy
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from meshwright.core.config import take_flags
from meshwright.core.config.ranges import Range
from meshwright.core.errors import ConfigError

from .arguments import refuse_rest


@dataclass(frozen=True)
class ObserveOptions:
    steps: Annotated[int, Range("1 or more steps", lambda value: value >= 1)] = 3
    """Optimizer steps that are recorded (default: 3)."""
    noisy: str = ""
    """Folder of a second trace: outputs of modules are changed by as much as their dtype rounds, which tells how far
    rounding goes. The script runs twice, this run first and without its output."""
    parameters_alone: bool = False
    """Record parameters, gradients and states, but no rows and no outputs of modules: faster, and less is said."""
    again: str = ""
    """Modules, with commas between, that run again in each step, in float64 and with switches off: 'meshwright blame
    --bisect' asks for it."""
    stop: bool = False
    """End each process after these steps; without it the command runs to its end."""


def run(argv: list[str]) -> int:
    """Run the command with the recorder in its processes; return the command's exit status."""
    if "--" not in argv:
        raise ConfigError(
            "observe takes a folder, then -- and the command that trains, like: meshwright observe one.trace -- python"
            " train.py"
        )
    at = argv.index("--")
    options, rest = take_flags(ObserveOptions, argv[:at])
    command = argv[at + 1 :]
    if not command:
        raise ConfigError("observe takes a command after --, like: meshwright observe one.trace -- python train.py")
    places, rest = [word for word in rest if not word.startswith("-")], [w for w in rest if w.startswith("-")]
    refuse_rest([*rest, *places[1:]], "meshwright observe", ObserveOptions)
    if not places:
        raise ConfigError(
            "observe takes the folder of the trace first, like: meshwright observe one.trace -- python train.py"
        )
    folder, *noisy = folders = [Path(place).absolute() for place in (places[0], options.noisy) if place]
    for place in folders:
        if place.exists() and (not place.is_dir() or any(not f.name.startswith("rank-") for f in place.iterdir())):
            raise ConfigError(f"{place} is there and is no trace: give another name")
        shutil.rmtree(place, ignore_errors=True)
    import meshwright.observation as observation

    site = str(Path(observation.__file__).parent / "site")
    settings = {
        "folder": str(folder),
        "steps": options.steps,
        "modules": not options.parameters_alone,
        "noisy": str(noisy[0]) if noisy else None,
        "stop": options.stop,
        "again": [name for name in options.again.split(",") if name],
        "command": command,
    }
    path = os.pathsep.join(filter(None, (site, os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"MESHWRIGHT_OBSERVE": json.dumps(settings), "PYTHONPATH": path}
    environment["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"  # graphs without dropout are no other run's
    try:
        status = subprocess.run(command, env=environment).returncode
    except OSError as error:
        raise ConfigError(f"{command[0]} cannot be run: {error.strerror}") from None
    found = sorted(folder.glob("rank-*.pt")) if folder.is_dir() else []
    if not found:
        print(f"no trace: no process of the command changed a module's parameters by gradients (exit status {status})")
        return status or 1
    size = sum(file.stat().st_size for file in found) / 1e6
    processes = {file.name.rpartition("-")[0] for file in found}
    print(f"{folder}: {len(processes)} process{'es' if len(processes) > 1 else ''}, {size:.1f} MB")
    if cut := sorted(name for name in processes if not (folder / f"{name}-ended").exists()):
        ranks = ", ".join(str(int(name.split("-")[1])) for name in cut)
        print(f"rank {ranks} ended by os._exit or a signal: what came after its last optimizer step is unknown")
    return status
