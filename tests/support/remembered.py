"""Values that many tests need and one computation gives: one process's results, how a model can be cut, which plans
were proven.

They lie on disk by content: a value's name is a digest of what was asked, of the sources that answer, and of the
versions of Python and the packages below. So the two halves of a run share them, and so does the next run, as long as
nothing changes that they depend on.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib
import io
import os
import pickle
import platform
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from meshwright.distributed.pipeline.split import rehearse as rehearse_stages
from meshwright.distributed.tensor.parallel import rehearse
from meshwright.introspection.premises.premises import Premises, play
from meshwright.introspection.small.sample import Sample
from meshwright.introspection.stages import Branch
from meshwright.introspection.structure.experts import Stack, measure_stacks
from meshwright.introspection.structure.structure import Measured, measured
from meshwright.planning.pipeline.plan import PipelinePlan
from meshwright.planning.tensor.plan import TensorPlan

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".cache" / "tests"
PACKAGES = ("numpy", "peft", "torch", "torchao", "transformers")

SMALL_COPIES = ("core", "models", "introspection", "comparison", "planning")
"""Folders of the package that say how a model can be cut."""
PROOFS = (*SMALL_COPIES, "distributed")
ONE_PROCESS = (*PROOFS, "verification")
"""And of one process's results."""


def digest_of_sources(folders: Iterable[str], house: Path = ROOT) -> str:
    """A digest of all Python files in folders of the package and in tests/support, and of the versions."""
    found = hashlib.sha256(f"python {platform.python_version()}".encode())
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found.update(f"{package} {version(package)}".encode())
    for folder in [*(house / "src" / "meshwright" / name for name in folders), house / "tests" / "support"]:
        for path in sorted(folder.rglob("*.py")):
            found.update(f"\0{path.relative_to(house)}\0".encode() + path.read_bytes())
    return found.hexdigest()


class Store:
    """A folder of pickled values that were computed from the same sources.

    Several processes may ask at once: one computes, others wait.

    Args:
        sources: a digest of all that the values depend on besides what is asked.
    """

    def __init__(self, kind: str, sources: str, folder: Path = FOLDER):
        self.folder = folder / f"{kind}-{sources[:16]}"

    def get(self, key: bytes, compute: Callable[[], Any]) -> Any:
        """The value of ``key``; computed where it is not known. What raises is not remembered."""
        path = self.folder / hashlib.sha256(key).hexdigest()
        with suppress(OSError, EOFError, pickle.UnpicklingError):
            return pickle.loads(path.read_bytes())
        self.folder.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            with suppress(OSError, EOFError, pickle.UnpicklingError):
                return pickle.loads(path.read_bytes())
            value = compute()
            with suppress(pickle.PicklingError, AttributeError, TypeError, RuntimeError):  # it holds what cannot travel
                text = pickled(value)
                written = path.with_suffix(f".{os.getpid()}")
                written.write_bytes(text)
                written.replace(path)
        return value


class _Pickler(pickle.Pickler):
    """Leaves out what a call was given to compute meanwhile (models/layers): it was computed."""

    def reducer_override(self, obj: Any) -> Any:
        return (type(None), ()) if isinstance(obj, functools._lru_cache_wrapper) else NotImplemented


