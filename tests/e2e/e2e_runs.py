"""Runs for the end-to-end tests: on the ranks of the pool, or as commands; and what their folders hold."""

from __future__ import annotations

import contextlib
import hashlib
import io
import random
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

import meshwright.checkpoint as checkpoint
from meshwright.core.errors import MeshwrightError
from meshwright.data import load_tokenizer
from meshwright.data.loader import Loader
from meshwright.distributed.parallelize import parallelize
from meshwright.distributed.setup import destroy_distributed
from meshwright.distributed.step import batch as step_batch
from meshwright.training import build, feed, model_source
from meshwright.training.config import Config
from meshwright.training.metrics import read_metrics
from meshwright.training.throughput import Throughput
from meshwright.training.trainer import Trainer
from meshwright.training.views import telling


def nested(dotted: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in dotted.items():
        *path, name = key.split(".")
        place = tree
        for part in path:
            place = place.setdefault(part, {})
        place[name] = value
    return tree


@dataclass
class Result:
    """What came of a run on one rank. ``folder`` is where rank 0 said that it is."""

    status: int
    out: str
    error: MeshwrightError | None = None
    samples: list[list[list[int]]] = field(default_factory=list)
    """Of each step, the rows of tokens that this rank was given."""

    @property
    def folder(self) -> Path:
        return Path(
            next(line.split("folder", 1)[1].strip() for line in self.out.splitlines() if line.startswith("  folder"))
        )


@dataclass
class Job:
    """A run, whole, on every rank that calls it: of a config, or one more part of the run in ``folder`` with
    ``changes`` over it.
    """

    changes: dict[str, Any]
    folder: str | None = None

    def config(self) -> Config:
        if self.folder is None:
            return Config.from_dict(nested(self.changes))
        from meshwright.cli.arguments import read_config

        flags = [f"--{key}={value}" for key, value in self.changes.items()]
        return read_config([self.folder, *flags], prog="meshwright train")

    def __call__(self) -> Result:
        words, samples = io.StringIO(), []
        status, problem = 1, None
        with contextlib.redirect_stdout(words), _recorded(samples):
            try:
                status = Trainer(self.config()).run()
            except MeshwrightError as error:
                status, problem = error.exit_status, error
        return Result(status, words.getvalue(), problem, samples)


class OfPeak(Job):
    """A run on devices of a known peak, 1 TFLOP/s; beside its result, the tokens of each step that it counted, and
    those of this rank that are no padding.
    """

    def __call__(self) -> Any:
        peak, add, count, counted, real = telling.peak_flops, Throughput.add, step_batch.count, [], []

        def added(self, row_lengths, seconds):
            counted.append(sum(row_lengths))
            add(self, row_lengths, seconds)

        def seen(pieces):
            if pieces:  # a step counts none before it has brought some
                real.append(sum(int((piece["document_ids"] >= 0).sum()) for piece in pieces))
            return count(pieces)

        telling.peak_flops, Throughput.add, step_batch.count = lambda *_: 1e12, added, seen
        try:
            return super().__call__(), counted, real
        finally:
            telling.peak_flops, Throughput.add, step_batch.count = peak, add, count


@contextlib.contextmanager
def _recorded(samples: list):
    class Recording(Loader):
        def __next__(self):
            batch = super().__next__()
            pieces = batch if isinstance(batch, list) else [batch]
            samples.append([row for piece in pieces for row in piece["tokens"].tolist()])
            return batch

    before, feed.Loader = feed.Loader, Recording
    try:
        yield
    finally:
        feed.Loader = before


def rows_of_step(results: Sequence[Result], step: int) -> list[list[int]]:
    """The global batch of a step: the ranks' rows end to end."""
    return [row for result in results for row in result.samples[step]]


def contents(path: Path) -> dict[str, Any]:
    """Every tensor of a checkpoint and its optimizer, read by ``load`` into one process; and what lies beside them."""
    config = Config.from_toml(path.parent.parent / "config.toml")
    precision = config.techniques.precision
    model_config = model_source.model_source(config, load_tokenizer(config.data.tokenizer))
    model = parallelize(model_config, None, techniques={"precision": {"master": precision.master}})
    optimizer = build.build_optimizer(config, model.named_parameters()).optimizer
    extra = checkpoint.load(model, path, optimizer=optimizer)
    tensors = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    state = {
        f"{name}/{key}": value for name, p in model.named_parameters() for key, value in optimizer.state[p].items()
    }
    destroy_distributed()
    return {"tensors": tensors | state, "extra": extra}


def assert_equal_checkpoints(one: Path, other: Path) -> None:
    """Weights, optimizer state and what lies beside them, bit by bit."""
    here, there = contents(one), contents(other)
    assert here["extra"] == there["extra"]
    assert here["tensors"].keys() == there["tensors"].keys()
    differing = [name for name, tensor in here["tensors"].items() if not torch.equal(tensor, there["tensors"][name])]
    assert not differing, differing


def tree(folder: Path) -> dict[str, str]:
    """Every file below a folder, with a digest of its content."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of the steps."""
    return [row for row in read_metrics(folder / "metrics.jsonl") if "loss" in row]


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in metrics(folder)]


def only_run(parent: Path) -> Path:
    """The one run below a folder of runs."""
    (folder,) = parent.iterdir()
    return folder


@dataclass
class Ended:
    status: int
    out: str
    err: str


def start(words: Sequence[str], environment: Mapping[str, str], cwd: Path) -> subprocess.Popen:
    """Start a command as the first of a process group of its own, as a terminal does.

    Under nohup too, which has a HUP ignored.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    hears = lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL) and None  # noqa: E731
    return subprocess.Popen(words, env=dict(environment), cwd=cwd, start_new_session=True, preexec_fn=hears, **pipes)


def finish(process: subprocess.Popen, timeout: float = 200.0) -> Ended:
    """Wait for the end. What does not end is ended with all its children, and fails the test."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        end([psutil.Process(process.pid), *family(process)])
        raise
    return Ended(process.returncode, out, err)


def family(process: subprocess.Popen) -> list[psutil.Process]:
    """Every descendant."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(process.pid).children(recursive=True)
    return []


def end(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def free_port() -> int:
    """A port in the range that Slurm's job numbers are mapped to."""
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free port")
