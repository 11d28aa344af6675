"""Saves beside training, deliberately broken: each a fault that systems of this field have shipped, in a few lines.

Each is a context manager; ``test_snapshot_mutants`` finds them by what a resumed run computes.
"""

from __future__ import annotations

import importlib
import threading
import time
from contextlib import contextmanager
from unittest.mock import patch

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from meshwright.checkpoint import background, snapshot, writer
from meshwright.checkpoint.background import Saver
from meshwright.checkpoint.snapshot import Snapshot
from meshwright.checkpoint.state import StateTensor
from meshwright.checkpoint.writer import SharedPiece, Writer
from meshwright.core import readers

PATIENCE_SEC = 60


@contextmanager
def _unguarded():
    """Nobody waits for the copies, and nobody notices that the state was changed under them."""
    with patch.object(readers, "finish_all", lambda: None), patch.object(snapshot, "_version", lambda plain: 0):
        yield


@contextmanager
def _unguarded_and_late():
    """Yield a function that returns once the optimizer has stepped after the newest snapshot was taken."""
    stepped, begin = threading.Event(), Snapshot.__init__

    def made(self, *args):
        stepped.clear()
        begin(self, *args)

    def wait_for_the_step():
        assert stepped.wait(PATIENCE_SEC), "no step followed the save"

    hook = register_optimizer_step_post_hook(lambda *_: stepped.set())
    try:
        with _unguarded(), patch.object(Snapshot, "__init__", made):
            yield wait_for_the_step
    finally:
        hook.remove()


@contextmanager
def _changed_state(change):
    """What a save takes for its state is ``change`` of it."""
    whole = background.stored_state
    with patch.object(background, "stored_state", lambda *args: change(whole(*args))):
        yield


def _held(stored: StateTensor) -> StateTensor:
    values = stored.values().detach().clone()
    return StateTensor(values, stored.dtype, ())


@contextmanager
def snapshot_one_step_late():
    """The copies begin when the next step is over."""
    copy = Snapshot.copy

    def late(self, number):
        wait_for_the_step()
        copy(self, number)

    with _unguarded_and_late() as wait_for_the_step, patch.object(Snapshot, "copy", late):
        yield


@contextmanager
def two_steps_mixed():
    """A part of the state is of this step, the rest of the next."""
    copy, seen = Snapshot._copy_one, []

    def slow(self):
        seen.append(0)
        if len(seen) % 9 == 5:
            wait_for_the_step()
        return copy(self)

    with _unguarded_and_late() as wait_for_the_step, patch.object(Snapshot, "_copy_one", slow):
        yield


@contextmanager
def _late(is_late):
    """The pieces whose key ``is_late`` are copied when the next step is over."""
    copy = Snapshot._copy

    def slow(self, task):
        if is_late(task.boxes[0].key):
            wait_for_the_step()
        copy(self, task)

    with _unguarded_and_late() as wait_for_the_step, patch.object(Snapshot, "_copy", slow):
        yield


@contextmanager
def weights_of_this_step_and_moments_of_the_next():
    """Weights are copied in time, the optimizer's state is not."""
    with _late(lambda key: key.startswith("optimizer.")):
        yield


@contextmanager
def one_piece_stale():
    """One piece stays in the buffer as the save before left it."""
    copy = Snapshot._copy

    def some(self, task):
        if task.boxes[0].key != "model.norm.weight":
            copy(self, task)

    with patch.object(Snapshot, "_copy", some):
        yield


@contextmanager
def moments_of_the_first_save():
    """The optimizer's state moved to other memory, and the first save's is written for ever."""
    first: dict[str, StateTensor] = {}

    def change(state):
        for key, stored in state.items():
            if key.startswith("optimizer."):
                first.setdefault(key, _held(stored))
        return {**state, **{key: stored for key, stored in first.items() if key in state}}

    with _changed_state(change):
        yield


