"""A save beside training has the very bytes of the step at which it began, whatever training does meanwhile."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.odd import LAYOUTS, odd, train, written

from meshwright import load, save
from meshwright.checkpoint import background, writer
from meshwright.checkpoint.background import ENDINGS, LOOK_SEC, Saver, Talk, start_writer
from meshwright.checkpoint.folder import CheckpointFolder
from meshwright.checkpoint.manifest import Manifest
from meshwright.checkpoint.saving import Handle, is_beside
from meshwright.checkpoint.snapshot import Snapshot
from meshwright.checkpoint.state import stored_state
from meshwright.core.errors import ConfigError, IntegrityError
from meshwright.distributed.process import agree
from meshwright.distributed.process.workers import WorkerDied, is_broken_collective
from meshwright.distributed.weights.shards import pieces
from meshwright.training.run.checkpointing import Checkpointing


def frozen_state(model, optimizer, rank: int) -> dict:
    """(key, offset) -> the values of a box of now, copied."""
    return {
        (key, tuple(piece.offset)): piece.local.clone()
        for key, stored in stored_state(model, optimizer, rank).items()
        for piece in pieces(stored.values())
    }


def differing(wanted: dict, folder: Path) -> list[str]:
    found, wrong = written(folder), []
    for (key, offset), values in wanted.items():
        box = tuple(slice(low, low + size) for low, size in zip(offset, values.shape, strict=True))
        if not torch.equal(found[key][box].view(values.shape), values.cpu()):
            wrong.append(key)
    return wrong


def beside_job(layout: str, folder: str, options: dict) -> tuple[list[str], str]:
    model = odd(layout)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    optimizer = torch.optim.AdamW(model.make_parameter_groups(), lr=1e-2)
    saver, wrong = Saver(**options), []
    train(model, optimizer, range(1))
    for step in (1, 2, 3):
        path = Path(folder) / f"step-{step:08d}"
        wanted = frozen_state(model, optimizer, rank)
        handle = saver.begin(model, path, optimizer, {"step": step})
        train(model, optimizer, range(step, step + 2))
        handle.wait(60)
        wrong += differing(wanted, path)
        agree.everybody_says(0)
    saver.close()
    return wrong, handle.problem


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_saved_is_the_state_of_the_step_at_which_the_save_began(spmd, tmp_path, layout):
    for wrong, problem in spmd(LAYOUTS[layout][0], beside_job, layout, str(tmp_path), {}):
        assert wrong == [] and problem == ""


def test_with_little_host_memory_it_goes_in_portions(spmd, tmp_path):
    said = []
    for wrong, problem in spmd(2, beside_job, "fsdp2", str(tmp_path), {"host_memory": 4096}):
        assert wrong == [] and problem == "", said


def little() -> int:
    return 8192


def least() -> int:
    return 8


def bounded_job(folder: str) -> tuple[list[str], list[str], str]:
    said: list[str] = []
    wrong, problem = beside_job("fsdp2", folder, {"left": little, "say": said.append})
    try:
        beside_job("fsdp2", f"{folder}/none", {"left": least, "say": said.append})
    except ConfigError as error:
        return wrong + [problem] * bool(problem), said, str(error)
    return wrong, said, ""


def test_a_host_that_cannot_hold_the_copy_is_said_and_takes_portions(spmd, tmp_path):
    for wrong, said, refusal in spmd(2, bounded_job, str(tmp_path)):
        assert wrong == [] and len(said) == 1 and "checkpoint.host_memory: one row of" in refusal
        assert re.match(
            r"this host has 8.*B left for a rank, whose half holds a part of the .* saves: each", said[0]
        ), said


# --- what goes wrong beside a run, and what the run does


def trouble_job(folder: str, trouble: str) -> tuple[list[str], list[str], list[int]]:
    """Three saves, the second in trouble on rank 1: what was said, each save's problem, the steps that are there."""
    model = odd("fsdp2")
    rank, run, said = dist.get_rank(), CheckpointFolder(Path(folder)), []
    optimizer = torch.optim.AdamW(model.make_parameter_groups(), lr=1e-2)
    saver = Saver(when_busy=trouble if trouble in ("skip", "replace") else "wait", say=said.append)
    handles, wanted = [], []
    for step in (1, 2, 3):
        train(model, optimizer, range(step - 1, step))
        wanted.append(frozen_state(model, optimizer, rank))
        is_held = step == 2 and rank == 1 and saver._process is not None
        if is_held:
            os.kill(saver._process.pid, signal.SIGSTOP)  # a store that is slow, as long as it lasts
        handles.append(saver.begin(model, run.of_step(step), optimizer, {}, in_run=True))
        if is_held and trouble.startswith("killed"):
            os.kill(saver._process.pid, signal.SIGKILL)
        elif is_held:
            threading.Timer(3.0, os.kill, (saver._process.pid, signal.SIGCONT)).start()
        if step == 1 or trouble not in ("wait", "skip", "replace"):
            handles[-1].over.wait(60)
    for handle in handles:
        handle.over.wait(60)
    agree.everybody_says(0)
    for handle, values in zip(handles, wanted, strict=True):
        assert handle.done and (handle.problem or differing(values, Path(handle.path)) == [])
    agree.everybody_says(0)
    saver.close()
    return said, [handle.problem for handle in handles], run.steps()


