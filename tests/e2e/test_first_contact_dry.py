"""First contact, whole, on the pretend device: its own bugs show here and not on a GPU."""

import json
import os
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

pytestmark = pytest.mark.all

ROOT = Path(__file__).parents[2]
GROUPS = {
    "parity": ["parity/*"],
    "ranks": ["gloo/*", "ranks/*"],
    "figures": ["facts", "tests/gpu", "kernels/*", "loops/*", "speed/*"],
}
EXACT = {"parity": 14, "ranks": 13, "figures": 0}
"""Least number of comparisons in fp64."""
NEEDS_CUDA = ("parity/memory_budget", "parity/optimizer state", "tests/gpu", "kernels/cuda")


def call(cache, *arguments, module="benchmarks.first_contact"):
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    command = [sys.executable, "-m", module, "--dry", "--cache", str(cache), *arguments]
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )


@pytest.mark.parametrize("group", GROUPS)
def test_every_step_passes_on_the_pretend_device_or_says_what_it_lacks(tmp_path, group):
    """As on a machine without rich. Of a second call nothing is left to do."""
    asked = [word for pattern in GROUPS[group] for word in ("--only", pattern)]
    done = call(tmp_path, "--without", "rich", "--minutes", "0", *asked)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    folder = tmp_path / "a-pretend-GPU"
    steps = json.loads((folder / "results.json").read_text())["steps"]
    elsewhere = {name for name, step in steps.items() if step["status"] != "passed"}
    assert elsewhere == {name for name in steps if name.startswith(NEEDS_CUDA)}
    assert {steps[name]["status"] for name in elsewhere} <= {"not on the pretend device"}
    exact = [step["figures"]["error"] for step in steps.values() if step["figures"].get("bound") == 1e-10]
    assert len(exact) >= EXACT[group] and max(exact, default=0.0) < 1e-12
    assert all(step["figures"]["bytes"] > 0 for name, step in steps.items() if name.startswith("speed/"))
    assert (folder / "results.md").read_text() in done.stdout
    again = call(tmp_path, "--without", "rich", *asked)
    assert again.returncode == 0 and again.stdout.count("by an earlier call") == len(steps)


def test_the_groups_have_every_step(tmp_path):
    names = call(tmp_path, "--list").stdout.split("\n")[:-1]
    by_group = [name for name in names if any(fnmatch(name, p) for patterns in GROUPS.values() for p in patterns)]
    assert len(names) > 60 and by_group == names


def test_a_world_of_two_tries_its_axes(tmp_path):
    done = call(tmp_path, "--ranks", "2", "--axis", "pp", "--axis", "ep", module="benchmarks.first_contact.cluster")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    steps = json.loads((tmp_path / "2-a-pretend-GPU" / "results.json").read_text())["steps"]
    assert [step["status"] for step in steps.values()] == ["passed"] * 3
    assert all(steps[f"cluster/{axis}"]["figures"]["tokens/s"] > 0 for axis in ("pp", "ep"))
