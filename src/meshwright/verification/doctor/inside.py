"""Look at torch from within, in a process of its own: build, devices, back ends, private points; then try the axes.

The process writes a line of JSON when a stage begins and when it ends, so that a crash or a hang has a place. Whatever
else is printed goes to stderr. torch is imported once; what may take the process down runs in forks of it.
"""

from __future__ import annotations

import functools
import json
import multiprocessing as mp
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TextIO

from meshwright.core.devices import gpu_count
from meshwright.core.errors import ConfigError, IntegrityError, MeshwrightError, MissingExtraError, UnsupportedError

Told = dict[str, Any]


def main(limit_s: float) -> None:
    """Write the findings of every stage to stdout; give up trials that have not ended after ``limit_s`` seconds."""
    deadline = time.monotonic() + limit_s
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if not _stage(out, "torch", build):
        return
    forks = Forks(out, deadline)
    forks.start("devices", devices)
    _stage(out, "meshwright.distributed", back_ends)
    forks.start("private points", private_points)
    for name, trial in TRIALS.items():
        forks.start(name, trial)
    forks.collect()


def _stage(out: TextIO, name: str, function: Callable[[], Told]) -> bool:
    _tell(out, stage=name)
    told = answered(function)
    _tell(out, stage=name, **told)
    return "error" not in told


def answered(function: Callable[[], Told]) -> Told:
    """Return a function's answer and its seconds, or a sentence for what it raised."""
    began = time.monotonic()
    try:
        told = {"found": function()}
    except BaseException as error:  # noqa: BLE001  (whatever is broken here is a finding)
        told = {"error": sentence_of(error), "refused": isinstance(error, REFUSALS)}
    return {**told, "seconds": round(time.monotonic() - began, 2)}


REFUSALS = (ConfigError, UnsupportedError, MissingExtraError)


def sentence_of(error: BaseException) -> str:
    """Return the words of our own errors, and class and words of any other; of a worker's, those of its cause."""
    cause = getattr(error, "error", None)
    if isinstance(cause, BaseException):
        return sentence_of(cause)
    words = " ".join(str(error).split())
    if isinstance(error, MeshwrightError):
        is_traceback = "Traceback (most recent call last)" in words
        return str(error).strip().splitlines()[-1].strip() if is_traceback else words
    return f"{type(error).__name__}: {words}"


class Forks:
    """Processes that this one forks, each for one question, with a common deadline."""

    def __init__(self, out: TextIO, deadline: float):
        self.out, self.deadline = out, deadline
        self._context = mp.get_context("fork")
        self._running: dict[Connection, tuple[str, Any]] = {}
        self._began = time.monotonic()

    def start(self, name: str, function: Callable[[], Told]) -> None:
        def answer(pipe: Connection) -> None:
            told = answered(function)
            with suppress(BrokenPipeError):
                pipe.send(told)
            os._exit(0)  # a process group that is half broken must not hold the answer back

        here, there = self._context.Pipe(duplex=False)
        process = self._context.Process(target=answer, args=(there,), daemon=False)
        _tell(self.out, stage=name)
        process.start()
        there.close()
        self._running[here] = (name, process)

    def collect(self) -> None:
        """Tell every answer as it comes; kill what has not answered at the deadline."""
        while self._running and (left := self.deadline - time.monotonic()) > 0:
            for pipe in wait(list(self._running), left):
                name, process = self._running.pop(pipe)  # type: ignore[arg-type]
                try:
                    told = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    process.join(5)
                    told = {"error": f"the process ended with status {process.exitcode}"}
                _tell(self.out, stage=name, **told)
        for name, process in self._running.values():
            process.kill()
            _tell(self.out, stage=name, timed_out=round(time.monotonic() - self._began))


def _tell(out: TextIO, **values: Any) -> None:
    print(json.dumps(values), file=out, flush=True)


def build() -> Told:
    """Return what this torch was built for."""
    import torch

    from meshwright.core.devices import cuda_release

    return {
        "version": torch.__version__,
        "folder": str(Path(torch.__file__).parent),
        "accelerator": cuda_release() or getattr(torch.version, "hip", None),
        "is_rocm": getattr(torch.version, "hip", None) is not None,
        "cudnn": torch.backends.cudnn.version(),
    }


def devices() -> Told:
    """Return the accelerators that torch can use here, and why not where it should."""
    import torch

    from meshwright.core.devices import device_memory, is_accelerator, local_device, why_cuda_is_unusable

    kind, why = local_device(), why_cuda_is_unusable()
    module = torch.get_device_module(kind)
    count = module.device_count() if is_accelerator(kind) else 0
    named = getattr(module, "get_device_name", lambda index: kind)
    found = [{"name": named(index), "bytes": device_memory(kind, index)} for index in range(count)]
    return {"kind": kind, "devices": found, "unusable": why}


def back_ends() -> Told:
    """Import all that the trials need, once for the forks, and return torch's back ends."""
    import meshwright.distributed.parallelize
    import meshwright.verification.verify  # noqa: F401
    from meshwright.core.torch_private import import_compiler
    from meshwright.distributed.setup import back_ends as found

    import_compiler()
    return found()


def private_points() -> Told:
    """Return how many private names of other libraries are used, and those that are not here."""
    from meshwright.core import private_names

    gone = [{"path": name.path, "needed_by": name.needed_by} for name in private_names.missing()]
    return {"count": len(private_names.TABLE), "missing": gone}


# --- try in small what a run does: two processes exchange data, and each axis trains a tiny decoder beside one process

RANKS = 2
EXCHANGE = "exchange"
AXES = {"dp_shard": "dp_shard=2", "tp": "tp=2,dp_shard=1", "pp": "pp=2,dp_shard=1"}
"""Axis -> the layout that is compared with one process."""
LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID")
NOWHERE = "CUDA_VISIBLE_DEVICES"


def exchange() -> dict[str, Any]:
    """Let two processes exchange tensors, on the CPU and between two GPUs; raise IntegrityError for other numbers."""
    with _pool() as pool:
        from meshwright.distributed.setup import exchanged

        return {"messages": pool.run(exchanged)[0]}


def axis(name: str) -> dict[str, Any]:
    """Compare two steps of a tiny decoder over an axis of two ranks with one process, in float64."""
    with _pool() as pool:
        from meshwright.models.decoder_config import DecoderConfig
        from meshwright.planning.layout import Layout
        from meshwright.verification.verify import verify

        model = DecoderConfig(vocab_size=64, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=64, max_seq_len=64)
        report = verify(model, Layout.parse(AXES[name]), steps=2, dtypes=("float64",), pool=pool)
    if not report:
        raise IntegrityError(f"differs from one process: {report.comparisons[0].lines()[0].strip()}")
    return {"worst": max(d.error for c in report.comparisons for d in c.differences)}


TRIALS: Mapping[str, Callable[[], dict[str, Any]]] = {
    EXCHANGE: exchange,
    **{name: functools.partial(axis, name) for name in AXES},
}


def _pool():
    """Return two workers forked from this process, which compute on GPUs if there are two, outside any launcher."""
    from meshwright.distributed.process.workers import WorkerPool
    from meshwright.distributed.process.world import refuse_without_distributed

    refuse_without_distributed()  # before other imports fail over it
    for variable in LAUNCHERS:
        os.environ.pop(variable, None)
    if gpu_count() < RANKS:
        os.environ[NOWHERE] = ""
    return WorkerPool(RANKS, method="fork")
