"""The doctor's verdicts are true: here every axis equals one process, and without a private name those that need it
do not, while the others are judged as before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import meshwright

AXES = ("dp_shard", "tp", "pp")
EQUAL = "equal to one process"
PATIENCE = "--limit=300"


def doctor(tmp_path: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(tmp_path), str(Path(meshwright.__file__).parents[1])])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-m", "meshwright", "doctor", PATIENCE, *words]
    return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False)


@pytest.mark.all
def test_two_processes_exchange_data_and_each_axis_equals_one_process(tmp_path):
    done = doctor(tmp_path, "--json", RANK="3", WORLD_SIZE="8")  # as under torchrun, whose ranks these are not
    told = json.loads(done.stdout)
    assert told["verdicts"] == dict.fromkeys(AXES, EQUAL)
    assert told["trials"]["exchange"]["status"] == "ok"
    assert told["private points"]["all"]["figures"]["missing"] == []
    assert told["holds"] and done.returncode == 0 and done.stderr == ""


def test_what_does_not_meet_is_named_and_hides_nothing(tmp_path):
    done = doctor(tmp_path, GLOO_SOCKET_IFNAME="eth77", PYTHONIOENCODING="ascii")
    assert done.returncode == 1 and done.stderr == ""
    lines = done.stdout.splitlines()
    assert all(len(line) <= 120 and line.isascii() for line in lines)
    words = " ".join(done.stdout.split())
    for name in ("exchange", *(f"{axis} 2" for axis in AXES)):
        assert f"FAIL {name}" in words
    assert "eth77 is no interface of this host that is up and has an address" in words
    assert "export GLOO_SOCKET_IFNAME=" in done.stdout.partition("to repair")[2]


REMOVED = """
import os, sys
if "-c" in sys.orig_argv:  # the process that has torch
    import torch, torch.distributed.checkpoint, torch.distributed.fsdp, torch.distributed.tensor
    import torch.distributed.tensor.parallel, torch.nn.attention.flex_attention
{code}
"""
OPERATOR = """
    from torch._ops import _OpNamespace
    asked = _OpNamespace.__getattr__
    def without(self, name):
        if name == "_scaled_dot_product_flash_attention":
            raise AttributeError(name)
        return asked(self, name)
    _OpNamespace.__getattr__ = without
    vars(torch.ops.aten).pop("_scaled_dot_product_flash_attention", None)
"""
OF_FSDP = """
    from torch.distributed.fsdp import FSDPModule
    del FSDPModule._get_fsdp_state
"""
OF_DTENSOR = """
    del torch._C._clear_DTensor_sharding_propagator_cache
"""


@pytest.mark.all
@pytest.mark.parametrize(
    ("code", "path", "needed_by", "equal"),
    [
        (
            OPERATOR,
            "torch.ops.aten._scaled_dot_product_flash_attention",
            "context parallelism on CUDA in bf16 and fp16",
            AXES,
        ),
        (OF_FSDP, "torch.distributed.fsdp.FSDPModule._get_fsdp_state", "fully_shard", ("tp", "pp")),
        (
            OF_DTENSOR,
            "torch._C._clear_DTensor_sharding_propagator_cache",
            "a second process group in one process",
            AXES,
        ),
    ],
)
def test_a_private_name_that_is_gone_is_named_and_the_axes_without_it_are_equal(tmp_path, code, path, needed_by, equal):
    (tmp_path / "sitecustomize.py").write_text(REMOVED.format(code=code))
    done = doctor(tmp_path, "--json")
    told = json.loads(done.stdout)
    assert {"path": path, "needed_by": needed_by} in told["private points"]["all"]["figures"]["missing"]
    assert told["private points"][path]["status"] == "FAIL" and done.returncode == 1
    assert {axis for axis, verdict in told["verdicts"].items() if verdict == EQUAL} == set(equal), told["verdicts"]
    assert all(path.rpartition(".")[2] in verdict for axis, verdict in told["verdicts"].items() if axis not in equal)


@pytest.mark.all
def test_four_ranks_warn_once_of_a_release_that_is_newer_than_the_tested(tmp_path):
    info = tmp_path / "torch-2.99.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.99.0\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(meshwright.__file__).parents[1])])}
    command = [sys.executable, "-m", "meshwright", "train", "--steps=1", "--process.count=4", f"--out={tmp_path}"]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("torch 2.99.0 is newer than the releases") == 1