def test_a_save_waits_for_the_one_before(spmd, tmp_path):
    (said, problems, steps), _ = spmd(2, trouble_job, str(tmp_path), "wait")
    assert problems == ["", "", ""] and steps == [1, 2, 3]
    assert any("waited" in line and "still being saved" in line for line in said), said


def test_a_save_is_skipped_while_another_is_under_way(spmd, tmp_path):
    for _, problems, steps in spmd(2, trouble_job, str(tmp_path), "skip"):
        assert problems[:2] == ["", ""] and "step-00000003 was not saved: an earlier save is still" in problems[2]
        assert steps == [1, 2]


def test_a_save_takes_the_place_of_the_one_under_way(spmd, tmp_path):
    for _, problems, steps in spmd(2, trouble_job, str(tmp_path), "replace"):
        assert problems[0] == problems[2] == "" and steps == [1, 3]
        assert problems[1].endswith("step-00000002 was given up: a later save took its place (checkpoint.when_busy)")


def hanging(saver: Saver, step: int) -> bool:
    """The writer of the second save hangs, in the middle of it or before."""
    if is_second := step == 2:
        assert saver._process is not None
        os.kill(saver._process.pid, signal.SIGSTOP)
    return is_second


def replaced_job(folder: str) -> tuple[list[bool], list[int]]:
    """Saves that each take longer than the step to the next."""
    model, run, handles = odd("one"), CheckpointFolder(Path(folder)), []
    saver, ask = Saver(when_busy="replace"), Saver._ask

    def slowly(self, handle, request):
        time.sleep(0.4)
        if handle.given_up:
            raise IntegrityError("another request came first")
        return ask(self, handle, request)

    with patch.object(Saver, "_ask", slowly):
        for step in range(8):
            handles.append(saver.begin(model, run.of_step(step), in_run=True))
            time.sleep(0.05)
        handles[-1].wait(60)
    saver.close()
    return [bool(handle.problem) for handle in handles], run.steps()


def test_a_save_that_took_the_place_of_another_is_let_end(spmd, tmp_path):
    ((lost, steps),) = spmd(1, replaced_job, str(tmp_path))
    assert not any(first and second for first, second in zip(lost, lost[1:], strict=False)) and any(lost)
    assert steps == [step for step, is_lost in enumerate(lost) if not is_lost]


