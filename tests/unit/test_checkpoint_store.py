"""Where checkpoints lie, and what people do with them: packs, stores, copies, version 1, the verb."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import zlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import fsspec
import numpy as np
import pytest
import safetensors
import xxhash
from support.buckets import bucket
from support.disk import failing_disk, full

from meshwright.checkpoint import manifest as manifests
from meshwright.checkpoint import pieces as packs
from meshwright.checkpoint import store as stores
from meshwright.checkpoint.copying import copy, verify
from meshwright.checkpoint.folder import CheckpointFolder
from meshwright.checkpoint.manifest import NAME, Manifest, TensorEntry, blocks_in, commit, pack_name
from meshwright.checkpoint.pieces import write_pieces
from meshwright.checkpoint.store import LocalStore, RemoteStore, place_of, store_of
from meshwright.cli.main import main
from meshwright.core.errors import ConfigError, IntegrityError
from meshwright.core.files import replace_text
from meshwright.training.run.occupancy import occupied

OPEN = open
VALUES = {
    "model.a": np.arange(96, dtype=np.float32).reshape(12, 8),
    "model.b": np.arange(5, dtype=np.float64),
    "optimizer.step.a": np.array(3.0, dtype=np.float32),
    "model.flags": np.array([True, False, True]),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(packs, "BLOCK", 128)


def written(place, step: int, values=VALUES, after: int | None = None, cut: int = 5) -> str:
    """A checkpoint of two ranks, which hold each tensor's rows before and from ``cut``; the second has no scalars."""
    store, name = store_of(place), f"step-{step:08d}"
    entries = []
    for rank in (0, 1):
        earlier = {}, {}
        if after is not None:
            there = f"step-{after:08d}"
            earlier = blocks_in(store, there, name)
        mine = []
        for key, value in values.items():
            if not value.ndim:
                part, offset = value, ()
                if rank:
                    continue
            else:
                low, high = (0, cut) if rank == 0 else (cut, len(value))
                part, offset = value[low:high], (min(low, len(value)), *[0] * (value.ndim - 1))
                if not len(part):
                    continue
            data = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
            mine.append(SimpleNamespace(key=key, offset=offset, shape=part.shape, dtype=str(value.dtype), data=data))
        entries += write_pieces(store, name, pack_name(f"{step:08x}", rank), mine, *earlier)
    tensors = {
        key: TensorEntry(value.shape, str(value.dtype), tuple(e for e in entries if e.key == key))
        for key, value in values.items()
    }
    commit(store, name, Manifest(tensors, {}, extra={"step": step}), new=True)
    return store.location(name)


def read(location) -> dict[str, np.ndarray]:
    """Every tensor of a checkpoint, block by block, by nothing but the manifest."""
    store, folder = place_of(location)
    found = {}
    for key, entry in manifests.with_pieces(store, folder, Manifest.read(location)).tensors.items():
        found[key] = np.zeros(entry.shape, entry.dtype)
        for piece in entry.pieces:
            data = store.read(manifests.locate(folder, piece.pack), piece.begin, piece.end - piece.begin)
            assert piece.hash in ("", xxhash.xxh3_128_hexdigest(data))
            box = tuple(slice(low, low + size) for low, size in zip(piece.offset, piece.shape, strict=True))
            found[key][box] = np.frombuffer(data, entry.dtype).reshape(piece.shape)
    return found


def equal(found: dict, wanted: dict) -> bool:
    return found.keys() == wanted.keys() and all(np.array_equal(found[key], wanted[key]) for key in wanted)


@pytest.fixture(scope="module")
def s3():
    """The address of a bucket."""
    with bucket():
        yield "s3://bucket"


@pytest.fixture(params=["local", "memory", "s3"])
def root(request, tmp_path):
    if request.param == "s3":
        yield f"{request.getfixturevalue('s3')}/{tmp_path.name}"
        return
    if request.param == "local":
        yield tmp_path / "checkpoints"
        return
    files = fsspec.filesystem("memory")
    address = f"memory://{tmp_path.name}"
    yield address
    files.rm(f"/{tmp_path.name}", recursive=True) if files.exists(f"/{tmp_path.name}") else None


def test_what_is_written_is_read_wherever_it_lies(root):
    location = written(root, 1)
    assert equal(read(location), VALUES) and verify(location) == []
    assert CheckpointFolder(root).newest() == (location, [])