@contextmanager
def step_counts_left_out_of_the_copy():
    """The optimizer's step counts are those of the first save."""
    first: dict[str, StateTensor] = {}

    def change(state):
        for key, stored in state.items():
            if key.startswith("optimizer.step."):
                first.setdefault(key, _held(stored))
        return {**state, **{key: stored for key, stored in first.items() if key in state}}

    with _changed_state(change):
        yield


@contextmanager
def buffer_reused_while_the_writer_reads():
    """The shared memory is another save's as soon as the writer was told of it."""
    copy = Snapshot.copy

    def reused(self, number):
        copy(self, number)
        self.memory.bytes[: self.memory.size // 2].add_(1)

    with patch.object(Snapshot, "copy", reused):
        yield


@contextmanager
def buffers_copied_like_weights():
    """What a forward changes is copied in the background, as weights are."""
    changing = set()

    def change(state):
        changing.update(key for key, stored in state.items() if stored.at_once)
        return {key: StateTensor(s.like, s.dtype, s.memory, s.made) for key, s in state.items()}

    with _changed_state(change), _late(changing.__contains__):
        yield


@contextmanager
def result_of_the_save_before():
    """The entries that the writer gave for the save before are taken for this one's."""
    ask, before = Saver._ask, {}

    def earlier(self, handle, request):
        answer = ask(self, handle, request)
        if request["do"] != "write":
            return answer
        own, before[id(self)] = before.get(id(self), answer), answer
        return own

    with patch.object(Saver, "_ask", earlier):
        yield


@contextmanager
def manifest_before_the_pieces():
    """The manifest is written when pieces are named, and the bytes of one rank never follow."""
    write = Writer.on_write

    def unwritten(self, files, place, pack, boxes):
        answer = write(self, files, place, pack, boxes)
        store, folder = writer.place_of(place["location"])
        name = f"{folder}/{pack}"
        if name in store.files(folder):
            size = store.files(folder)[name]
            content = store.read(name)[: size // 2]
            store.write(name, [content + bytes(size - len(content))])
        return answer

    with patch.object(Writer, "on_write", unwritten):
        yield


@contextmanager
def one_rank_left_out():
    """The manifest is written without the entries of the last rank."""
    commit = Saver._commit

    def without(self, handle, talk, theirs):
        theirs[-1] = {**theirs[-1], "entries": []}
        return commit(self, handle, talk, theirs)

    with patch.object(Saver, "_commit", without):
        yield


@contextmanager
def ranks_of_two_saves():
    """The last rank's entries are those of its save before."""
    commit, before = Saver._commit, []

    def mixed(self, handle, talk, theirs):
        mine = theirs[-1]["entries"]
        if before:
            theirs[-1] = {**theirs[-1], "entries": before[-1]}
        before.append(mine)
        return commit(self, handle, talk, theirs)

    with patch.object(Saver, "_commit", mixed):
        yield


@contextmanager
def replicas_unlike():
    """Of a piece that several ranks hold, the copy of a rank that was not asked is written over the other's."""
    whole = snapshot.owners

    def all_own(by_rank):
        found = whole(by_rank)
        return [set(range(len(boxes))) if rank else set() for rank, boxes in enumerate(by_rank)] if found else found

    with patch.object(background, "owners", all_own):
        yield


@contextmanager
def options_of_the_end_of_the_save():
    """Rates and counts of the manifest are read when the pieces are written, and not with them."""
    fields = background.manifest_fields

    def late(*given):
        found = fields(*given)
        for group in found["groups"]:
            group["options"]["lr"] = group["options"]["lr"] * 0.5
        return found

    with patch.object(background, "manifest_fields", late):
        yield


@contextmanager
def dead_writer_taken_for_done():
    """A writer that gave no answer is taken for one that wrote all: the pieces of the save before stand in."""
    ask, seen = Saver._ask, {}

    def trusting(self, handle, request):
        if request["do"] != "write":
            return ask(self, handle, request)
        if id(self) in seen:
            return seen[id(self)]
        seen[id(self)] = ask(self, handle, request)
        return seen[id(self)]

    with patch.object(Saver, "_ask", trusting):
        yield


@contextmanager
def offsets_lost():
    """Every rank's pieces are said to begin at the first row."""
    with _boxes(lambda box: {"offset": (0,) * len(box.offset)}):
        yield


@contextmanager
def rows_shifted():
    """A piece is written from one row too early in the shared memory."""
    data = SharedPiece.data.fget
    assert data is not None

    def shifted(self):
        self.writer.look()
        has_rows = self.shape and not self.key.startswith("random.")  # a stream's state would be refused
        begin = max(0, self.begin - 8) if has_rows else self.begin
        return self.writer.memory[begin : begin + self.end - self.begin]

    with patch.object(SharedPiece, "data", property(shifted)):
        yield


@contextmanager
def _boxes(change):
    ask = Saver._ask

    def changed(self, handle, request):
        if request["do"] == "write":
            rows = [
                snapshot.Box(key, tuple(offset), tuple(shape), dtype, end - begin, begin=begin)
                for key, offset, shape, dtype, begin, end in request["boxes"]
            ]
            made = [snapshot.Box(**{**vars(box), **change(box)}) for box in rows]
            request = {**request, "boxes": [[b.key, b.offset, b.shape, b.dtype, b.begin, b.end] for b in made]}
        return ask(self, handle, request)

    with patch.object(Saver, "_ask", changed):
        yield


@contextmanager
def names_exchanged():
    """First moments are written as second ones, and those as first."""
    other = {"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}

    def change(box):
        kind, _, rest = box.key.partition(".")
        state, _, name = rest.partition(".")
        return {"key": f"{kind}.{other[state]}.{name}"} if kind == "optimizer" and state in other else {}

    with _boxes(change):
        yield


@contextmanager
def an_old_portion_twice():
    """A portion is given to the writer before the one before it was replaced by it in memory."""
    copy = Snapshot.copy

    def only_first(self, number):
        if number in (0, len(self.parts) - 1):
            copy(self, number)

    with patch.object(Snapshot, "copy", only_first):
        yield


@contextmanager
def finished_for_the_portion_only():
    """The next step waits for the portion that is being copied, and not for those that follow."""

    copy = Snapshot.copy
    steps = threading.Event()

    def finish(self):
        while self._copy_one():
            pass
        steps.set()

    def later(self, number):
        if number:
            steps.wait(5.0)
            time.sleep(0.2)  # until the step that does not wait has changed the state
        else:
            steps.clear()
        copy(self, number)

    changed = patch.object(Snapshot, "finish", finish), patch.object(Snapshot, "copy", later)
    with changed[0], changed[1], patch.object(snapshot, "_version", lambda plain: 0):
        yield


@contextmanager
def references_to_what_is_removed():
    """Old checkpoints are removed with the packs that newer ones refer to."""
    folder = importlib.import_module("meshwright.checkpoint.folder")

    def all_of_them(store, folders, among):
        return [name for one in folders for name in store.files(one) if name.endswith(".safetensors")]

    with patch.object(folder, "unreferenced", all_of_them):
        yield


@contextmanager
def scaffolding_as_state():
    """A parameter that a rank holds gathered for its forward is taken for its shard."""

    def change(state):
        key = "model.embed.weight"
        held = state[key]
        like: Tensor = held.like
        zeros = like.detach().clone().zero_()
        return {**state, key: StateTensor(zeros, held.dtype, ())}

    with _changed_state(change):
        yield


@contextmanager
def writer_beside_the_copy():
    """The writer is told before the copying begins, and reads what the save before left."""
    ask, copy, told = Saver._ask, Snapshot.copy, []

    def written_first(self, handle, request):
        answer = ask(self, handle, request)
        if request["do"] == "write":
            copy(*told.pop())
        return answer

    with (
        _unguarded(),
        patch.object(Snapshot, "copy", lambda self, number: told.append((self, number))),
        patch.object(Saver, "_ask", written_first),
    ):
        yield
