"""Measure what saves beside training cost: waiting, steps beside them, writing, host memory.

    python benchmarks/saves.py [--worlds 1 4] [--width 1024] [--rounds 3] [--raw] [--recovery] [--amounts]

Each round saves the same state in turn by this library, by torch's ``dcp.async_save`` on a thread and by the same in a
process, and takes steps until the save is over. Waiting is the time in the call, and in whatever the next optimizer
step waits for. ``--raw`` compares a save with a plain write and fsync of as many bytes, ``--recovery`` what two ranks
load from the memory of the one of two hosts that is left with what they load from disk, none of it in the page cache.
``--amounts`` prints the memory that saves take on two ranks, and what a step of adapters writes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from meshwright import Layout, load, parallelize, save
from meshwright.checkpoint.background import Saver
from meshwright.checkpoint.folder import CheckpointFolder
from meshwright.checkpoint.hosts import load_from_hosts, open_host_memory
from meshwright.checkpoint.saving import Handle
from meshwright.checkpoint.snapshot import Snapshot, bytes_in
from meshwright.checkpoint.state import stored_state
from meshwright.distributed.mesh import data_position
from meshwright.distributed.process import agree
from meshwright.distributed.process.workers import WorkerPool
from meshwright.models.decoder import Decoder
from meshwright.models.decoder_config import DecoderConfig

SEQ = 64
KINDS = ("ours", "dcp thread", "dcp process")


class Waits:
    """Adds up the time in which the training thread waits for copies."""

    def __init__(self) -> None:
        self.seconds = 0.0
        finish = Snapshot.finish

        def timed(snapshot: Snapshot) -> None:
            begun = time.perf_counter()
            finish(snapshot)
            self.seconds += time.perf_counter() - begun

        Snapshot.finish = timed  # type: ignore[method-assign]


def config_of(width: int) -> DecoderConfig:
    return DecoderConfig(1024, width, 4, n_heads=8, n_kv_heads=8, hidden_dim=4 * width, max_seq_len=SEQ)


def begin(kind: str, model: Any, optimizer: torch.optim.Optimizer, folder: str, group: Any) -> Any:
    """Begin a save; torch's has a group of its own, since its thread talks while steps do."""
    if kind == "ours":
        return save(model, folder, optimizer=optimizer, asynchronous=True)
    state = {key: stored.values().detach() for key, stored in stored_state(model, optimizer, dist.get_rank()).items()}
    how = AsyncCheckpointerType.THREAD if kind == "dcp thread" else AsyncCheckpointerType.PROCESS
    return dcp.async_save(state, checkpoint_id=folder, process_group=group, async_checkpointer_type=how)


def measure(width: int, rounds: int, out: str) -> dict[str, dict[str, list[float]]]:
    """Seconds by kind: waiting, the steps beside a save, quiet steps before it, the save as a whole."""
    world = int(os.environ["WORLD_SIZE"])
    model = parallelize(lambda: Decoder(config_of(width)), Layout(dp_shard=world), seed=0)
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    optimizer, waits = torch.optim.AdamW(model.parameters(), lr=1e-4), Waits()
    rank, ranks = data_position(model.mesh)
    group = dist.new_group(backend="gloo")
    tokens = torch.randint(0, 1024, (4 * ranks, SEQ + 1))[rank::ranks]

    def step() -> float:
        dist.barrier()
        begun = time.perf_counter()
        model.forward_backward({"tokens": tokens[:, :-1], "labels": tokens[:, 1:]})
        model.optimizer_step(optimizer)
        return time.perf_counter() - begun

    step()
    found: dict[str, dict[str, list[float]]] = {
        kind: {"waiting": [], "beside": [], "quiet": [], "whole": []} for kind in KINDS
    }
    for number in range(rounds + 1):
        for kind in KINDS:
            folder = f"{out}/{kind.replace(' ', '-')}"
            quiet = [step() for _ in range(3)]
            dist.barrier()
            waits.seconds, begun = 0.0, time.perf_counter()
            going = begin(kind, model, optimizer, folder, group)
            called, beside = time.perf_counter() - begun, []
            while True:
                beside.append(step())
                over = going.done if isinstance(going, Handle) else going.done()
                if not agree.any_rank(not over):
                    break
            if number:  # the first warms buffers and processes up
                row = found[kind]
                row["waiting"].append(called + waits.seconds)
                row["beside"].append(statistics.mean(beside))
                row["quiet"].append(statistics.mean(quiet))
                row["whole"].append(going.seconds if isinstance(going, Handle) else float("nan"))
            if rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
            dist.barrier()
    found["bytes"] = {"own": [float(sum(s.like.nbytes for s in stored_state(model, optimizer).values()))]}
    return found