def hung_job(folder: str, when_busy: str, host_memory: int) -> tuple[list[str], list[str], list[int], float]:
    """The second save's writer hangs on both ranks; a while later the run is told to stop, and goes on to its end."""
    model, said, told = odd("fsdp2"), [], threading.Event()
    run, handles = CheckpointFolder(Path(folder)), []
    optimizer = torch.optim.AdamW(model.make_parameter_groups(), lr=1e-2)
    saver = Saver(host_memory, when_busy=when_busy, say=said.append, stopped=told.is_set)
    with patch.object(background, "LONG_SEC", 0.2), patch.object(background, "HUNG_SEC", 1.0):
        for step in (1, 2, 3):
            train(model, optimizer, range(step - 1, step))
            if hanging(saver, step):
                threading.Timer(1.0, told.set).start()
                begun = time.perf_counter()
            handles.append(saver.begin(model, run.of_step(step), optimizer, {}, in_run=True))
            if step == 1:
                handles[-1].wait(60)
        saver.wait_for(handles[-1])
    agree.everybody_says(0)
    saver.close()
    return said, [handle.problem for handle in handles], run.steps(), time.perf_counter() - begun


@pytest.mark.parametrize(("when_busy", "host_memory"), [("wait", 0), ("replace", 0), ("wait", 4096)])
def test_a_writer_that_hangs_is_said_and_does_not_keep_a_run_that_is_told_to_stop(
    spmd, tmp_path, when_busy, host_memory
):
    for said, problems, steps, seconds in spmd(2, hung_job, str(tmp_path), when_busy, host_memory):
        said = [line for line in said if "portions" not in line]
        waits = f"training waits for {tmp_path}/step-00000002, which is still being saved"
        assert said[0] == waits and said.count(waits) == 1, said
        assert problems[0] == problems[2] == "" and steps == [1, 3] and seconds < 30
        assert re.search("was given up: it did not go on for 1 s after the run was told to stop$", problems[1]), (
            problems
        )


def lost_job(folder: str, waits: str) -> None:
    """Rank 1 is killed before it has written its part of a save, and rank 0 comes to wait for that save."""
    model, saver, rank = odd("fsdp2"), Saver(), dist.get_rank()
    if rank == 1:
        threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGABRT)).start()  # the pool waits 2 s for others
    with patch.object(Talk, "agreed", lambda *_: time.sleep(600)) if rank else nullcontext():
        saver.begin(model, f"{folder}/first")
        try:
            if waits == "save beside":
                saver.begin(model, f"{folder}/second")
            elif waits == "save":
                save(model, f"{folder}/second")
            else:
                load(model, f"{folder}/first")
        except Exception as error:
            Path(folder, "said").write_text(str(is_broken_collective(error)))
            raise
        finally:
            saver.close(grace=0)


@pytest.mark.parametrize("waits", ["save beside", "save", "load"])
def test_a_rank_that_is_lost_during_a_save_keeps_no_other_waiting(spmd, tmp_path, waits):
    begun = time.perf_counter()
    with pytest.raises(WorkerDied):
        spmd(2, lost_job, str(tmp_path), waits, timeout=60)
    assert time.perf_counter() - begun < 30
    assert (tmp_path / "said").read_text() == "True"


def told_job() -> list[list[bool]]:
    """The first rank has seen already that the save of this step failed."""
    odd("fsdp2")
    checkpoints, saved, handle = object.__new__(Checkpointing), [], Handle("state")
    handle.end("no space is left")
    values = {"saver": None, "say": str, "latest": None, "failed": -1, "at": SimpleNamespace(step=3)}
    vars(checkpoints).update(values, pending=(handle, 3))
    if dist.get_rank() == 0:
        checkpoints.look()
    with patch.object(Checkpointing, "save", lambda _, is_last: saved.append(agree.everybody_says(is_last))):
        checkpoints.finish()
    return saved


def test_a_save_that_failed_is_tried_again_by_all_ranks_whoever_saw_it_first(spmd):
    assert spmd(2, told_job, timeout=20) == [[[True, True]]] * 2


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_save_that_is_only_slow_is_waited_for_when_a_run_is_told_to_stop(goes_on):
    saver, handle, seconds = Saver(stopped=lambda: True), Handle("slow"), count()
    with (
        patch.object(background, "HUNG_SEC", -1.0),
        patch.object(Saver, "_worked", lambda _: goes_on and next(seconds)),
    ):
        for _ in range(4):
            saver._look_after(handle, time.perf_counter())
    assert bool(handle.given_up) != goes_on


