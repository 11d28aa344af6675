"""Loader: the same samples in the same order whatever the number of ranks and workers and wherever it is resumed."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.core.errors import ConfigError, MeshwrightError
from meshwright.data.loader import Loader, validation_batches
from meshwright.data.mixture import Samples
from meshwright.data.packing import IGNORE_INDEX, Stream

SEQ = 4
# 20 documents, 100 samples
SPLIT = Stream("training", np.arange(401, dtype=np.uint16), np.array([*range(0, 400, 20), 401]))
SAMPLES = Samples.of([SPLIT], SEQ, seed=3)
ORDER = SAMPLES.orders[0]


def global_batches(consumed: int, steps: int, batch: int, world: int, workers: int) -> tuple[list[list[int]], int]:
    """First tokens (they name the sample) of each global batch, put together from all ranks.

    And the state afterwards.
    """
    loaders = [Loader(SAMPLES, batch, rank, world, workers) for rank in range(world)]
    for loader in loaders:
        loader.seek(consumed)
    rows = [[row for loader in loaders for row in next(loader)["tokens"][:, 0].tolist()] for _ in range(steps)]
    states = {loader.state for loader in loaders}
    for loader in loaders:
        loader.close()
    assert len(states) == 1
    return rows, states.pop()


@pytest.mark.all
@settings(max_examples=40)
@given(
    start=st.integers(0, 10**9),
    batch=st.sampled_from([4, 8, 12]),
    legs=st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=4),
)
def test_ranks_and_workers_may_change_at_any_point_and_the_samples_go_on(start, batch, legs):
    state, seen = start, []
    for world, workers, steps in legs:
        rows, state = global_batches(state, steps, batch, world, workers)
        seen += rows
    n = len(seen) * batch
    expected = (ORDER.take(start + np.arange(n)) * SEQ).reshape(-1, batch)
    assert seen == expected.tolist() and state == start + n


def test_a_batch_is_int64_tensors_of_this_ranks_rows():
    loader = Loader(SAMPLES, global_batch=6, rank=1, world=2)
    batch = next(loader)
    expected = SPLIT.rows(ORDER.take(np.arange(3, 6)), SEQ)
    assert list(batch) == ["tokens", "labels", "positions", "document_ids"]
    for name, tensor in batch.items():
        assert tensor.dtype == torch.int64 and tensor.shape == (3, SEQ) and tensor.tolist() == expected[name].tolist()


@pytest.mark.parametrize("workers", [0, 3])
def test_the_state_counts_what_was_handed_out_and_not_what_was_read_ahead(workers):
    with Loader(SAMPLES, global_batch=4, workers=workers) as loader:
        assert loader.state == 0
        for step in range(1, 4):
            next(loader)
            time.sleep(0.01)
            assert loader.state == 4 * step
        loader.seek(10**9 + 1)
        assert loader.state == 10**9 + 1
        assert next(loader)["tokens"][0, 0] == ORDER[10**9 + 1] * SEQ


def test_epochs_join_without_a_gap():
    n = ORDER.n
    rows, _ = global_batches(0, n // 4 * 2 + 2, 4, 2, 1)
    seen = [row // SEQ for batch in rows for row in batch]
    assert sorted(seen[:n]) == sorted(seen[n : 2 * n]) == list(range(n))


class Failing(Stream):
    """A split whose reads fail while ``failing`` is set, slowly, and succeed later."""

    failing = threading.Event()

    def rows(self, indexes, seq_len):
        if self.failing.is_set():
            raise OSError(5, "Input/output error")
        return super().rows(indexes, seq_len)


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_reader_raises_is_raised_by_next_and_nothing_is_skipped(workers):
    split = Failing("training", SPLIT.tokens, SPLIT.offsets)
    Failing.failing.set()
    with Loader(Samples.of([split], SEQ, seed=3), global_batch=4, workers=workers) as loader:
        with pytest.raises(OSError, match="Input/output error"):
            next(loader)
        assert loader.state == 0
        Failing.failing.clear()
        assert next(loader)["tokens"][:, 0].tolist() == (ORDER.take(np.arange(4)) * SEQ).tolist()


def wait_for_end(threads: set[threading.Thread]) -> None:
    for thread in threads:
        thread.join(timeout=10)
    assert not any(thread.is_alive() for thread in threads)


def test_threads_end_when_the_loader_is_closed_or_dropped():
    before = set(threading.enumerate())
    loader = Loader(SAMPLES, global_batch=4, workers=3)
    next(loader)
    threads = set(threading.enumerate()) - before
    assert len(threads) == 3
    loader.close()
    loader.close()
    wait_for_end(threads)
    with pytest.raises(MeshwrightError, match=r"closed; make another and go on with seek\(4\)"):
        next(loader)
    before = set(threading.enumerate())
    dropped = Loader(SAMPLES, global_batch=4, workers=2)
    next(dropped)
    threads = set(threading.enumerate()) - before
    assert len(threads) == 2
    del dropped
    wait_for_end(threads)


STUCK = """
import threading, time
import numpy as np
from meshwright.data import Loader, Samples, Stream