def raw(width: int, rounds: int, out: str) -> tuple[list[float], list[float], int]:
    """Seconds of saves that are waited for, and of a plain write and fsync of as many bytes, in turn."""
    model = parallelize(lambda: Decoder(config_of(width)), Layout(dp_shard=1), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, 1024, (4, SEQ + 1))
    ours, plain, size = [], [], 0
    for number in range(rounds + 1):
        model.forward_backward({"tokens": tokens[:, :-1], "labels": tokens[:, 1:]})
        model.optimizer_step(optimizer)
        begun = time.perf_counter()
        handle = save(model, f"{out}/raw", optimizer=optimizer, asynchronous=True)
        handle.wait()
        took, size = time.perf_counter() - begun, handle.bytes
        content = os.urandom(1 << 22)
        begun = time.perf_counter()
        with open(f"{out}/plain", "wb", buffering=0) as file:
            for _ in range(size // len(content)):
                file.write(content)
            os.fsync(file.fileno())
        if number:
            plain.append(time.perf_counter() - begun)
            ours.append(took)
        shutil.rmtree(f"{out}/raw")
        Path(f"{out}/plain").unlink()
    return ours, plain, size


def recover(width: int, rounds: int, out: str) -> tuple[list[float], list[float]]:
    """Seconds of loading from the memory of one of two hosts, and from disk."""
    model = parallelize(lambda: Decoder(config_of(width)), Layout(dp_shard=2), seed=0)
    optimizer, run = torch.optim.AdamW(model.parameters(), lr=1e-4), Path(out)
    tokens = torch.randint(0, 1024, (4, SEQ + 1))
    model.forward_backward({"tokens": tokens[:, :-1], "labels": tokens[:, 1:]})
    model.optimizer_step(optimizer)
    rank, saver = dist.get_rank(), Saver()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as ram:
        memory = open_host_memory(run, f"{agree.from_rank_zero(ram)}/{rank}")
        saver.begin(model, f"{out}/disk", optimizer).wait()
        saver.begin(model, memory.of_step(1), optimizer, memory=memory).wait()
        agree.everybody_says(0)
        if rank:
            memory.forget()
            memory.folder.mkdir()
        hosts, disk = [], []
        for _ in range(rounds + 1):
            for file in Path(f"{out}/disk").iterdir():
                descriptor = os.open(file, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)
            for seconds, use in (
                (disk, lambda: load(model, f"{out}/disk", optimizer=optimizer)),
                (hosts, lambda: load_from_hosts(memory, 0, lambda at: load(model, at, optimizer=optimizer), print)),
            ):
                agree.everybody_says(0)
                begun = time.perf_counter()
                assert use() is not None
                agree.everybody_says(0)
                seconds.append(time.perf_counter() - begun)
        saver.close()
        agree.everybody_says(0)
    return hosts[1:], disk[1:]


def amounts(width: int, out: str, rank_of_adapters: int) -> tuple[int, int, int, list[int], int]:
    """Bytes: this rank's share; memory for saves that it shares with its writer, and that the writer has alone; what
    each of three saves wrote, a step apart; what is trained, with its moments.
    """
    techniques = {"adapters": {"rank": rank_of_adapters}} if rank_of_adapters else None
    model = parallelize(lambda: Decoder(config_of(width)), Layout(dp_shard=2), techniques=techniques, seed=0)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, saver, run = torch.optim.AdamW(trained), Saver(), CheckpointFolder(Path(out))
    tokens, wrote = torch.randint(0, 1024, (4, SEQ + 1)), list[int]()
    for step in range(1, 4):
        model.forward_backward({"tokens": tokens[:, :-1], "labels": tokens[:, 1:]})
        model.optimizer_step(optimizer)
        saver.begin(model, run.of_step(step), optimizer, in_run=True).wait()
        agree.everybody_says(0)
        wrote.append(sum(file.stat().st_size for file in Path(run.of_step(step)).glob("*.safetensors")))
    assert saver._memory is not None and saver._process is not None
    alone = psutil.Process(saver._process.pid).memory_full_info().uss
    agree.everybody_says(0)
    saver.close()
    return bytes_in(saver._parts), saver._memory.size, alone, wrote, 3 * sum(p.nbytes for p in trained)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--raw", action="store_true")
    parser.add_argument("--recovery", action="store_true")
    parser.add_argument("--amounts", action="store_true")
    given = parser.parse_args()
    for world in given.worlds:
        with tempfile.TemporaryDirectory() as out, WorkerPool(world, threads=1, oversubscribe=True) as pool:
            ranks = pool.run(measure, given.width, given.rounds, out, world=world, timeout=900)
        print(
            f"{world} ranks, {ranks[0].pop('bytes')['own'][0] / 1e6:.0f} MB, seconds: median of {given.rounds} (most)"
        )
        for kind, rows in ranks[0].items():
            words = [f"{name} {statistics.median(row):.3f} ({max(row):.3f})" for name, row in rows.items()]
            ratio = statistics.median(b / q for b, q in zip(rows["beside"], rows["quiet"], strict=True))
            print(f"  {kind:12} {', '.join(words)}; steps beside × {ratio:.2f}", flush=True)
    if given.raw:
        with tempfile.TemporaryDirectory(dir=".") as out, WorkerPool(1, threads=1, oversubscribe=True) as pool:
            ours, plain, size = pool.run(raw, given.width, given.rounds, out, world=1, timeout=900)[0]
        speed = statistics.median(p / o for p, o in zip(plain, ours, strict=True))
        seconds = f"a save {statistics.median(ours):.3f} s, plain {statistics.median(plain):.3f} s"
        print(f"{size / 1e6:.0f} MB: {seconds}: {speed:.2f} of its speed")
    if given.recovery:
        with tempfile.TemporaryDirectory(dir=".") as out, WorkerPool(2, threads=1, oversubscribe=True) as pool:
            hosts, disk = pool.run(recover, given.width, given.rounds, out, world=2, timeout=900)[0]
        share = statistics.median(h / d for h, d in zip(hosts, disk, strict=True))
        print(f"loaded from memory {statistics.median(hosts):.3f} s, disk {statistics.median(disk):.3f} s: {share:.2f}")
    for rank in (0, 16) if given.amounts else ():
        with tempfile.TemporaryDirectory(dir=".") as out, WorkerPool(2, threads=1, oversubscribe=True) as pool:
            share, shared, alone, wrote, trained = pool.run(amounts, given.width, out, rank, world=2, timeout=900)[0]
        times = ", ".join(f"{size / trained:.4f}" for size in wrote)
        print(
            f"{rank} ranks of adapters (0: all is trained): of a share of {share / 1e6:.1f} MB, shared memory"
            f" {shared / share:.3f}, the writer alone {alone / 1e6:.1f} MB; saves wrote {times} of the"
            f" {trained / 1e6:.1f} MB that are trained"
        )


if __name__ == "__main__":
    main()