def failing_then_job(folder: str) -> tuple[list[str], int]:
    model, said = odd("one"), []

    def then() -> None:
        raise ValueError("no mail goes out")

    handle = save(model, folder, asynchronous=True, then=then)
    try:
        handle.wait(60)
    except IntegrityError as error:
        said.append(str(error))
    load(model, folder)
    return said, handle.bytes


def test_a_checkpoint_whose_then_fails_is_said_to_be_whole(spmd, tmp_path):
    ((said, size),) = spmd(1, failing_then_job, str(tmp_path / "state"))
    assert said == [f"{tmp_path}/state is whole, but then= failed: ValueError: no mail goes out."] and size > 0


def test_a_dead_writer_is_replaced_and_the_save_is_whole(spmd, tmp_path):
    _, (said, problems, steps) = spmd(2, trouble_job, str(tmp_path), "killed")
    assert problems == ["", "", ""] and steps == [1, 2, 3]
    assert any("died (status -9): another one tries again" in line for line in said), said


def stray_job(layout: str, folder: str, write: str) -> tuple[str, list[str]]:
    """Write to the state before a save has copied it: the save's problem, and what the checkpoint has otherwise."""
    model = odd(layout)
    optimizer = torch.optim.AdamW(model.make_parameter_groups(), lr=1e-2)
    train(model, optimizer, range(1))
    wanted, others = frozen_state(model, optimizer, dist.get_rank()), model.state_dict()
    others = {name: torch.zeros_like(value) for name, value in others.items()}
    written_to, copy = threading.Event(), Snapshot.copy

    def copied_later(self: Snapshot, number: int) -> None:
        written_to.wait(60)
        copy(self, number)

    with patch.object(Snapshot, "copy", copied_later), torch.no_grad():
        handle = save(model, folder, optimizer=optimizer, asynchronous=True)
        if write == "load_state_dict":
            threading.Timer(0.5, written_to.set).start()
            model.load_state_dict(others)
        elif write == "weights":
            next(model.parameters()).mul_(2)
        else:
            next(iter(optimizer.state.values()))["exp_avg"].zero_()
        written_to.set()
        handle.over.wait(60)
    agree.everybody_says(0)
    return handle.problem, [] if handle.problem else differing(wanted, Path(folder))


@pytest.mark.fast
@pytest.mark.parametrize("write", ["weights", "moments", "load_state_dict"])
@pytest.mark.parametrize("layout", ["ddp2", "fsdp2"])
def test_what_is_written_under_a_save_costs_that_save_or_waits(spmd, tmp_path, layout, write):
    for problem, wrong in spmd(2, stray_job, layout, str(tmp_path / "state"), write):
        assert wrong == [] and ("was changed while a save was still copying it" in problem) == (
            write != "load_state_dict"
        )


def test_signals_that_end_a_run_do_not_end_its_writer():
    """They reach every process of a job, and some before this one has read its first line of code."""
    line, process = start_writer()
    assert process is not None
    for number in ENDINGS:
        process.send_signal(number)
    writer.send(line, {"do": "stop", "number": 1})
    assert writer.receive(line)[0] == {"number": 1}
    line.close()
    assert process.wait(60) == 0


def given_up_job(folder: str) -> tuple[list[str], float, list[int]]:
    model, run, said = odd("one"), CheckpointFolder(Path(folder)), []
    saver = Saver(say=said.append)
    saver.begin(model, run.of_step(1), in_run=True).wait(60)
    assert saver._process is not None
    os.kill(saver._process.pid, signal.SIGSTOP)  # a store that does not answer
    saver.begin(model, run.of_step(2), in_run=True)
    begun = time.perf_counter()
    saver.close(0.5)
    return said, time.perf_counter() - begun, run.steps()


def test_a_save_that_does_not_end_in_its_time_is_given_up_in_a_sentence(spmd, tmp_path):
    ((said, seconds, steps),) = spmd(1, given_up_job, str(tmp_path))
    assert len(said) == 1 and "step-00000002 was given up: its save had 0.5 s to end" in said[0] and steps == [1]
    assert seconds < 30


