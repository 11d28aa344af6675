"""Kill the processes of a run while it saves, at a drawn write, and continue it on a drawn layout.

    python benchmarks/kills.py [kills] [--seed 0] [--folder DIR] [--minutes 30] [--synchronous] [--memory] [--bucket]

A trial continues the run on one of seven layouts. On the way writers die at their n-th change to the disk (write,
fsync, rename, mkdir) and are replaced; at the end a rank dies: at the n-th change of its writer, at one of its own
(removing old checkpoints among them), or at any time. After every trial each checkpoint that has a manifest is whole,
the newest proves every byte, and no more than the save under way is lost. Every loss, of steps that are taken again
too, must be that of a run that nothing happened to. With --memory a third of the saves goes to disk, and two hosts,
which the ranks share, keep the other steps in memory; half of the kills lose one host's. With --bucket runs lie in one
on a server of moto's, and deaths come before the n-th request.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests")]

from meshwright import Layout, load, parallelize  # noqa: E402
from meshwright.checkpoint import background, store, writer  # noqa: E402
from meshwright.checkpoint.background import Saver  # noqa: E402
from meshwright.checkpoint.copying import verify  # noqa: E402
from meshwright.checkpoint.folder import CheckpointFolder  # noqa: E402
from meshwright.checkpoint.hosts import load_from_hosts, open_host_memory  # noqa: E402
from meshwright.checkpoint.saving import write  # noqa: E402
from meshwright.distributed.mesh import data_position  # noqa: E402
from meshwright.distributed.process import agree  # noqa: E402
from meshwright.distributed.process.workers import WorkerDied, WorkerFailed, WorkerPool  # noqa: E402
from meshwright.models.decoder import Decoder  # noqa: E402
from meshwright.models.decoder_config import DecoderConfig  # noqa: E402

LAYOUTS = {
    "one": Layout(dp_shard=1),
    "dp_shard 2": Layout(dp_shard=2),
    "dp_replicate 2": Layout(dp_replicate=2, dp_shard=1),
    "tp 2": Layout(tp=2, dp_shard=1),
    "pp 2": Layout(pp=2, dp_shard=1),
    "dp_shard 2, portions": Layout(dp_shard=2),
    "dp_replicate 2 × dp_shard 2": Layout(dp_replicate=2, dp_shard=2),
}
COSTS = (3, 2, 2, 1, 1, 2, 1)
"""How often each is drawn: less where it costs more."""
PORTIONS = 1 << 15
"""Bytes of host memory of the layout that saves in portions."""
EVERY, STEPS, FURTHER = 2, 120, 8
"""Steps between two saves, of a whole run, and of a trial at most."""
TOLERANCE = 1e-9
CHANGES = "write fsync rename replace mkdir unlink"


def die() -> OSError:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a killed process goes on")


@contextmanager
def dying(change: int, fail: Callable[[], OSError], in_bucket: bool) -> Iterator[None]:
    """In here this process fails at its n-th change to the disk, or request to the bucket; 0: at none."""
    from support.disk import failing_disk

    if not in_bucket:
        store.ROOM = 1 << 14  # else the packs of so small a model are one write each
        with failing_disk(change, fail, CHANGES):
            yield
        return
    import s3fs

    plain, seen = s3fs.S3FileSystem._call_s3, []

    async def counted(files: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(args[:1])
        if len(seen) == change:
            fail()
        return await plain(files, *args, **kwargs)

    s3fs.S3FileSystem._call_s3 = counted
    try:
        yield
    finally:
        s3fs.S3FileSystem._call_s3 = plain


def faulty_writer(file: int, change: int, with_rank: bool, in_bucket: bool) -> None:
    """A writer that dies at a change to the disk, alone or after its rank; as urgent as others, for more kills."""
    writer.NICE = 0

    def fail() -> OSError:
        if with_rank:
            os.kill(os.getppid(), signal.SIGKILL)
        return die()

    with dying(change, fail, in_bucket):
        writer.main(file)


def make(layout: str) -> Any:
    config = DecoderConfig(128, 32, 4, n_heads=4, n_kv_heads=2, hidden_dim=64, max_seq_len=16)
    return parallelize(
        lambda: Decoder(config), LAYOUTS[layout], techniques={"precision": {"master": "float64"}}, seed=0
    )


def train(
    folder: str,
    location: str,
    layout: str,
    until: int,
    rank: int,
    event: tuple[str, Any],
    deaths: list[int],
    waits: bool,
    hosts: bool,
) -> int:
    """Continue a run; return its last step.

    Args:
        folder, location: of the losses, and of the checkpoints.
        rank: what happens happens to this one: ``event`` at the end, and before it its writers die at ``deaths``.
        waits: save synchronously.
        hosts: keep states in the memory of two hosts.
    """
    world, in_bucket = int(os.environ["WORLD_SIZE"]), location.startswith("s3:")
    model = make(layout)
    run, step = CheckpointFolder(location if in_bucket else Path(location)), 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if (latest := agree.from_rank_zero(run.latest())) is not None:
        step = load(model, latest, optimizer=optimizer)["step"]
    memory = None
    if hosts:
        (kept := Path(f"{folder}-memory")).mkdir(exist_ok=True)
        memory = open_host_memory(kept, f"{kept}/host{int(os.environ['RANK']) % 2}")
        found = load_from_hosts(memory, step, lambda at: load(model, at, optimizer=optimizer), lambda text: None)
        if found is not None:
            step = found["step"]
            (kept / f"taken-{step}").touch()
    kind, value = event
    is_mine = int(os.environ["RANK"]) == rank % world
    plain, pending = writer.command, list(deaths) if is_mine else []

    def command(file: int) -> list[str]:
        with_rank = not pending and is_mine and kind == "write"
        change = pending.pop(0) if pending else value * with_rank
        call = f"kills.faulty_writer({file}, {change}, {with_rank}, {in_bucket})"
        return [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; import kills; {call}"]

    writer.command, background.NICE = command, 0
    saver = Saver(PORTIONS if "portions" in layout else 0, say=lambda text: None)
    if is_mine and kind == "time":
        timer = threading.Timer(value, die)
        timer.daemon = True
        timer.start()
    number, ranks = data_position(model.mesh)
    own = value if is_mine and kind == "own" else 0
    with open(f"{folder}.losses", "a") as losses, dying(own, die, in_bucket):
        while step < until:
            words = torch.randint(0, 128, (8, 17), generator=torch.Generator().manual_seed(step))[number::ranks]
            loss = float(model.forward_backward({"tokens": words[:, :-1], "labels": words[:, 1:]}))
            model.optimizer_step(optimizer)
            step += 1
            if os.environ["RANK"] == "0":
                losses.write(json.dumps([step, loss]) + "\n")
                losses.flush()
            if step % (EVERY if memory is None else 3 * EVERY):
                if memory is not None:
                    saver.begin(model, memory.of_step(step), optimizer, {"step": step}, memory=memory)
                continue
            path, remove = run.of_step(step), lambda: run.keep_last(2)
            if waits:
                write(model, path, optimizer=optimizer, extra={"step": step}, after=run.latest())
                agree.decided_once(remove)
            else:
                saver.begin(model, path, optimizer, {"step": step}, in_run=True, then=remove)
        saver.close()
    writer.command = plain
    return step


class Trials:
    """Runs that are killed, one after the other.

    Args:
        waits: save synchronously.
        hosts: keep states in the memory of two hosts.
        bucket: of the runs; "": they are on disk.
    """

    def __init__(self, folder: Path, seed: int, waits: bool, hosts: bool, bucket: str, say: Callable[[str], None]):
        self.folder, self.draw, self.waits, self.say = folder, random.Random(seed), waits, say
        self.bucket = bucket
        self.hosts = hosts
        self.counts: Counter[str] = Counter()
        self.lost: Counter[int] = Counter()
        self.deviation, self.number, self.step, self.layout = 0.0, 0, 0, "one"
        torch.set_num_threads(1)  # a process that has computed with several cannot be forked
        make("one")  # imports what ranks need
        self.pools = {size: WorkerPool(size, threads=1, oversubscribe=True, method="fork") for size in (1, 2, 4)}
        whole = str(folder / "whole")
        self.pools[1].run(train, whole, whole, "one", STEPS, 0, ("", 0), [], True, False, world=1)
        self.wanted = dict(rows(folder / "whole.losses"))

    def trial(self) -> None:
        run, layout = self.folder / f"run{self.number}", self.draw.choices(list(LAYOUTS), COSTS)[0]
        world = 4 if "×" in layout else 1 if layout == "one" else 2
        kind = (
            self.draw.choice(("write", "write", "own", "time")) if not self.waits else self.draw.choice(("own", "time"))
        )
        most = {"write": 60, "own": 40 if not self.waits else 150}.get(kind, 0)
        value: Any = self.draw.randrange(1, most) if most else self.draw.uniform(0.02, 1.5)
        deaths = [self.draw.randrange(1, 25) for _ in range(self.draw.randrange(4))] if not self.waits else []
        rank = self.draw.randrange(world)
        reached = max([self.step, *(step for step, _ in rows(run.with_suffix(".losses"))[-1:] if self.hosts)])
        until, before = min(reached + self.draw.randrange(2, FURTHER + 1), STEPS), self.saved(run)
        given = (kind, value), deaths, self.waits, self.hosts
        try:
            at = str(self.location(run))
            self.pools[world].run(train, str(run), at, layout, until, rank, *given, world=world, timeout=900)
            end = "went on"
        except WorkerDied:
            end = "killed"
        except WorkerFailed as error:  # a peer may tell first that its connection is gone
            assert error.is_echo, error
            end = "killed"
        time.sleep(0.05 if end == "killed" else 0)
        if self.hosts and (kept := run.with_name(f"{run.name}-memory")).is_dir():
            for file in kept.glob("taken-*"):
                file.unlink()
                self.counts["continued from memory"] += 1
            if end == "killed" and self.draw.random() < 0.5:
                shutil.rmtree(kept / f"host{self.draw.randrange(2)}", ignore_errors=True)
                self.counts["memory of a host lost"] += 1
        saved, taken = self.saved(run), rows(run.with_suffix(".losses"))
        self.step = taken[-1][0] if taken else 0
        assert saved >= before, (saved, before)
        lost = self.step - saved if end == "killed" else 0
        # a save is given up where two of its writers die
        assert lost <= EVERY * (3 if self.hosts else 1) * (2 + len(deaths) // 2), (
            f"{lost} steps are lost, {len(deaths)} writers were told to die"
        )
        self.counts[f"{end}: {kind}"] += 1
        self.counts["layout " + layout] += 1
        self.counts["another layout"] += layout != self.layout and bool(before)
        self.counts["writers told to die"] += len(deaths)
        self.lost[lost] += end == "killed"
        for step, loss in taken:
            self.deviation = max(self.deviation, abs(loss - self.wanted[step]) / abs(self.wanted[step]))
        assert self.deviation <= TOLERANCE, f"{run}: losses differ by {self.deviation:.1e}"
        self.say(
            f"{layout:<28} {kind:<5} {value!s:.5} {end}, step {self.step}, saved {saved}, {len(deaths)} writers died"
        )
        self.layout = layout
        if self.step >= STEPS or (saved and saved >= STEPS - EVERY):
            shutil.rmtree(run, ignore_errors=bool(self.bucket))
            self.number, self.step = self.number + 1, 0
        elif end == "killed":
            self.step = saved

    def tell(self) -> None:
        for what, count in sorted(self.counts.items()):
            self.say(f"{what:<40} {count}")
        again = dict(sorted(self.lost.items()))
        every = EVERY * (3 if self.hosts else 1)
        self.say(f"ranks killed {self.kills}; steps after the newest on disk, times: {again} (a save every {every})")
        self.say(f"losses differ by {self.deviation:.1e} at most")

    def location(self, run: Path) -> Path | str:
        return f"{self.bucket}/{run.name}" if self.bucket else run

    def saved(self, run: Path) -> int:
        """Return the newest whole step; all that has a manifest is whole, and of the newest every byte is proven."""
        newest, problems = CheckpointFolder(self.location(run)).newest()
        assert not problems, problems
        if newest is None:
            return 0
        assert not (wrong := verify(newest)), wrong
        return int(str(newest).rpartition("-")[2])

    @property
    def kills(self) -> int:
        return sum(count for what, count in self.counts.items() if what.startswith("killed"))


def rows(path: Path) -> list[tuple[int, float]]:
    return [tuple(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def serve() -> tuple[subprocess.Popen[bytes], str]:
    """Start a server of moto's in a process of its own, and return it with the address of a bucket.

    It is none of this process's threads, because ranks are forked.
    """
    if lacking := [name for name in ("moto", "s3fs") if importlib.util.find_spec(name) is None]:
        sys.exit(f"--bucket needs {' and '.join(lacking)}: pip install 'moto[server]' s3fs")
    from support.buckets import environment_of

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.environ |= environment_of(f"http://127.0.0.1:{port}")
    make_it = "import fsspec; fsspec.filesystem('s3').makedirs('bucket', exist_ok=True)"
    while subprocess.run([sys.executable, "-c", make_it], stderr=subprocess.DEVNULL).returncode:
        time.sleep(1)
    return server, "s3://bucket"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kills", nargs="?", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--synchronous", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--bucket", action="store_true")
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="kills-"))
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * given.minutes
    server, bucket = serve() if given.bucket else (None, "")
    trials = Trials(folder, given.seed, given.synchronous, given.memory, bucket, lambda text: print(text, flush=True))
    try:
        while trials.kills < given.kills and time.monotonic() < end:
            trials.trial()
    finally:
        trials.tell()
        if server is not None:
            server.terminate()
    for pool in trials.pools.values():
        pool.close()


if __name__ == "__main__":
    main()