def test_a_pack_is_a_file_of_safetensors(tmp_path):
    location = written(tmp_path, 1)
    found = {}
    for path in sorted(location.glob("*.safetensors")):
        with safetensors.safe_open(path, "np") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert np.array_equal(np.concatenate([found["model.a"], found["model.a@5,0"]]), VALUES["model.a"])


def test_blocks_are_the_same_in_every_layout_and_written_once(root):
    written(root, 1)
    again = written(root, 2, after=1, cut=8)
    packs_of_both = {piece.pack.partition("/")[0] for piece in Manifest.read(again).pieces if piece.key == "model.a"}
    assert equal(read(again), VALUES) and "step-00000001" in packs_of_both
    same = written(root, 3, after=2, cut=8)
    store, folder = place_of(same)
    assert [name for name in store.files(folder) if name.endswith(".safetensors")] == [], "nothing is written again"
    assert equal(read(same), VALUES)


def test_a_piece_that_changes_in_memory_while_it_is_written_is_refused(tmp_path):
    data = np.zeros(8, np.uint8)

    class Reused:
        key, offset, shape, dtype, asked = "model.a", (0,), (8,), "uint8", 0

        @property
        def data(self):
            self.asked += 1
            data[0] = self.asked
            return data

    with pytest.raises(IntegrityError, match="model.a changed in memory while it was written"):
        write_pieces(LocalStore(tmp_path), "step-00000001", "p.safetensors", [Reused()], {})


class Disk:
    """Counts writes by whether they pass the page cache by; it may refuse to open so, or to write, and writes little.

    ``bad_at`` is the write that fails.
    """

    def __init__(self, *, opens: bool = True, takes: bool = True, most: int = 1 << 30, bad_at: int = 0):
        self.opens, self.takes, self.most, self.bad_at = opens, takes, most, bad_at
        self.open, self.write, self.past = os.open, os.write, list[bool]()

    def patched(self, monkeypatch) -> None:
        def opened(path, flags, *mode):
            if flags & stores.O_DIRECT and not self.opens:
                raise OSError(errno.EINVAL, "Invalid argument")
            return self.open(path, flags, *mode)

        def written(descriptor, data):
            past = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & stores.O_DIRECT)
            if past and not self.takes:
                raise OSError(errno.EINVAL, "Invalid argument")
            if past and np.frombuffer(data, np.uint8).ctypes.data % 512:
                raise AssertionError("memory that is not aligned")
            self.past.append(past)
            if len(self.past) == self.bad_at:
                raise OSError(errno.ENOSPC, "No space left on device")
            return self.write(descriptor, data[: self.most])

        monkeypatch.setattr(os, "open", opened)
        monkeypatch.setattr(os, "write", written)


@pytest.mark.parametrize("sizes", [[], [1], [8192], [3, 4096, 1, 0, 9000], [4095] * 9, [50_000]])
@pytest.mark.parametrize(
    "disk", [{}, {"opens": False}, {"takes": False}, {"most": 512}, {"most": 1000}], ids=lambda disk: "".join(disk)
)
def test_any_parts_are_written_whole_on_any_file_system(tmp_path, monkeypatch, sizes, disk):
    parts = [os.urandom(size) for size in sizes]
    monkeypatch.setattr(stores, "ROOM", 8192)
    Disk(**disk).patched(monkeypatch)
    LocalStore(tmp_path).write("step-00000001/pack", iter(parts))
    assert (tmp_path / "step-00000001/pack").read_bytes() == b"".join(parts)


def test_whole_portions_pass_the_page_cache_by_where_the_file_system_lets_them(tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "ROOM", 8192)
    try:
        os.close(os.open(tmp_path / "asked", os.O_CREAT | os.O_WRONLY | stores.O_DIRECT))
    except OSError:
        pytest.skip("this folder's file system cannot write past the page cache")
    (at := Disk()).patched(monkeypatch)
    LocalStore(tmp_path).write("step-00000001/pack", [bytes(20_000)])
    assert at.past == [True, True, False]


def test_a_disk_that_fails_is_named_whichever_write_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "ROOM", 4096)
    (at := Disk(bad_at=2)).patched(monkeypatch)
    with pytest.raises(OSError, match="No space left"):
        LocalStore(tmp_path).write("step-00000001/pack", [np.zeros(30_000, np.uint8)])
    assert len(at.past) < 8


