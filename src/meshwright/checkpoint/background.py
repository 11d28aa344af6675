"""Save beside training: take a snapshot, let a process write it, and make it a checkpoint once all ranks have written.

Ranks meet once, at the step at which the save begins. From then on they talk through torch's store, in threads: each
brings the entries of its pieces there, the first rank writes the manifest, and all read how that went. So no step
waits for a rank that writes slowly, and no rank takes a save for whole that is not.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
import torch.distributed as dist

from meshwright.core.dtypes import bytes_text, duration_text
from meshwright.core.errors import IntegrityError
from meshwright.core.torch_private import version_of
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.distributed.process import agree
from meshwright.distributed.process.world import is_rank_zero, ranks_per_node
from meshwright.distributed.torch_private import default_store
from meshwright.distributed.weights.shards import memory_of

from . import writer
from .folder import Claim
from .host_memory import HostMemory
from .manifest import NAME, pack_name
from .saving import (
    UNTOUCHED,
    Handle,
    finish_saves,
    is_beside,
    make_room,
    manifest_fields,
    runs_of,
    together,
    under_way,
    write,
)
from .snapshot import Box, SharedMemory, Snapshot, boxes_of, bytes_in, owners, portions, room_for
from .state import StateTensor, dtype_word, merged_groups, stored_state
from .store import Location, place_of

log = logging.getLogger("meshwright")

WhenBusy = Literal["wait", "skip", "replace"]
LINGER_SEC = 5.0
"""Time that the first rank, which may host the store, gives the others to read how a save ended."""
LOOK_SEC = 0.02
"""Time between two looks at the store, at first; it grows tenfold."""
GRACE_SEC = 60.0
"""Time that a process which an error ends gives its last save; one that ends well waits for it."""
ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that go to all processes of a run that is to end."""
LONG_SEC = 5.0
"""Time after which it is said that training waits for a save."""
HUNG_SEC = 120.0
"""Time in which a process that writes took no CPU time, after which a run that is told to stop gives its save up."""
NICE = 5
"""How much the copying thread gives way to training."""