def same_place_job(folder: str) -> list[str]:
    """A save, another of the same folder at once, and a load at once: names of what is not as at the second save."""
    model = odd("fsdp2")
    optimizer = torch.optim.AdamW(model.make_parameter_groups(), lr=1e-2)
    train(model, optimizer, range(2))
    save(model, folder, optimizer=optimizer, asynchronous=True)
    train(model, optimizer, range(2, 3))
    wanted = frozen_state(model, optimizer, dist.get_rank())
    save(model, folder, optimizer=optimizer, asynchronous=True)
    train(model, optimizer, range(3, 5))
    load(model, folder, optimizer=optimizer)
    return [
        key
        for (key, _), now in frozen_state(model, optimizer, dist.get_rank()).items()
        if not any(torch.equal(now, then) for (name, _), then in wanted.items() if name == key)
    ]


def test_a_save_and_a_load_wait_for_the_save_before(spmd, tmp_path):
    assert spmd(2, same_place_job, str(tmp_path / "state")) == [[], []]


def test_a_place_that_no_other_process_can_write_is_said():
    said: list[str] = []
    assert not is_beside("memory://bucket/run", said.append) and "saves to it are synchronous" in said[0]
    assert is_beside("s3://bucket/run", said.append) and len(said) == 1


def test_the_first_rank_stays_until_the_others_have_read_how_it_went():
    """Its process may hold the store, and end with the script."""
    store, read = dist.HashStore(), []
    first, other = (Talk(store, rank, 2, "name", {}, False, {}, None, None) for rank in (0, 1))

    def late() -> None:
        time.sleep(0.5)
        read.append(other.agreed({"entries": []}, dict))

    thread = threading.Thread(target=late)
    thread.start()
    assert first.agreed({"entries": []}, lambda theirs: {"bytes": len(theirs)}) == {"bytes": 2}
    first.linger()
    assert store.check(["all read"])
    thread.join()
    assert read == [{"bytes": 2}]


def test_a_store_whose_file_is_gone_is_not_made_again(tmp_path):
    """A pool removes it behind a job, and torch would read for ever in one that begins anew, with its lock held."""
    file = tmp_path / "store"
    talk = Talk(dist.FileStore(str(file), 2), 0, 2, "name", {}, False, {}, None, None)
    talk.store.set("outcome", "so")
    threading.Thread(target=talk.linger, daemon=True).start()
    time.sleep(2 * LOOK_SEC)
    file.unlink()
    time.sleep(10 * LOOK_SEC)
    assert not file.exists()


def shared_pieces() -> set[int]:
    """Return the pieces of shared memory that this process has open."""
    files = [file for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    return {file.stat().st_ino for file in files if "meshwright-snapshot" in os.readlink(file)}


def frozen_job(folder: str) -> list[bool]:
    """Whether the frozen weights that a manifest knows are those of the save: at first, and once others are loaded."""
    model, found = odd("fsdp2", freeze=("blocks",)), []
    for turn in range(2):
        for beside in (True, False):
            save(model, f"{folder}/{turn}-{beside}", only_trained=True, asynchronous=beside).wait()
        one, other = (Manifest.read(f"{folder}/{turn}-{beside}").base for beside in (True, False))
        found.append(bool(one) and one == other)
        model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()})
    return found


def test_frozen_weights_of_a_save_beside_training_are_those_of_now(spmd, tmp_path):
    assert spmd(2, frozen_job, str(tmp_path)) == [[True, True]] * 2


def grown_job(folder: str) -> int:
    """Count the pieces that two saves leave open, the second of which outgrew the first."""
    before = shared_pieces()
    model, saver = odd("one"), Saver()
    saver.begin(model, Path(folder) / "weights", None).wait(60)
    optimizer = torch.optim.AdamW(model.make_parameter_groups(), lr=1e-2)
    train(model, optimizer, range(1))
    saver.begin(model, Path(folder) / "moments", optimizer).wait(60)
    left = shared_pieces() - before
    saver.close()
    return len(left)


def test_memory_that_a_save_outgrew_is_given_back(spmd, tmp_path):
    assert spmd(1, grown_job, str(tmp_path)) == [1]