@pytest.mark.parametrize(
    "write",
    [replace_text, lambda path, text: LocalStore(path.parent).put(path.name, text.encode())],
    ids=["text", "put"],
)
def test_a_small_file_that_a_full_disk_refuses_leaves_the_one_before_alone(tmp_path, write):
    path, refused = tmp_path / "small", 0
    for fail_at in range(1, 6):
        write(path, "before")
        with failing_disk(fail_at, full) as seen:
            try:
                write(path, "after")
            except OSError:
                refused += 1
                assert path.read_text() == ("after" if "replace" in seen[:-1] else "before")
                assert [each.name for each in tmp_path.iterdir()] == ["small"]
    assert refused == 4  # write, fsync, replace, fsync of the folder


def test_a_manifest_waits_for_its_packs(root):
    written(root, 1)
    store = store_of(root)
    manifest = Manifest.read(store.location("step-00000001"))
    with pytest.raises(IntegrityError, match="is gone: does another job save there"):
        commit(store, "step-00000002", manifest)
    assert CheckpointFolder(root).steps() == [1]


def test_every_byte_counts(tmp_path):
    location = written(tmp_path, 1)
    for path in sorted(location.glob("*.safetensors")):
        whole = path.read_bytes()
        length = 8 + int.from_bytes(whole[:8], "little")
        for place in (*range(8, length, 37), *range(length, len(whole), 5)):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            if place >= length:
                assert str(path) in "".join(verify(location)), place
        path.write_bytes(whole)
    assert verify(location) == []


def test_a_copy_stands_for_itself_and_older_releases_read_one(root, tmp_path):
    written(root, 1)
    later = VALUES | {"model.b": VALUES["model.b"] + 1}
    location = written(root, 2, later, after=1)
    copied = tmp_path / "copy"
    copy(location, copied)
    assert equal(read(copied), later) and {path.suffix for path in copied.iterdir()} == {".json", ".safetensors"}
    old = tmp_path / "old"
    copy(location, old, version=1)
    said = json.loads((old / NAME).read_text())
    crc = said.pop("crc32")
    assert said["version"] == 1 and crc == zlib.crc32(json.dumps(said).encode())
    assert equal(read(old), later) and verify(old) == []
    with pytest.raises(ConfigError, match="is not empty: give a new folder"):
        copy(location, old)
    back = tmp_path / "back"
    copy(old, back)
    assert equal(read(back), later)


def test_version_1_is_read_by_the_headers_of_its_shards(tmp_path):
    from safetensors.numpy import save_file

    folder = tmp_path / "c"
    folder.mkdir()
    files = {}
    for rank, rows in enumerate([slice(0, 7), slice(7, 12)]):
        name = f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        where = json.dumps({"model.a": {"saved_offsets": [rows.start, 0]}})
        save_file({"model.a": VALUES["model.a"][rows]}, folder / name, metadata={"DCP_SHARDING_INFO": where})
        data = (folder / name).read_bytes()
        files[name] = {"bytes": len(data), "crc32": zlib.crc32(data)}
    said = {"version": 1, "tensors": {"model.a": {"shape": [12, 8], "dtype": "float32"}}, "files": files}
    said |= {"optimizer": "", "groups": [], "extra": {}, "plan": "", "loss_scale": {}}
    (folder / NAME).write_text(json.dumps({**said, "crc32": zlib.crc32(json.dumps(said).encode())}))
    assert equal(read(folder), {"model.a": VALUES["model.a"]}) and verify(folder) == []
    path = folder / next(iter(files))
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    assert "its content changed since it was written" in verify(folder)[0]


# --- stores


def test_a_store_that_fails_is_asked_again_and_then_named(monkeypatch):
    store, failures = RemoteStore("memory://flaky"), [TimeoutError("slow")] * 2
    monkeypatch.setattr(stores.time, "sleep", lambda seconds: None)
    files, _ = store._at
    put = type(files).pipe_file

    def flaky(self, *args, **options):
        if failures:
            raise failures.pop()
        return put(self, *args, **options)

    monkeypatch.setattr(type(files), "pipe_file", flaky)
    store.put("x", b"1")
    assert store.read("x") == b"1"
    failures.extend([TimeoutError("slow")] * 9)
    with pytest.raises(OSError, match="memory://flaky/x failed 4 times: TimeoutError: slow"):
        store.put("x", b"2")
    assert store.read("x") == b"1"


def test_a_store_that_lists_late_is_asked_for_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(RemoteStore, "files", lambda self, folder="": {})
    location = written(f"memory://{tmp_path.name}", 1)
    assert equal(read(location), VALUES)