class Saver:
    """Saves of one process, one at a time, through one writer and one piece of shared memory.

    Args:
        host_memory: bytes that the snapshot may take on this rank; 0: all that it needs. With less, the next optimizer
            step waits until all but the last portion is written.
        when_busy: what becomes of a save that is due while another is under way: it waits, is skipped, or takes the
            other's place.
        say: tells people.
        left: returns the bytes that this rank can still take of the host's memory.
        tells: whether the first rank says that a save failed, where nobody may ask its handle.
        stopped: whether the run has been told to stop: then training waits for no save that hangs.
        claim: the right to save in the run's folder.

    Attributes:
        is_in_memory: whether the save under way goes to hosts' memory.
    """

    def __init__(
        self,
        host_memory: int = 0,
        when_busy: WhenBusy = "wait",
        say: Callable[[str], None] = log.warning,
        left: Callable[[], int] = lambda: psutil.virtual_memory().available // (ranks_per_node() or 1),
        tells: bool = False,
        stopped: Callable[[], object] = bool,
        claim: Claim | None = None,
    ):
        self._claim = claim
        self.tells, self.stopped = tells, stopped
        self.host_memory, self.say, self.left = host_memory, say, left
        self.when_busy: WhenBusy = when_busy
        self.current: Handle | None = None
        self._is_writing = False
        self._form, self._parts = list[object](), list[list[Box]]()
        self._memory: SharedMemory | None = None
        self._line: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._asked, self._base, self._base_of = 0, dict[str, Any](), None
        self.is_in_memory, self._has_room = False, False
        self._sending, self._thread = threading.Lock(), None
        atexit.register(self.close)

    # --- on the training thread

    @torch.no_grad()
    def begin(
        self,
        model: ParallelModel,
        location: Location,
        optimizer: torch.optim.Optimizer | None = None,
        extra: dict[str, Any] | None = None,
        *,
        only_trained: bool = False,
        in_run: bool = False,
        then: Callable[[], object] | None = None,
        memory: HostMemory | None = None,
    ) -> Handle:
        """Take the state of now, and return while it is copied and written. Collective.

        Args:
            in_run: refer to what the newest checkpoint beside has already, and leave the files of others alone.
            memory: where ``location`` is, each host's own. Such a save is skipped while another is under way.
            then: what the first rank does once the checkpoint is whole, such as to remove old ones.

        Raises:
            ConfigError: as ``save`` does; a row of a tensor has more bytes than the host's memory lets a rank take; the
                hosts' ``memory`` has no room.
        """
        store, folder = place_of(location)
        handle, claim = Handle(store.where(folder)), self._claim if in_run else None
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        differs = model.plan.pipeline is not None
        left_out = sorted(model.plan.frozen) if only_trained else []

        def taken() -> tuple[dict[str, StateTensor], dict[str, Any]]:
            fields = manifest_fields(model, optimizer, extra, left_out) if rank == 0 or differs else {}
            return stored_state(model, optimizer, rank), fields

        state, fields = together(taken, what=f"cannot write {handle.path}")
        frozen = {name: state.pop(key).like for name in left_out if (key := f"model.{name}") in state}
        form = [rank, world, *((key, *stored.form) for key, stored in state.items())]
        is_new = self._form != form
        is_busy = self.current is not None and not self.current.done
        base_of = weakref.ref(model), [(name, version_of(m)) for name, t in frozen.items() for m in memory_of(t)]
        has_other_base = bool(left_out) and self._base_of != base_of
        # the largest number is the first rank's: others bring 0
        words = [is_new, is_busy, has_other_base, secrets.randbits(32) if rank == 0 else 0]
        largest = agree.largest_each(torch.tensor(words, dtype=torch.float64))
        any_new, any_busy, any_other_base, token = map(int, largest.tolist())
        if any_busy and not self._make_way(handle, memory is not None):
            return handle

        def prepare() -> bool:
            make_room(store, folder, extra, alone=not in_run, claim=claim)
            return f"{folder}/{NAME}" not in store.files(folder)

        try:  # the files of the save before, which may be of this very folder, are all there now
            here = rank == 0 if memory is None else memory.is_first
            is_first = together(prepare, here=here, what=f"cannot prepare {handle.path}")
        except IntegrityError as error:
            handle.end(str(error).removesuffix(f". {UNTOUCHED}"))
            return handle
        if any_new:
            boxes = boxes_of(state)
            parts = agree.together(lambda: self._dealt_out(boxes, rank, model.device)) or [[]]
            self._form, self._parts = form, parts
        assert self._memory is not None
        name, parts = f"{token:08x}", self._parts
        if memory is not None and not self._has_room:
            share = max(agree.everybody_says(bytes_in(parts)))
            agree.together(lambda: memory.refuse_too_little(share), here=memory.is_first)
            self._has_room = True
        if any_other_base:
            self._base, self._base_of = runs_of(frozen, model), base_of
        # of now, whatever changes later
        fields = json.loads(json.dumps({**fields, "base": self._base if left_out else {}}))
        look = functools.partial(self._look_after, handle)
        snapshot = Snapshot(state, parts, self._memory, model.device, look)
        shared = dist.PrefixStore(f"meshwright/save/{name}", default_store() if world > 1 else dist.HashStore())
        self.current, self.is_in_memory = handle, memory is not None
        under_way.add(handle)
        place = {"location": str(store.location(folder)), "in_run": in_run, "new": is_first}
        place["claim"] = [str(claim.folder), claim.name, claim.words] if claim else None
        talk = Talk(shared, rank, world, name, fields, differs, place, then, memory)
        self._thread = threading.Thread(
            target=self._conduct, args=(handle, snapshot, talk), name="meshwright save", daemon=True
        )
        self._thread.start()
        return handle

    def _dealt_out(self, boxes: list[Box], rank: int, device: torch.device) -> list[list[Box]]:
        """Return the portions of what this rank writes, for which there is memory then."""
        mine = owners(agree.everybody_says(boxes))[rank]
        most = self.host_memory
        left = self.left() + (self._memory.size if self._memory is not None else 0)
        parts = portions(own := [box for number, box in enumerate(boxes) if number in mine], most)
        what = f"checkpoint.host_memory = {bytes_text(most)}"
        if room_for(parts) > left:
            what, most = f"this host has {bytes_text(left)} left for a rank, whose half", left // 2
            parts = portions(own, most)
        if len(parts) > 1:
            whole, later = bytes_in(parts), bytes_in(parts[:-1])
            self.say(
                f"{what} holds a part of the {bytes_text(whole)} that rank {rank} saves: each save goes in {len(parts)}"
                f" portions, and the optimizer step after it waits until {bytes_text(later)} are written"
            )
        if self._memory is None or self._memory.size < room_for(parts):
            self._memory = None
            self._memory = SharedMemory(room_for(parts), device)
            self._hang_up()
        return parts

    def _make_way(self, handle: Handle, is_in_memory: bool) -> bool:
        """Return whether the save may begin, after the one that is under way."""
        earlier = self.current
        when_busy = "skip" if is_in_memory else "wait" if self.is_in_memory else self.when_busy
        if when_busy == "replace" and earlier is not None and earlier.has_replaced:
            when_busy = "wait"  # else none would end where each takes longer than the steps to the next
        handle.has_replaced = when_busy == "replace"
        if when_busy == "skip":
            handle.skipped = True
            handle.end(f"{handle.path} was not saved: an earlier save is still under way (checkpoint.when_busy)")
            return False
        if earlier is not None:
            if when_busy == "replace" and not earlier.done:
                earlier.given_up = "a later save took its place (checkpoint.when_busy)"
                with suppress(OSError):
                    self._send({"do": "stop"})
            waited = self.wait_for(earlier)
            if when_busy == "wait" and waited > 1 and not earlier.given_up:
                self.say(f"waited {duration_text(waited)} for {earlier.path}, which was still being saved")
        return True

    def wait_for(self, handle: Handle, any_rank: Callable[[bool], bool] = agree.any_rank) -> float:
        """Return, once a save is over on every rank, the seconds that this took. Collective: a save that a lost rank
        took part in never ends, but the messages to that rank fail.
        """
        begun = time.perf_counter()
        while any_rank(not handle.over.wait(5 * LOOK_SEC)):
            self._look_after(handle, begun)
        return time.perf_counter() - begun

    def _look_after(self, handle: Handle, begun: float) -> None:
        """Say once that training waits for a save; once the run is told to stop, give up one that hangs."""
        now = time.perf_counter()
        if now - begun > LONG_SEC and not handle.is_waited_for:
            handle.is_waited_for = True
            self.say(f"training waits for {handle.path}, which is still being saved")
        if not self.stopped():
            return
        if (worked := self._worked()) != handle.worked:
            handle.worked, handle.until = worked, now + HUNG_SEC
        elif now > handle.until:
            handle.until = math.inf
            handle.given_up = f"it did not go on for {HUNG_SEC:g} s after the run was told to stop"
            if self._process is not None:
                self._process.kill()

    def _worked(self) -> float:
        """Return the CPU time of the process that writes; where that has nothing to do, the time of now."""
        if not self._is_writing or self._process is None:
            return time.perf_counter()
        with suppress(psutil.Error):
            return sum(psutil.Process(self._process.pid).cpu_times()[:2])
        return -1.0

    # --- on a thread of the save's own

    def _conduct(self, handle: Handle, snapshot: Snapshot, talk: Talk) -> None:
        """Copy, write, and agree; whatever happens, the handle ends."""
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        place = talk.place
        try:
            entries, packs = [], list[str]()
            try:
                for number, part in enumerate(snapshot.parts):
                    snapshot.copy(number)
                    if handle.given_up:
                        raise IntegrityError(handle.given_up)
                    rows = [[b.key, b.offset, b.shape, b.dtype, b.begin, b.end] for b in part]
                    packs.append(pack := pack_name(talk.name, talk.rank + number * talk.world))
                    request = {"do": "write", "place": place, "pack": pack, "boxes": rows}
                    entries += self._ask(handle, request)["entries"]
                if talk.memory is not None:
                    names = [f"{place_of(place['location'])[1]}/{pack}" for pack in packs]
                    request = {"do": "send", "folder": str(talk.memory.folder), "token": talk.memory.token}
                    at = self._ask(handle, request)["at"]
                    talk.store.set(f"packs{talk.rank}", json.dumps({"at": at, "names": names}))
                mine = {**talk.own_record(snapshot), "entries": entries}
            except Exception as error:  # noqa: BLE001  (said on all ranks)
                mine = failed(worded(handle, f"cannot write {handle.path} on rank {talk.rank}", error))
            finally:
                snapshot.end()
            verdict = talk.agreed(mine, lambda theirs: self._commit(handle, talk, theirs))
            if talk.memory is not None and not verdict.get("problem"):
                verdict = self._spread(handle, talk, talk.memory) | {"bytes": verdict["bytes"]}
            handle.bytes = verdict.get("bytes", 0)
            if verdict.get("nothing committed"):
                with suppress(Exception):  # the next save of this folder removes what stays
                    self._ask(handle, {"do": "clear", "place": place, "packs": packs})
            handle.end(verdict.get("problem", ""))
            if handle.problem and self.tells and talk.rank == 0:
                self.say(handle.words)
            talk.linger()
        except BaseException as error:  # noqa: BLE001  (a thread has nobody else to tell)
            handle.end(f"cannot finish {handle.path}: {type(error).__name__}: {error}")

    def _commit(self, handle: Handle, talk: Talk, theirs: list[dict[str, Any]]) -> dict[str, Any]:
        fields = theirs[0]["fields"]
        if theirs[0]["differs"]:
            fields["groups"] = merged_groups([said["fields"]["groups"] for said in theirs])
        tensors = {key: row for said in theirs for key, row in said["tensors"].items()}
        entries = [entry for said in theirs for entry in said["entries"]]
        whole = {"tensors": tensors, "entries": entries, "rest": fields}
        if talk.memory is not None:
            talk.store.set("whole", json.dumps(whole))
            return {"bytes": sum(entry[5] - entry[4] for entry in entries)}
        try:
            answer = self._ask(handle, {"do": "commit", "place": talk.place, **whole})
        except Exception as error:  # noqa: BLE001  (said on all ranks)
            return {"problem": worded(handle, f"cannot finish {handle.path}", error)}
        try:
            if talk.then is not None:
                talk.then()
        except Exception as error:  # noqa: BLE001  (said on all ranks)
            answer["problem"] = f"{handle.path} is whole, but then= failed: {type(error).__name__}: {error}"
        return answer

    def _spread(self, handle: Handle, talk: Talk, memory: HostMemory) -> dict[str, Any]:
        """Fetch packs of the host before, and let each host say what all have; then older states go."""
        mine: dict[str, Any] = {}
        try:
            for rank in memory.before:
                request = {"do": "fetch", "folder": str(memory.folder), "token": memory.token}
                self._ask(handle, request | json.loads(talk.read(f"packs{rank}")))
            if memory.is_first:
                request = {"do": "keep", "location": talk.place["location"]}
                self._ask(handle, request | json.loads(talk.read("whole")))
        except Exception as error:  # noqa: BLE001  (said on all ranks)
            mine = failed(worded(handle, f"cannot keep {handle.path} on the host of rank {talk.rank}", error))
        after = replace(talk, store=dist.PrefixStore("kept", talk.store))
        verdict = after.agreed(mine, lambda _: {})
        for key in (f"packs{talk.rank}", *["whole"] * (talk.rank == 0)):
            talk.store.delete_key(key)
        if not verdict.get("problem") and memory.is_first:
            memory.forget(but=place_of(talk.place["location"])[1])
        after.linger()
        return verdict

    def _ask(self, handle: Handle, request: dict[str, Any]) -> dict[str, Any]:
        """Return the writer's answer; a writer that died is replaced once.

        Raises:
            IntegrityError: it died again, or could not do it.
        """
        answer: dict[str, Any] = {}
        for is_last in (False, True):
            try:
                self._is_writing = True
                number = self._send(request)
                while (answer := writer.receive(self._line)[0])["number"] != number:  # type: ignore[arg-type]
                    pass
                break
            except (EOFError, OSError) as error:
                self._hang_up()
                status = self._process.wait() if self._process is not None else None
                if is_last or handle.given_up:
                    raise IntegrityError(f"the process that writes died twice (status {status}; {error})") from error
                self.say(f"the process that writes {handle.path} died (status {status}): another one tries again")
            finally:
                self._is_writing = False
        if answer.get("problem"):
            raise IntegrityError(answer["problem"])
        return answer

    def _send(self, request: dict[str, Any]) -> int:
        with self._sending:
            if self._line is None and request["do"] != "stop":
                self._line, self._process = start_writer()
                if self._memory is not None:
                    writer.send(self._line, {"do": "map", "number": 0, "size": self._memory.size}, [self._memory.file])
            if self._line is not None:
                self._asked += 1
                writer.send(self._line, {**request, "number": self._asked})
            return self._asked

    def _hang_up(self) -> None:
        if self._line is not None:
            self._line.close()
        self._line = None

    def close(self, grace: float | None = None) -> None:
        """Let the save under way end within ``grace`` seconds, or give it up and say so; then the writer ends.

        Args:
            grace: None: as many as it needs, but of a process that an error ends ``GRACE_SEC``.
        """
        atexit.unregister(self.close)
        if grace is None and getattr(sys, "last_value", None) is not None:
            grace = GRACE_SEC
        if grace is not None and self.is_in_memory:  # a restart goes on from an older state, and waits for nobody
            grace = 0
        if grace is None and self.current is not None:
            self.wait_for(self.current, any_rank=bool)
        elif self.current is not None and not self.current.over.wait(grace):
            self.current.given_up = f"its save had {grace:g} s to end"
            if not self.is_in_memory:
                self.say(f"{self.current.path} was given up: {self.current.given_up}. {UNTOUCHED}")
        if grace is None and self._thread is not None:
            self._thread.join()
        self._hang_up()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def start_writer() -> tuple[socket.socket, subprocess.Popen[bytes] | None]:
    """Spawn a process that writes for this one; return the line to it.

    Signals that end a run go to all its processes, and this one has to write to the end: it starts with them blocked.
    """
    line, other = socket.socketpair()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDINGS)
    try:
        with other:
            file = other.fileno()
            process = subprocess.Popen(writer.command(file), pass_fds=[file], stdin=subprocess.DEVNULL)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return line, process


