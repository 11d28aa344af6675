"""A disk that fails while a run saves or writes its figures: every rank ends with a sentence, and the newest
checkpoint is whole.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist
from e2e_runs import Job, losses, nested
from support.disk import broken, failing_disk, full
from support.thread_writer import on_a_thread

from meshwright.checkpoint import store
from meshwright.checkpoint.folder import CheckpointFolder
from meshwright.checkpoint.manifest import Manifest
from meshwright.core.errors import MeshwrightError
from meshwright.distributed.process import agree
from meshwright.distributed.process.world import is_rank_zero
from meshwright.training.build import build_run
from meshwright.training.config import Config
from meshwright.training.metrics import MetricsWriter
from meshwright.training.run.checkpointing import Checkpointing, Position
from meshwright.training.run.folder import RunFolder
from meshwright.training.stopping import StopRequest
from meshwright.training.throughput import StartupTimeline
from meshwright.training.views.progress import Progress

MOST = 400


class Sweep:
    """Saves of a run on this rank; before each failing save a step is taken, so that no two checkpoints are equal."""

    def __init__(self, changes: dict):
        config = Config.from_dict(nested(changes))
        self.run = build_run(config, StartupTimeline(), Progress(), StopRequest())
        folder = agree.together(lambda: RunFolder.open(config, self.run.identity), here=is_rank_zero())
        self.at = Position()
        self.said: list[str] = []
        self.keeper = Checkpointing(self.run, agree.from_rank_zero(folder), self.at, self.said.append, StopRequest())
        self.whole: tuple[int, dict] = (0, {})

    def step(self) -> None:
        self.run.model.forward_backward(next(self.run.feed.loader))
        self.run.model.optimizer_step(self.run.optimizer.optimizer)
        self.at.step += 1

    def weights(self) -> dict:
        local = {name: getattr(p.detach(), "to_local", p.detach)() for name, p in self.run.model.named_parameters()}
        return {name: tensor.clone() for name, tensor in local.items()}

    def save(self) -> str:
        """What the save is refused with on this rank, "" where it is not; one beside training is waited for."""
        self.said.clear()
        try:
            self.keeper.save()
            if self.keeper.pending is not None:
                self.keeper.pending[0].over.wait()
                self.keeper.look()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        if failed := [line for line in self.said if "The next save tries again" in line]:
            return f"IntegrityError: {failed[0]}"
        self.whole = (self.at.step, self.weights())
        return ""

    def faults(self, save, rank: int, fail_at: int, error) -> tuple[str, str, list[str]]:
        """One failing save, and what goes on after it: (what is wrong with it, what it said, changes to the disk)."""
        self.step()
        attempted = {self.whole[0]: self.whole[1], self.at.step: self.weights()}
        with failing_disk(fail_at if dist.get_rank() == rank else 0, error) as seen:
            said = save()
        wrong = "" if not said or said.startswith("IntegrityError: cannot ") else f"not a sentence: {said}"
        if len(set(agree.everybody_says(said))) > 1:
            wrong = "the ranks do not agree"
        try:
            self.keeper.resume(StartupTimeline())
        except MeshwrightError as problem:
            wrong = f"the newest does not load: {problem}"
        there = self.at.step
        if agree.any_rank(there not in attempted or not equal(self.weights(), attempted[there])):
            wrong = f"the newest was never saved: step {there}"
        if agree.any_rank(bool(wrong)):
            return wrong or "see another rank", said, seen
        self.step()
        return self.save(), said, seen


def equal(one: dict, other: dict) -> bool:
    return all(one[name].equal(other[name]) for name in one)


def sweep_job(changes: dict, rank: int, fault: str, manifest_first: bool = False) -> list[tuple[str, str, str]]:
    """For every n until a save passes: (kind of the n-th change on ``rank``, what was said, what is wrong)."""
    beside = on_a_thread() if changes["checkpoint.asynchronous"] else nullcontext()
    with beside, patch.object(store, "ROOM", 1 << 14):  # so that a pack of a small model takes several writes
        return swept(Sweep(changes), rank, {"full": full, "broken": broken}[fault], manifest_first)


def swept(sweep: Sweep, rank: int, error, manifest_first: bool) -> list[tuple[str, str, str]]:
    sweep.step()
    assert sweep.save() == ""

    def careless() -> str:
        """The manifest before the pieces: the last one's, under this step's name."""
        folder = sweep.keeper.folder

        def manifest_first() -> None:
            last = folder.latest()
            assert isinstance(last, Path)
            said = Manifest.read(last)
            far = {pack: pack if "/" in pack else f"{last.name}/{pack}" for pack in said.files}
            tensors = {
                key: replace(row, pieces=tuple(replace(piece, pack=far[piece.pack]) for piece in row.pieces))
                for key, row in said.tensors.items()
            }
            extra = {"state": {**said.extra["state"], "step": sweep.at.step}}
            files = {far[pack]: entry for pack, entry in said.files.items()}
            replace(said, tensors=tensors, files=files, extra=extra).write(folder.of_step(sweep.at.step))

        try:
            agree.together(manifest_first, here=is_rank_zero())
        except OSError as error:
            return f"IntegrityError: cannot write the manifest: {error}"
        return sweep.save()

    found = []
    for fail_at in range(1, MOST):
        save = careless if manifest_first else sweep.save
        wrong, said, seen = sweep.faults(save, rank, fail_at, error)
        if agree.largest(len(seen) if dist.get_rank() == rank else 0) < fail_at:
            return found if not wrong and not said else [*found, ("untouched", said, wrong or said)]
        kind = next(k for k in agree.everybody_says(seen[fail_at - 1] if dist.get_rank() == rank else "") if k)
        found.append((kind, said, wrong))
        if wrong:
            return found
    return [*found, ("", "", "no save passed untouched")]


@pytest.mark.all
@pytest.mark.parametrize("asynchronous", [False, True], ids=["waited-for", "beside"])
@pytest.mark.parametrize(
    ("rank", "fault", "words"), [(0, "full", "No space left on device"), (1, "broken", "Input/output error")]
)
def test_a_disk_that_fails_at_any_change_of_a_save_costs_that_save_only(spmd, small, rank, fault, words, asynchronous):
    changes = small({"checkpoint.keep_last": 1, "checkpoint.asynchronous": asynchronous})
    one, other = spmd(2, sweep_job, changes, rank, fault, timeout=600)
    assert one == other and [wrong for _, _, wrong in one if wrong] == [], one
    kinds = [kind for kind, said, _ in one if said]
    assert {"write", "fsync"} <= set(kinds) and len(kinds) >= (10 if rank == 0 else 2), one
    for kind, said, _ in one:
        assert words in said or (kind in ("mkdir", "rename") and not said), (
            "torch's mkdir of a folder that is there, and removing an old step"
        )


@pytest.mark.kills("disk", mutant="manifest first")
def test_a_save_that_writes_the_manifest_first_is_caught(spmd, small):
    found = spmd(2, sweep_job, small({"checkpoint.asynchronous": False}), 0, "full", True)[0]
    assert "the newest was never saved" in found[-1][2] or "does not load" in found[-1][2], found


class FullAtStep(Job):
    """A run whose metrics cannot be written from step 3 on."""

    def __call__(self):
        write = MetricsWriter._write

        def failing(writer, line, *values):
            if line.get("step") == 3:
                raise full()
            write(writer, line, *values)

        MetricsWriter._write = failing  # pyright: ignore[reportAttributeAccessIssue]
        try:
            return super().__call__()
        finally:
            MetricsWriter._write = write


@pytest.mark.all
def test_figures_that_cannot_be_written_end_the_run_on_every_rank(train, small):
    results = train(2, job=FullAtStep(small({"checkpoint.every": 2})))
    for result in results:
        assert result.status == 1 and "metrics.jsonl: [Errno 28] No space left on device. Make room, then" in str(
            result.error
        )
    run = Path(str(results[0].error).rpartition(" ")[2])
    assert CheckpointFolder(run / "checkpoints").latest() == run / "checkpoints/step-00000002"
    again = train(2, {}, folder=run)[0]
    assert again.status == 0 and len(losses(run)) == 6
