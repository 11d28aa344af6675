"""States in hosts' memory are whole while one host of two is left, in any layout; a damaged part is on the other."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.odd import moments, odd, train, weights

from meshwright import load
from meshwright.checkpoint import background, host_memory, hosts
from meshwright.checkpoint.background import Saver
from meshwright.checkpoint.host_memory import HostMemory, receive_into, received, served
from meshwright.checkpoint.hosts import load_from_hosts, open_host_memory
from meshwright.checkpoint.manifest import NAME
from meshwright.core.errors import ConfigError
from meshwright.distributed.process import agree
from meshwright.training.config import CheckpointConfig
from meshwright.training.memory import refuse_copies_on_hosts
from meshwright.training.run.checkpointing import Checkpointing


def packs(host: Path, rank: int) -> list[Path]:
    return sorted(host.rglob(f"pieces-*-{rank:05d}.safetensors"))


def changed(*files: Path) -> None:
    for file in files:
        whole = bytearray(file.read_bytes())
        whole[-3] ^= 1
        file.write_bytes(whole)


def lost(host: Path) -> None:
    shutil.rmtree(host)


def cut(*files: Path) -> None:
    for file in files:
        file.write_bytes(file.read_bytes()[:-1])


HARM: dict[str, tuple[Callable[[list[Path], int], object], str]] = {
    "none": (lambda host, ranks: None, ""),
    "the first host is lost": (lambda host, ranks: lost(host[0]), ""),
    "the second host is lost": (lambda host, ranks: lost(host[1]), ""),
    "its own pack changed": (lambda host, ranks: changed(*packs(host[0], 0), *packs(host[1], ranks - 1)), ""),
    "a copy is cut short": (lambda host, ranks: cut(*packs(host[0], ranks - 1), *packs(host[1], 0)), ""),
    "a manifest changed": (lambda host, ranks: cut(*host[0].rglob(NAME)), ""),
    "both copies changed": (lambda host, ranks: changed(*packs(host[0], 0), *packs(host[1], 0)), "damaged"),
    "both copies are gone": (lambda host, ranks: [p.unlink() for h in host for p in packs(h, 0)], "nothing"),
}


def adam(model):
    return torch.optim.AdamW([{"params": list(model.parameters()), "lr": 1e-2}])


def kept_job(folder: str, before: str, after: str, harm: str) -> tuple[list[str], list[str], list[str]]:
    """Keep three states on two hosts, harm them, and read the newest into another layout: what differs, what was said,
    and the steps that were there.
    """
    model, said = odd(before), []
    rank, ranks = dist.get_rank(), dist.get_world_size()
    run, root = Path(folder) / "run", [Path(folder) / f"host{number}" for number in (0, 1)]
    run.mkdir(exist_ok=True)
    memory = open_host_memory(run, str(root[2 * rank // ranks]))
    optimizer, saver = adam(model), Saver(say=said.append)
    for step in (1, 2, 3):
        train(model, optimizer, range(step - 1, step))
        handle = saver.begin(model, memory.of_step(step), optimizer, {"step": step}, memory=memory)
        handle.wait(60)
    saver.close()
    wanted = weights(model) | moments(model, optimizer)
    agree.everybody_says(0)
    steps = sorted(path.name for path in memory.folder.glob("step-*"))
    agree.everybody_says(0)  # each has looked before any is harmed
    if rank == 0:
        HARM[harm][0](root, ranks)
    agree.everybody_says(0)
    model = odd(after, seed=5)
    memory = open_host_memory(run, str(root[2 * rank // ranks]))
    optimizer = adam(model)
    extra = load_from_hosts(memory, 2, lambda at: load(model, at, optimizer=optimizer), said.append)
    if extra is None:
        return ["nothing"], said, steps
    found = weights(model) | moments(model, optimizer)
    wrong = [name for name, value in wanted.items() if not torch.equal(found[name], value)]
    return wrong + [f"step {extra}"] * (extra != {"step": 3}), said, steps


@pytest.mark.parametrize("harm", HARM)
@pytest.mark.parametrize(
    ("ranks", "before", "after"),
    [(2, "fsdp2", "ddp2"), pytest.param(4, "fsdp4", "hsdp2x2", marks=pytest.mark.all)],
    ids=["two", "four"],
)
def test_one_of_two_hosts_has_the_state_of_both(spmd, tmp_path, ranks, before, after, harm):
    verdict = HARM[harm][1]
    for rank, (wrong, said, steps) in enumerate(spmd(ranks, kept_job, str(tmp_path), before, after, harm)):
        assert steps == ["step-00000003"], "older ones go once all hosts have the new one"
        assert wrong == (["nothing"] if verdict else []), f"rank {rank}: {said}"
        assert ("damaged" in " ".join(said)) == (verdict == "damaged" and rank == 0), said


def mutant_job(folder: str, mutant: str, harm: str) -> list[str]:
    made = nullcontext()
    if mutant == "nothing is fetched":
        spread = Saver._spread

        def alone(self, handle, talk, memory):
            own = HostMemory(memory.folder, memory.token, (), memory.here, memory.rank)
            return spread(self, handle, talk, own)

        made = patch.object(Saver, "_spread", alone)
    elif mutant == "its own pack is fetched":
        whole = hosts.HostMemory

        def confused(folder, token, before, here, rank):
            return whole(folder, token, (rank,), here, rank)

        made = patch.object(hosts, "HostMemory", confused)
    elif mutant == "one host is asked":
        made = patch.object(hosts, "sorted", lambda places, key: sorted(places, key=key)[:1], create=True)
    with made:
        return kept_job(folder, "fsdp2", "ddp2", harm)[0]


@pytest.mark.parametrize(
    ("mutant", "harm"),
    [
        pytest.param(mutant, harm, marks=pytest.mark.kills("memory", mutant=mutant))
        for mutant, harm in [
            ("nothing is fetched", "the second host is lost"),
            ("its own pack is fetched", "the first host is lost"),
            ("one host is asked", "its own pack changed"),
        ]
    ],
)
def test_a_broken_one_is_seen(spmd, tmp_path, mutant, harm):
    assert any(wrong for wrong in spmd(2, mutant_job, str(tmp_path), mutant, harm))


def busy_job(folder: str) -> tuple[bool, str, list[str]]:
    model, said = odd("fsdp2"), []
    memory = open_host_memory(Path(folder), f"{folder}/host{dist.get_rank()}")
    optimizer, saver = adam(model), Saver(say=said.append)
    train(model, optimizer, range(1))
    with patch.object(background.Talk, "linger", lambda self: None):
        first = saver.begin(model, memory.of_step(1), optimizer, {}, memory=memory)
        second = saver.begin(model, memory.of_step(2), optimizer, {}, memory=memory)
        saved = saver.begin(model, Path(folder) / "saved", optimizer, {})
        saved.wait(60)
    saver.close()
    with patch.object(host_memory.shutil, "disk_usage", lambda folder: SimpleNamespace(free=8192)):
        try:
            Saver().begin(model, memory.of_step(3), optimizer, {}, memory=memory)
        except ConfigError as error:
            said.append(str(error))
    return second.skipped or first.done, saved.problem, said


def test_a_save_on_disk_waits_for_one_in_memory_and_no_room_is_said(spmd, tmp_path):
    for is_skipped, problem, said in spmd(2, busy_job, str(tmp_path)):
        assert is_skipped and problem == ""
        assert "has 8 KiB left, and two states of this host's 1 ranks and of another host take" in said[-1], said


def test_who_does_not_know_the_token_gets_nothing_and_no_name_leaves_the_folder(tmp_path):
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "a").write_bytes(b"0123456789")
    (tmp_path / "b").write_bytes(b"secret")
    with served(inner, "token") as place:
        receive_into(part := bytearray(3), place, "token", "a", 2)
        assert part == b"234"
        with pytest.raises(OSError, match="did not send a whole"):
            receive_into(bytearray(3), place, "token", "a", 8)
        assert b"".join(received(place, "token", "a")) == b"0123456789"
        for token, name in (("other", "a"), ("token", "../b"), ("token", "c"), ("", "a")):
            with pytest.raises(OSError, match="did not send"):
                list(received(place, token, name))
        with socket.create_connection(place) as line:
            line.sendall(b"no JSON\n")
            assert line.recv(1) == b""


def test_memory_of_a_run_that_is_gone_is_given_back(tmp_path):
    def opened(run: str) -> HostMemory:
        (tmp_path / run).mkdir(exist_ok=True)
        return open_host_memory(tmp_path / run, str(tmp_path / "ram"))

    first, second = opened("a"), opened("b")
    assert first.folder.is_dir() and second.folder.is_dir() and first.folder != second.folder
    assert first.folder == opened("a").folder
    shutil.rmtree(tmp_path / "a")
    anew = opened("a")
    assert anew.folder != first.folder and not first.folder.exists() and second.folder.is_dir()
    assert oct(anew.folder.stat().st_mode & 0o777) == "0o700"


@pytest.mark.follows("checkpoint.memory_every = …", "checkpoint.folder", "checkpoint.asynchronous = true")
def test_what_cannot_be_kept_is_refused_and_each_way_out_is_one(tmp_path):
    good = CheckpointConfig(memory_every=2, memory_folder=str(tmp_path))
    for bad in (replace(good, asynchronous=False), replace(good, folder="memory://run")):
        with pytest.raises(
            ConfigError, match="set checkpoint.asynchronous = true, and a checkpoint.folder outside this process"
        ):
            refuse_copies_on_hosts(bad)
    nowhere = replace(good, memory_folder=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="is no folder that can be written.*, or set checkpoint.memory_every = 0"):
        refuse_copies_on_hosts(nowhere)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made .* or set checkpoint.memory_every = 0"):
        open_host_memory(tmp_path, str(tmp_path / "file"))
    refuse_copies_on_hosts(good)
    refuse_copies_on_hosts(CheckpointConfig(memory_every=0))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"asynchronous": False, "when_busy": "skip"},
            "when_busy = skip does nothing .*asynchronous = false: leave one",
        ),
        ({"asynchronous": False, "host_memory": 1.0}, "host_memory = 1.0 does nothing with checkpoint.asynchronous"),
        ({"memory_folder": "/tmp"}, "memory_folder = /tmp does nothing with checkpoint.memory_every = 0: leave one"),
    ],
)
def test_a_key_that_does_nothing_is_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        refuse_copies_on_hosts(CheckpointConfig(**changes))
    *_, last = changes
    refuse_copies_on_hosts(CheckpointConfig(**{key: value for key, value in changes.items() if key != last}))


def test_a_copy_of_a_run_has_memory_of_its_own_and_a_moved_run_keeps_its(tmp_path):
    """The copy took the state of the other, and removed it."""
    (tmp_path / "a").mkdir()
    first = open_host_memory(tmp_path / "a", str(tmp_path / "ram"))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    copied = open_host_memory(tmp_path / "b", str(tmp_path / "ram"))
    assert copied.folder != first.folder and first.folder.is_dir()
    assert open_host_memory(tmp_path / "a", str(tmp_path / "ram")).folder == first.folder
    (tmp_path / "a").rename(tmp_path / "c")
    assert open_host_memory(tmp_path / "c", str(tmp_path / "ram")).folder == first.folder


def test_states_that_come_due_faster_than_they_are_kept_are_said_once(tmp_path):
    """Each takes as long as five steps."""
    said: list[str] = []
    config = SimpleNamespace(checkpoint=SimpleNamespace(memory_every=2))

    def begin(model, path, *, memory):
        skipped = keeper.at.step < keeper.kept_step + 5
        return SimpleNamespace(skipped=skipped, done=True, problem="")

    memory, saver = SimpleNamespace(of_step=str), SimpleNamespace(begin=begin)
    keeper: Any = SimpleNamespace(memory=memory, saver=saver, r=SimpleNamespace(config=config, model=None), _given={})
    keeper.at, keeper.kept, keeper.kept_step, keeper.is_late_told = SimpleNamespace(step=0), None, -5, False
    keeper.say = said.append
    for keeper.at.step in range(40):
        Checkpointing.keep(keeper)
    (words,) = said
    assert words.startswith("a state takes longer to keep in memory than checkpoint.memory_every = 2 steps")
    assert words.endswith("the newest is 6 steps old, and one in about 6 steps is kept")