def test_a_file_that_cannot_be_read_now_sends_nobody_to_an_older_checkpoint(tmp_path, monkeypatch):
    place = f"memory://{tmp_path.name}"
    written(place, 1)
    location = written(place, 2, after=1)
    whole = RemoteStore.read

    def denied(self, name, *args):
        if name == f"step-00000002/{NAME}":
            raise PermissionError("denied")
        return whole(self, name, *args)

    monkeypatch.setattr(RemoteStore, "read", denied)
    with pytest.raises(IntegrityError, match=f"{location}/{NAME} could not be read: denied"):
        CheckpointFolder(place).newest()


def test_what_may_not_be_listed_or_written_is_said_in_a_sentence(monkeypatch):
    def denied(*_, **__):
        raise PermissionError("Access Denied")

    memory = type(fsspec.filesystem("memory"))
    monkeypatch.setattr(memory, "ls", denied)
    monkeypatch.setattr(memory, "pipe_file", denied)
    with pytest.raises(ConfigError, match="memory://closed/ cannot be listed .*Access Denied.*may list and read"):
        CheckpointFolder("memory://closed").newest()
    with pytest.raises(ConfigError, match="memory://closed cannot be written .*Access Denied.*may write to"):
        CheckpointFolder("memory://closed").refuse_others({})


def test_an_address_of_a_folder_on_disk_is_its_path(tmp_path):
    location = written(f"file://{tmp_path}/far", 1)
    assert location == tmp_path / "far/step-00000001" and equal(read(f"local://{location}"), VALUES)


def test_of_two_jobs_that_save_one_step_the_second_is_refused(tmp_path):
    place = f"memory://{tmp_path.name}"
    written(place, 1)
    with pytest.raises(IntegrityError, match="was written by another job in the meantime"):
        written(place, 1)


def test_a_bucket_that_is_not_there_is_said_before_anything_is_saved(s3):
    with pytest.raises(ConfigError, match="s3://no-such-bucket-here/run .*: create it, or give one that this user or"):
        CheckpointFolder("s3://no-such-bucket-here/run").refuse_others({})
    CheckpointFolder(f"{s3}/fresh").refuse_others({})


def test_the_checkpoints_of_another_run_are_refused(root):
    store = store_of(root)
    Manifest({}, {}, extra={"identity": {"seed": 1}}).write(store.location("step-00000001"))
    CheckpointFolder(root).refuse_others({"seed": 1})
    with pytest.raises(ConfigError, match="holds the checkpoints of another run"):
        CheckpointFolder(root).refuse_others({"seed": 2})


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("nothing://bucket/run", "is no address that can be reached"),
        ("memory://", "give a folder in it"),
    ],
)
def test_an_address_that_leads_nowhere_is_refused(address, words):
    with pytest.raises(ConfigError, match=words):
        place_of(address)[0].files("x")


# --- killed at every write


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_killed_at_any_write_the_newest_whole_one_is_the_older_or_the_new(tmp_path, kind, monkeypatch):
    class Killed(BaseException):
        pass

    for number in range(1, 40):
        place = tmp_path / str(number) if kind == "local" else f"memory://{tmp_path.name}-{number}"
        written(place, 1)
        count = iter(range(1, 1000))

        def turn(function, number=number, count=count):
            def call(*args, **options):
                if next(count) == number:
                    raise Killed
                return function(*args, **options)

            return call

        with monkeypatch.context() as patched:
            if kind == "local":
                for name in ("fsync", "replace"):
                    patched.setattr(os, name, turn(getattr(os, name)))
                patched.setattr(stores, "open", lambda *a, turn=turn, **o: Counted(OPEN(*a, **o), turn), raising=False)
            else:
                memory = type(fsspec.filesystem("memory"))
                for name in ("_open", "pipe_file"):
                    patched.setattr(memory, name, turn(getattr(memory, name)))
            try:
                written(place, 2, VALUES | {"model.b": VALUES["model.b"] * 2}, after=1)
                done = True
            except Killed:
                done = False
        newest, problems = CheckpointFolder(place).newest()
        assert newest is not None and problems == [] and verify(newest) == []
        step = Manifest.read(newest).extra["step"]
        assert equal(read(newest), VALUES if step == 1 else VALUES | {"model.b": VALUES["model.b"] * 2})
        if done:
            assert step == 2 and number > 2
            return
    raise AssertionError("no save passed untouched")