def worded(handle: Handle, what: str, error: Exception) -> str:
    """Say why a save failed: where this process gave it up, the error is only how."""
    return f"{handle.path} was given up: {handle.given_up}" if handle.given_up else f"{what}: {error}"


def failed(problem: str) -> dict[str, Any]:
    """Return the outcome of a save that no rank began to commit, so that its files can go."""
    return {"problem": problem, "nothing committed": True}


@dataclass(frozen=True)
class Talk:
    """What the ranks say to each other about one save, under its name in their store."""

    store: dist.Store
    rank: int
    world: int
    name: str
    fields: dict[str, Any]
    differs: bool
    place: dict[str, Any]
    then: Callable[[], object] | None
    memory: HostMemory | None

    def own_record(self, snapshot: Snapshot) -> dict[str, Any]:
        """Return what this rank alone can say: the first says all that all ranks know."""
        written = {box.key for part in snapshot.parts for box in part}
        tensors = {
            key: [list(stored.like.shape), dtype_word(stored.dtype)]
            for key, stored in snapshot.state.items()
            if self.rank == 0 or key in written
        }
        fields = self.fields if self.rank == 0 else {"groups": self.fields.get("groups", [])}
        return {"tensors": tensors, "differs": self.differs, "fields": fields}

    def agreed(self, mine: dict[str, Any], commit: Callable[[list[dict[str, Any]]], dict[str, Any]]) -> dict[str, Any]:
        """Bring this rank's part; return the outcome that the first rank gives to all. ``commit`` runs there."""
        if self.rank:
            self.store.set(f"rank{self.rank}", json.dumps(mine))
            outcome = json.loads(self.read("outcome"))
            if self.store.add("read", 1) == self.world - 1:
                self.store.set("all read", "")
            return outcome
        theirs = [mine, *(json.loads(self.read(f"rank{rank}")) for rank in range(1, self.world))]
        problem = next((said["problem"] for said in theirs if "problem" in said), "")
        outcome = failed(problem) if problem else commit(theirs)
        self.store.set("outcome", json.dumps(outcome))
        for rank in range(1, self.world):
            self.store.delete_key(f"rank{rank}")
        return outcome

    def linger(self) -> None:
        """Keep the store, which may lie in the first rank's process, until all ranks have read the outcome.

        The run may be over by now, and the store's file removed: ``add`` would make another, and torch 2.13 read in it
        for ever with its lock held.
        """
        end = time.monotonic() + LINGER_SEC
        with suppress(RuntimeError):  # of a store that is gone; the outcome is known
            while not self.rank and self.world > 1 and time.monotonic() < end and not self.store.check(["all read"]):
                time.sleep(LOOK_SEC)

    def read(self, key: str) -> bytes:
        """Return a value once some rank has set it."""
        pause = LOOK_SEC
        while not self.store.check([key]):  # a blocking get would keep others from the store
            time.sleep(pause)
            pause = min(pause * 1.5, 10 * LOOK_SEC)
        return self.store.get(key)


