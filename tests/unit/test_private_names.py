"""A private name that another torch lacks switches off what needs it, by name, and nothing else."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.nn.attention.flex_attention

import meshwright
from meshwright.core import private_names
from meshwright.core.errors import UnsupportedError
from meshwright.core.host import DOCTOR, Range, installed
from meshwright.core.private_names import EVERYTHING, TABLE, PrivateName, found, found_or_none, is_there

OF_TORCH = {"DisableTorchFunctionSubclass", "_disable_dynamo", "_world", "FakeTensor", "FakeTensorMode"}
"""Names without which torch itself does not work."""
WITHOUT = """
import importlib, json, sys
import torch, torch.distributed.checkpoint, torch.distributed.fsdp, torch.distributed.pipelining
import torch.distributed.tensor, torch.nn.attention.flex_attention, torch.utils.checkpoint

from meshwright.core import private_names

removed, operators = json.loads(sys.argv[1]), type(torch.ops.aten).__getattr__

def remaining(namespace, name):
    if f"torch.ops.aten.{name}" in removed:
        raise AttributeError(name)
    return operators(namespace, name)

type(torch.ops.aten).__getattr__ = remaining
for path in removed:
    owner, _, name = path.rpartition(".")
    vars(private_names.walk(owner)).pop(name, None)
    sys.modules[path] = None

for name in ("meshwright", "meshwright.distributed", "meshwright.checkpoint", "meshwright.training.trainer"):
    module = importlib.import_module(name)
    for public in getattr(module, "__all__", ()):
        getattr(module, public)

from meshwright.distributed.parallelize import parallelize
from meshwright.models.decoder_config import DecoderConfig

model = parallelize(DecoderConfig(16, 8, 1, 2, 2, 8, 8))
tokens = torch.arange(8).view(1, 8)
loss = model.forward_backward({"tokens": tokens, "labels": tokens}).loss
model.optimizer_step(torch.optim.SGD(model.parameters(), lr=0.1))
assert torch.isfinite(loss)
missing = [row.path for row in private_names.missing() if row.path.startswith("torch.")]
print(json.dumps([sorted(removed), sorted(missing)]))
"""


def owner_of(row: PrivateName) -> object:
    return private_names.walk(row.path.rpartition(".")[0])


def can_go(row: PrivateName) -> bool:
    """Whether a module holds the name, and neither a class nor an object."""
    if not row.path.startswith("torch.") or row.needed_by == EVERYTHING or not row.is_expected() or row.cuda_only:
        return False
    return inspect.ismodule(owner_of(row))


REMOVABLE = [row for row in TABLE if can_go(row)]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(meshwright.__file__).parents[1]), "OMP_NUM_THREADS": "1"}


def test_nothing_is_missing_here():
    assert private_names.missing() == []


def test_each_name_has_one_row():
    assert [path for path, rows in Counter(row.path for row in TABLE).items() if rows > 1] == []
    assert all(row.needed_by and row.until for row in TABLE)


def test_the_table_needs_no_torch():
    code = "import sys; import meshwright.core.private_names; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], env=environment(), check=False).returncode == 0


@pytest.mark.parametrize("row", REMOVABLE, ids=lambda row: row.path)
def test_a_name_that_is_gone_is_seen_and_refused(row, monkeypatch):
    assert is_there(row)
    owner = owner_of(row)
    if type(owner) is type(torch.ops.aten):  # it makes operators anew when they are asked for
        monkeypatch.setattr(type(owner), "__getattr__", object.__getattribute__)
    monkeypatch.delattr(owner, row.name)
    monkeypatch.setitem(sys.modules, row.path, None)  # no file of a module is found either
    monkeypatch.setattr(private_names, "_FOUND", {})
    assert not is_there(row) and found_or_none(row.path) is None
    with pytest.raises(UnsupportedError) as refused:
        found(row.path)
    words = f"torch {installed('torch')} has no {row.path}, which {row.needed_by} needs; the rest works"
    assert str(refused.value) == f"{words} ('meshwright doctor' lists what does)"


def test_what_needs_none_of_them_works_without_all_of_them():
    asked = json.dumps([row.path for row in REMOVABLE if row.name not in OF_TORCH])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT, asked],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    removed, missing = json.loads(done.stdout.splitlines()[-1])
    assert [path for path in missing if path.rpartition(".")[0] not in removed] == removed and len(removed) > 30


def test_an_attribute_that_is_gone_is_refused_by_its_row():
    from meshwright.distributed import torch_private

    changed = SimpleNamespace(_get_fsdp_state=SimpleNamespace)
    with pytest.raises(UnsupportedError, match=r"FSDPState\._lazy_init, which .* float8 needs; the rest works"):
        torch_private.begin_forward(changed)
    with pytest.raises(UnsupportedError, match=r"FSDPModule\._get_fsdp_state, which fully_shard needs"):
        torch_private.begin_forward(object())
    with pytest.raises(AttributeError, match="items"):  # a mistake of the caller stays what it is
        private_names.needs("torch.Tensor._version")(lambda value: value.items())(1)


def test_an_essential_name_that_is_gone_is_one_sentence():
    row = next(row for row in TABLE if row.needed_by == EVERYTHING)
    assert str(private_names.absent(row.path)).endswith(f"which everything needs; {DOCTOR}")


@pytest.mark.parametrize(
    ("seen", "here", "expected"),
    [
        (Range("2.12", "2.15"), "2.11.0", False),
        (Range("2.12", "2.15"), "2.12.1", True),
        (Range("2.12", "2.15"), "2.16.0", True),
        (Range("2.11", "2.13"), "2.13.0", True),
        (Range("2.11", "2.13"), "2.14.1", False),
    ],
)
def test_a_name_is_expected_from_its_oldest_release_until_it_was_seen_gone(seen, here, expected, monkeypatch):
    monkeypatch.setattr("meshwright.core.private_names.installed", lambda package: here)
    assert PrivateName("torch._some", "something", "a public name", seen).is_expected() is expected


def test_names_of_cuda_are_not_missed_in_other_builds(monkeypatch):
    row = PrivateName("torch._C._of_cuda", "profiles", "a public name", cuda_only=True)
    monkeypatch.setattr(private_names, "TABLE", (row,))
    monkeypatch.setattr(torch.version, "cuda", None)
    assert private_names.missing() == []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert private_names.missing() == [row]


def test_libraries_that_are_not_installed_are_passed_over(monkeypatch):
    monkeypatch.setattr(private_names, "TABLE", (PrivateName("no_such_library._name", "nothing", "a public name"),))
    assert private_names.missing() == []