class Stuck(Stream):
    def rows(self, indexes, seq_len):
        threading.Event().wait()

split = Stuck("training", np.arange(40, dtype=np.uint16), np.array([0, 40]))
loader = Loader(Samples.of([split], 4, 0), 2, workers=2)
threading.Thread(target=next, args=(loader,), daemon=True).start()
time.sleep(0.1)
loader.close()
print("closed")
"""


def test_a_read_that_never_returns_keeps_neither_close_nor_the_process():
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(STUCK)], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"global_batch": 10, "world": 4},
            r"global_batch = 10 .* 4 data ranks .*a multiple of 4, like 8 or 12; or .* divides 10",
        ),
        ({"global_batch": 3, "world": 4}, "like 4 or 8"),
        ({"global_batch": 0}, "global_batch = 0"),
        ({"workers": -1}, "data.workers = -1"),
        ({"rank": 2, "world": 2}, "data rank 2 of 2: legal ranks are 0 to 1"),
        ({"world": 0}, "0 data ranks"),
    ],
)
def test_refusals_teach(change, words):
    with pytest.raises(ConfigError, match=words):
        Loader(**{"samples": SAMPLES, "global_batch": 8, **change})
    with pytest.raises(ConfigError, match=r"seek\(-1\)"):
        Loader(SAMPLES, 8).seek(-1)


@pytest.mark.all
@settings(max_examples=60)
@given(samples=st.integers(1, 150), rows=st.integers(1, 7), world=st.sampled_from([1, 2, 3, 4]))
def test_validation_is_the_same_set_for_every_number_of_ranks(samples, rows, world):
    per_rank = [list(validation_batches(SPLIT, SEQ, samples, rows, rank, world)) for rank in range(world)]
    assert len({len(batches) for batches in per_rank}) == 1
    real = []
    for batch in (batch for batches in per_rank for batch in batches):
        assert all(tensor.shape == (rows, SEQ) and tensor.dtype == torch.int64 for tensor in batch.values())
        is_real = (batch["labels"] != IGNORE_INDEX).any(dim=1)
        real += (batch["tokens"][is_real, 0] // SEQ).tolist()
    count = min(samples, 100)
    assert sorted(real) == [i * 100 // count for i in range(count)]
    assert len(per_rank[0]) == -(-count // (rows * world)), "no more batches than are needed"


def test_validation_refuses_at_the_call():
    with pytest.raises(ConfigError, match="samples = 0 must be at least 1"):
        validation_batches(SPLIT, SEQ, 0, 2)
    with pytest.raises(ConfigError, match="It is empty"):
        validation_batches(Stream("validation", SPLIT.tokens[:0], SPLIT.offsets[:1]), SEQ, 4, 2)


def test_importing_the_package_does_not_import_torch():
    code = "import sys, meshwright.data; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0


class Torn(Stream):
    """A split whose third sample cannot be read."""

    def rows(self, indexes, seq_len):
        if 2 in indexes:
            raise OSError(5, "Input/output error", "shard-7.bin")
        return super().rows(indexes, seq_len)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_cannot_be_read_is_left_out_alone_and_named_where_that_is_wanted(workers):
    samples = Samples.of([Torn("training", SPLIT.tokens, SPLIT.offsets)], SEQ, seed=3)
    whole, place = Loader(SAMPLES, 100), int(np.flatnonzero(ORDER.take(np.arange(100)) == 2)[0])
    with Loader(samples, 100, workers=workers, skip_unreadable=True) as loader:
        batch, expected = next(loader), next(whole)
        others = [i for i in range(100) if i != place]
        for key in batch:
            assert torch.equal(batch[key][others], expected[key][others])
        assert (batch["labels"][place] == IGNORE_INDEX).all()
        assert loader.unreadable[place] == "OSError: [Errno 5] Input/output error: 'shard-7.bin'"
    with Loader(samples, 100, workers=workers) as loader, pytest.raises(OSError, match="shard-7"):
        next(loader)