_saver: list[Saver] = []


def save(
    parallel_model: ParallelModel,
    path: str | Path,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    extra: dict[str, Any] | None = None,
    only_trained: bool = False,
    asynchronous: bool = False,
    then: Callable[[], object] | None = None,
) -> Handle:
    """Write model and optimizer to the folder ``path``, each rank its own shards, as safetensors. Collective.

    The manifest comes last, at once, so the folder holds either the old checkpoint or the new one. What an older one
    there holds already is not written again. Gradients are not part of it. Of an optimizer that averages its steps
    (schedule-free AdamW) the model's part is the average, and the optimizer's has the point of training.

    Args:
        path: a new folder, an empty one, or a checkpoint that will be replaced; or an address, like s3://bucket/folder.
        extra: JSON values that ``load`` returns (rank 0's); tuples come back as lists.
        only_trained: leave frozen parameters out, such as those beside adapters; ``load`` then leaves them as they are.
        asynchronous: return at once, and copy and write the state of now while training goes on. A later save or load
            waits for it, and so does the end of the process. Weights that are written other than by an optimizer's step
            must wait for it: it fails where torch counts such a write, and does not see one through ``.data``.
        then: what rank 0 does once the checkpoint is whole, before the save is over: no collective, and nothing to
            weights. An error in it is the save's ``problem``, though the checkpoint is whole.

    Returns:
        The save: ``.done``, ``.problem`` and ``.wait()``.

    Raises:
        ConfigError: ``path`` exists and is no checkpoint, or ``extra`` holds something that JSON cannot.
        IntegrityError: a rank could not write (then on every rank); an older checkpoint of that name is still there.
    """
    own = [p for group in optimizer.param_groups for p in group["params"]] if optimizer is not None else []
    if is_rank_zero() and any(parameter.grad is not None for parameter in own):
        log.warning("%s is saved without the gradients there are: save behind optimizer_step, which clears them", path)
    if asynchronous and is_beside(path, log.warning):
        if not _saver:
            _saver.append(Saver(tells=True))
        return _saver[0].begin(parallel_model, path, optimizer, extra, only_trained=only_trained, then=then)
    finish_saves(agree.any_rank)
    handle = Handle(path)
    handle.bytes = write(parallel_model, path, optimizer=optimizer, extra=extra, only_trained=only_trained)
    if then is not None:
        agree.decided_once(then)
    handle.end()
    return handle
