"""Ask NVIDIA's driver for its version, its GPUs and the links between them; without torch."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator

from .findings import HOST, OK, Finding, gibibytes

ASKED = ("--query-gpu=index,name,memory.total,driver_version,compute_mode", "--format=csv,noheader,nounits")
LINK = re.compile(r"^(?:NV\d+|PIX|PXB|PHB|NODE|SYS)$")


def graphics_findings() -> Iterator[Finding]:
    """Yield driver, GPUs and links; nothing where there is no driver."""
    rows = [[word.strip() for word in line.split(",")] for line in _ask(*ASKED).splitlines()]
    rows = [row for row in rows if len(row) == 5]
    if not rows:
        return
    release = re.search(r"CUDA Version:\s*([\d.]+)", _ask())
    newest = release.group(1) if release else ""
    figures = {"driver": rows[0][3], "newest_release": newest}
    text = f"{rows[0][3]}{f', for CUDA up to {newest}' if newest else ''}"
    yield Finding(HOST, "driver", OK, text, figures=figures)
    for index, name, mebibytes, _, mode in rows:
        size = f", {gibibytes(float(mebibytes) * 2**20)}" if mebibytes.isdigit() else ""
        yield Finding(
            HOST, f"GPU {index}", OK, f"{name}{size}{f', {mode}' if mode not in ('Default', '[N/A]') else ''}"
        )
    links = links_of(_ask("topo", "-m")) if len(rows) > 1 else {}
    if links:
        text = ", ".join(f"{first}-{second} {kind}" for (first, second), kind in links.items())
        yield Finding(HOST, "links", OK, text, figures={f"{a}-{b}": kind for (a, b), kind in links.items()})


def links_of(topology: str) -> dict[tuple[int, int], str]:
    """Return the kind of link between each pair of GPUs: "NV18", "PIX", … as ``nvidia-smi topo -m`` prints them."""
    found: dict[tuple[int, int], str] = {}
    for line in topology.splitlines():
        head, *cells = re.sub(r"\x1b\[[\d;]*m", "", line).split() or [""]
        if match := re.fullmatch(r"GPU(\d+)", head):
            row = int(match.group(1))
            found |= {(row, column): cell for column, cell in enumerate(cells) if row < column and LINK.match(cell)}
    return found


def _ask(*words: str) -> str:
    """Return what nvidia-smi answers; empty where it is absent, fails or hangs."""
    try:
        done = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=8, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