def pickled(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


@contextmanager
def _locked(path: Path):
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@cache
def store(kind: str, folders: tuple[str, ...]) -> Store:
    return Store(kind, digest_of_sources(folders))


def key_of(asked: Any) -> bytes:
    """The pickle of what is asked, with the sources of all functions and classes in it that the tests define."""
    text = pickle.dumps(asked)
    found = _Globals(text)
    found.load()
    return b"\0".join([text, *_own_sources(found.modules)])


def _own_sources(modules: set[str]) -> list[bytes]:
    """Of those modules that are the tests' own."""
    files = [getattr(importlib.import_module(name), "__file__", None) for name in sorted(modules)]
    return [Path(file).read_bytes() for file in files if file and Path(file).is_relative_to(ROOT / "tests")]


class _Globals(pickle.Unpickler):
    """Notes the modules of all that a pickle refers to."""

    def __init__(self, text: bytes):
        super().__init__(io.BytesIO(text))
        self.modules: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        self.modules.add(module)
        return super().find_class(module, name)


# --- what one process makes of a problem


def is_of_one_process(job: Callable[..., Any]) -> bool:
    """Whether a job computes what a problem comes to in one process, by code that no test patches."""
    function = job.func if isinstance(job, partial) else job
    return (getattr(function, "__module__", ""), getattr(function, "__qualname__", "")) in {
        ("support.oracle", "oracle"),
        ("support.oracle", "floors"),
        ("support.oracle", "bf16_gradients"),
        ("meshwright.verification.compare", "references"),
    }


def of_one_process(job: Callable[..., Any], args: tuple, compute: Callable[[], Any]) -> Any:
    return store("one-process", ONE_PROCESS).get(key_of((job, args)), compute)


# --- how a model can be cut, and what a rehearsal of that gave


@dataclass(frozen=True)
class Remembering:
    """A job for workers, in which equal models are measured once, and a plan of them is rehearsed once."""

    job: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        remember()
        return self.job(*args)


def remember() -> None:
    """From now on this process measures equal models once, and rehearses a plan of them once."""
    from meshwright.distributed.pipeline import split as stages_rehearsal
    from meshwright.distributed.tensor import parallel as tensor_rehearsal
    from meshwright.introspection import measurements
    from meshwright.introspection.premises import premises

    premises.play = _played_once
    measurements.measured, measurements.measure_stacks = _measured_once, _stacks_once
    tensor_rehearsal.rehearse, stages_rehearsal.rehearse = _rehearsed_once, _stages_once


def identity(model: nn.Module) -> bytes | None:
    """Equal for models whose modules, parameters and configs are.

    None for one that has no config or was changed: it may hold anything.
    """
    config, types = getattr(model, "config", None), {type(module) for module in model.modules()}
    if (
        config is None
        or any("<locals>" in t.__qualname__ for t in types)
        or any("forward" in vars(m) for m in model.modules())
    ):
        return None
    modules = [(path, f"{type(m).__module__}.{type(m).__qualname__}") for path, m in model.named_modules()]
    parameters = [
        (n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in model.named_parameters(remove_duplicate=False)
    ]
    ties = [name for name, _ in model.named_parameters()]
    return b"\0".join(
        [repr((modules, parameters, ties, str(config))).encode(), *_own_sources({t.__module__ for t in types})]
    )


def _remembered(kind: str, folders: tuple[str, ...], model: nn.Module, more: Any, compute: Callable[[], Any]) -> Any:
    key = identity(model)
    if key is None:
        return compute()
    key += pickle.dumps(more)
    if (kind, key) not in _KNOWN:
        _KNOWN[kind, key] = store(kind, folders).get(key, compute)
    return _KNOWN[kind, key]


_KNOWN: dict[tuple[str, bytes], Any] = {}
"""Of this process."""


def _measured_once(model: nn.Module, ranks: int) -> Measured:
    return _remembered("measured", SMALL_COPIES, model, ranks, lambda: measured(model, ranks))


def _played_once(model: nn.Module) -> Premises:
    modes = [module.training for module in model.modules()]
    return _remembered("premises", SMALL_COPIES, model, modes, lambda: play(model))


def _stacks_once(model: nn.Module, ranks: int) -> tuple[Stack, ...]:
    return _remembered("stacks", SMALL_COPIES, model, ranks, lambda: measure_stacks(model, ranks))


def _rehearsed_once(
    model: nn.Module, plan: TensorPlan, inputs: dict[str, Any], *, logits: str = "whole", sums_at_once: bool = False
) -> dict[str, float]:
    asked = (plan, _plain(inputs), logits, sums_at_once)
    compute = partial(rehearse, model, plan, inputs, logits=logits, sums_at_once=sums_at_once)
    return _remembered("rehearsed", PROOFS, model, asked, compute)


def _stages_once(sample: Sample, plan: PipelinePlan, branch: Branch) -> dict[str, float]:
    asked = (plan, _plain(branch.inputs), branch.training, branch.inverted)
    return _remembered("stages", PROOFS, sample.model, asked, partial(rehearse_stages, sample, plan, branch))


def _plain(inputs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(name, value.tolist() if isinstance(value, Tensor) else value) for name, value in inputs.items()]