class Counted:
    """A file whose writes are counted."""

    def __init__(self, file, turn):
        self.file, self.write = file, turn(file.write)

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()


# --- the verb


def test_the_verb_lists_proves_clears_and_copies(tmp_path, capsys):
    run = tmp_path / "run"
    place = run / "checkpoints"
    run.mkdir()
    written(place, 1)
    written(place, 2, VALUES | {"model.b": VALUES["model.b"] + 1}, after=1)
    (run / "config.toml").write_text('name = "x"\n')
    (place / "step-00000002" / "pieces-deadbeef-00000.safetensors").write_bytes(b"left")
    assert main(["checkpoint", "ls", str(run)]) == 0
    out = capsys.readouterr().out
    assert "refers to files of" in out and out.count("(newest)") == 1
    assert main(["checkpoint", "gc", str(run)]) == 0 and "removed 1 files" in capsys.readouterr().out
    assert main(["checkpoint", "verify", str(run)]) == 0
    assert capsys.readouterr().out.count("whole, every byte as it was written") == 2
    assert main(["checkpoint", "copy", str(run), str(tmp_path / "new"), "--step=1"]) == 0
    assert equal(read(tmp_path / "new"), VALUES)
    path = next((place / "step-00000001").glob("*-00000.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    assert main(["checkpoint", "verify", str(run), "--step", "1"]) == 1
    assert f"{path} has the right size, but its content changed" in capsys.readouterr().out
    for words, says in [
        (["ls"], "needs one of ls, verify, gc, copy"),
        (["ls", str(tmp_path / "new")], "is one checkpoint"),
        (["verify", str(tmp_path)], "holds no checkpoint"),
        (["verify", str(run), "--step=7"], "has steps 1, 2"),
        (["ls", str(run), "--step=2"], "--step is for verify and copy, and ls has no use for it"),
        (["gc", str(run), "--format=1"], "--format is for copy, and gc has no use for it"),
        (["copy", str(run), "memory://copy"], "memory://copy would be gone with this command"),
        (["ls", "s3://"], "s3:// names no bucket and no folder: give an address like s3://bucket/run"),
    ]:
        assert main(["checkpoint", *words]) == 2 and says in capsys.readouterr().err


@pytest.mark.parametrize("how", ["cut", "of a newer release", "all"])
def test_a_damaged_manifest_is_one_row_of_the_list(tmp_path, capsys, how):
    for step in (1, 2, 3):
        written(tmp_path, step)
    for step in (1, 2, 3) if how == "all" else (3,):
        place = tmp_path / f"step-{step:08d}" / NAME
        place.write_text(
            "{" if how != "of a newer release" else place.read_text().replace('"version": 2', '"version": 3')
        )
    assert main(["checkpoint", "ls", str(tmp_path)]) == 1
    *rows, last = capsys.readouterr().out.splitlines()
    assert len(rows) == 2 and ("version 3" if how == "of a newer release" else "is damaged") in last
    assert [row.endswith("(newest)") for row in rows] == [False, how != "all"]


def test_clearing_leaves_what_cannot_be_judged(tmp_path, capsys):
    written(tmp_path, 1)
    written(tmp_path, 2, after=1)
    (tmp_path / "step-00000002" / NAME).write_text("{")
    before = sorted(map(str, Path(tmp_path).rglob("*")))
    assert main(["checkpoint", "gc", str(tmp_path)]) != 0 and "is damaged" in capsys.readouterr().err
    assert sorted(map(str, Path(tmp_path).rglob("*"))) == before


def test_clearing_goes_on_where_a_job_retires_a_checkpoint_meanwhile(tmp_path, monkeypatch):
    written(tmp_path, 1)
    written(tmp_path, 2)
    read_manifest = Manifest.read

    def retired(location):
        (tmp_path / "step-00000001" / NAME).unlink(missing_ok=True)
        return read_manifest(location)

    monkeypatch.setattr(Manifest, "read", retired)
    assert main(["checkpoint", "gc", str(tmp_path)]) == 0
    assert verify(CheckpointFolder(tmp_path).of_step(2)) == []


@pytest.mark.parametrize("kind", ["memory", "own loop"])
def test_clearing_leaves_what_a_save_in_progress_has_written(tmp_path, capsys, kind):
    """No manifest names it so far, and none would be whole without it."""
    place = f"memory://{tmp_path.name}" if kind == "memory" else str(tmp_path / "own")
    store, left = store_of(place), "pieces-deadbeef-00000.safetensors"
    written(place, 1)
    written(place, 2, after=1)
    places = [f"step-{step:08d}/{left}" for step in (1, 2, 3)]
    for name in places:
        store.put(name, b"left")
    if kind == "memory":
        store.put("run.json", b'{"run": "/r", "job": {"pid": 1, "host": "far", "since": "noon"}}')
    assert main(["checkpoint", "gc", place]) == 0
    out = capsys.readouterr().out
    assert "removed 1 files" in out and f"2 more stay, such as {store.where(places[1])}: a job may be" in out
    assert [store.size(name) for name in places] == [None, 4, 4]
    store.put("run.json", b'{"run": "/r"}')
    assert main(["checkpoint", "gc", place]) == 0 and "removed 2 files" in capsys.readouterr().out
    assert [store.size(name) for name in places] == [None] * 3 and verify(CheckpointFolder(place).of_step(2)) == []


def test_checkpoints_of_a_run_in_progress_are_not_cleared(tmp_path, capsys):
    for held, place in ((tmp_path / "run", "checkpoints"), (tmp_path / "shared", "")):
        held.mkdir()
        written(held / place, 1)
        with occupied(held):
            assert main(["checkpoint", "gc", str(held / place)]) == 2
        assert f"{held} is being trained by another job" in capsys.readouterr().err


# --- each guard is needed


def damaged_is_named(place: Path) -> None:
    location = written(place, 1)
    path = next(location.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    assert verify(location)


def a_gone_pack_is_named(place: Path) -> None:
    written(place, 1)
    location = written(place, 2, VALUES | {"model.b": VALUES["model.b"] + 1})
    next(location.glob("*.safetensors")).unlink()
    assert CheckpointFolder(place).latest() == place / "step-00000001"


def what_is_needed_stays(place: Path) -> None:
    written(place, 1)
    last = written(place, 2, VALUES | {"model.b": VALUES["model.b"] + 1}, after=1)
    CheckpointFolder(place).keep_last(1)
    assert verify(last) == []


def a_reference_is_to_equal_bytes(place: Path) -> None:
    written(place, 1)
    later = VALUES | {"model.a": VALUES["model.a"] + 1}
    assert equal(read(written(place, 2, later, after=1)), later)


def a_manifest_comes_last(place: Path) -> None:
    manifest = Manifest.read(written(place, 1))
    with pytest.raises(IntegrityError):
        commit(LocalStore(place), "step-00000002", manifest)


def no_name_leads_out(place: Path) -> None:
    location = written(place, 1)
    manifest = Manifest.read(location)
    rows = {
        key: TensorEntry(row.shape, row.dtype, tuple(replace(p, pack="../../x.safetensors") for p in row.pieces))
        for key, row in manifest.tensors.items()
    }
    replace(manifest, tensors=rows, files={"../../x.safetensors": manifests.FileEntry(10**6)}).write(location)
    with pytest.raises(IntegrityError, match="no file of this checkpoint"):
        Manifest.read(location)


def a_new_name_is_taken_once(place: Path) -> None:
    address = f"memory://{place.name}-mutant"
    written(address, 1)
    with pytest.raises(IntegrityError):
        written(address, 1)


GUARDS = [
    (damaged_is_named, "copying.StoredPiece.data", b""),
    (a_gone_pack_is_named, "folder.lacking", lambda *_: []),
    (what_is_needed_stays, "folder.locate", lambda folder, pack: ""),
    (a_reference_is_to_equal_bytes, "pieces.hash_of", lambda data: "0"),
    (a_manifest_comes_last, "manifest.sizes_of", lambda store, folder, packs: dict.fromkeys(packs, 10**9)),
    (no_name_leads_out, "manifest.PACK", re.compile(".*")),
    (
        a_new_name_is_taken_once,
        "store.RemoteStore.put",
        lambda self, name, content, **_: PUT(self, name, content),
    ),
]
PUT = RemoteStore.put


@pytest.mark.parametrize(("question", "guard", "broken"), GUARDS, ids=[guard for _, guard, _ in GUARDS])
def test_without_a_guard_its_question_fails(question, guard, broken, tmp_path, monkeypatch):
    question(tmp_path / "with")
    monkeypatch.setattr(f"meshwright.checkpoint.{guard}", broken)
    with pytest.raises(BaseException):  # noqa: B017  (whatever shows that the guard is gone)
        question(tmp_path / "without")
