"""Trackers: each gets every figure once, whatever was taken again after a resume.

One that is missing or lost is said.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from meshwright.core.errors import ConfigError, IntegrityError, MeshwrightError, MissingExtraError
from meshwright.training.config import Config
from meshwright.training.metrics import (
    MetricsWriter,
    TensorBoard,
    Tracker,
    Trackers,
    WeightsAndBiases,
    check_trackers,
    open_trackers,
    read_metrics,
)

needs_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="needs the extra 'track'"
)
needs_wandb = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs the extra 'track'")


def logging(**values):
    return Config.from_dict({"logging": {"tensorboard": "off", **values}}).logging


@pytest.fixture
def hide(monkeypatch):
    """``hide(package)``: as if it were not installed."""
    real = importlib.util.find_spec

    def hidden(package):
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *rest: None if name == package else real(name, *rest)
        )

    return hidden


@pytest.mark.parametrize(
    ("package", "values"), [("tensorboard", {"tensorboard": "on"}), ("wandb", {"wandb": "offline"})]
)
def test_a_tracker_that_is_asked_for_and_missing_is_refused(hide, package, values):
    check_trackers(logging())
    hide(package)
    with pytest.raises(MissingExtraError, match=rf"'{package}', which is not installed.*pip install .*{package}"):
        check_trackers(logging(**values))


def test_tensorboard_by_default_is_used_where_it_is_and_said_where_not(hide, tmp_path):
    hide("tensorboard")
    for mode, said in (("auto", "pip install tensorboard)"), ("off", "off (tensorboard = 'off')")):
        trackers = open_trackers(tmp_path / mode, logging(tensorboard=mode), "run", {}, print)
        trackers.log(1, {"loss": 1.0})
        trackers.close()
        assert [name for name, _ in trackers.places] == ["metrics", "tensorboard"] and said in trackers.places[1][1]
        assert [path.name for path in (tmp_path / mode).iterdir()] == ["metrics.jsonl"]
    with pytest.raises(ConfigError, match="none of auto, on, off"):
        check_trackers(SimpleNamespace(tensorboard="yes", wandb="off"))


class Recorder:
    """A tracker that notes what it is told, and fails where it is asked to."""

    def __init__(self, fails=""):
        self.told, self.fails = [], fails

    def log(self, step, values):
        self.told.append(("log", step, values))

    def event(self, name, values, step=None):
        self.told.append((name, step, values))

    def resumed(self, step):
        self.told.append(("resumed", step))

    def close(self):
        self.told.append(("close",))
        if self.fails:
            raise OSError(self.fails)


def test_all_trackers_are_told_the_same_and_all_are_closed_also_when_one_fails():
    recorders: list[Tracker] = [Recorder(), Recorder("disk full"), Recorder()]
    trackers = Trackers(recorders)
    trackers.log(1, {"loss": 2.0})
    trackers.event("startup", {"imports": 1.0})
    trackers.resumed(1)
    with pytest.raises(OSError, match="disk full"):
        trackers.close()
    for recorder in recorders:
        assert recorder.told == [
            ("log", 1, {"loss": 2.0}),
            ("startup", None, {"imports": 1.0}),
            ("resumed", 1),
            ("close",),
        ]  # type: ignore[attr-defined]


@needs_tensorboard
def test_tensorboard_gets_the_numbers_and_forgets_the_abandoned_future(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = TensorBoard(tmp_path)
    for step in (1, 2, 3, 4):
        first.log(step, {"loss": 10.0 + step, "host": "a", "is_done": True})
    first.close()
    second = TensorBoard(tmp_path)
    second.resumed(2)
    second.log(3, {"loss": 23.0})
    second.close()
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert board.Tags()["scalars"] == ["loss"]
    assert [(event.step, event.value) for event in board.Scalars("loss")] == [(1, 11.0), (2, 12.0), (3, 23.0)]


class FakeRun:
    url = None

    def __init__(self, sent):
        self.sent, self.summary = sent, {}

    def log(self, values, step):
        self.sent.append((step, values))

    def finish(self):
        self.sent.append("finish")


@pytest.fixture
def fake(monkeypatch):
    """A small W&B in place of the real one: ``opened`` and ``sent`` tell what came; ``refuses`` is raised instead."""
    told = SimpleNamespace(opened=[], sent=[], refuses=None)

    class Error(Exception):
        pass

    def init(**options):
        if told.refuses:
            raise Error(told.refuses)
        told.opened.append(options)
        told.run = FakeRun(told.sent)
        return told.run

    module = SimpleNamespace(init=init, Settings=lambda **given: given, errors=SimpleNamespace(Error=Error))
    real = importlib.import_module
    monkeypatch.setattr(
        importlib, "import_module", lambda name, *rest: module if name == "wandb" else real(name, *rest)
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: object())
    return told


def test_a_continued_run_is_the_same_wandb_run_and_sends_no_step_twice(fake, tmp_path):
    said = []
    for mode, resumed, steps in (
        ("online", None, range(1, 16)),
        ("online", 10, range(11, 14)),
        ("offline", 12, range(13, 19)),
    ):
        tracker = WeightsAndBiases(tmp_path, mode, "words", {"steps": 18}, said.append)
        if resumed is not None:
            tracker.resumed(resumed)
        for step in steps:
            tracker.log(step, {"loss": float(step)})
        tracker.close()
        tracker.close()
    assert [entry[0] for entry in fake.sent if entry != "finish"] == list(range(1, 19)) and fake.sent.count(
        "finish"
    ) == 3
    ids = {options["id"] for options in fake.opened}
    assert len(ids) == 1 and json.loads((tmp_path / "wandb.json").read_text()) == {"id": ids.pop(), "furthest": 18}
    assert [options.get("resume") for options in fake.opened] == ["allow", "allow", None]
    assert all(
        (options["project"], options["dir"], options["config"]) == ("words", str(tmp_path), {"steps": 18})
        for options in fake.opened
    )
    assert [text.split(";")[0] for text in said] == [
        "wandb: steps 11 to 15 are taken again",
        "wandb: steps 13 to 15 are taken again",
    ]


def test_a_wandb_that_refuses_ends_the_start_and_one_that_is_lost_is_said_once(fake, tmp_path):
    said = []
    fake.refuses = "api_key not configured"
    with pytest.raises(MeshwrightError, match=r"refused \(Error: api_key not configured\).*wandb login.*offline"):
        open_trackers(tmp_path, logging(wandb="online"), "run", {}, said.append)
    fake.refuses = None
    trackers = open_trackers(tmp_path, logging(wandb="online"), "run", {}, said.append)

    def gone(values, step):
        raise BrokenPipeError("the service has ended")

    fake.run.log = gone
    for step in (1, 2):
        trackers.log(step, {"loss": 1.0})
    trackers.close()
    assert said == [
        "wandb takes no more figures (BrokenPipeError: the service has ended); they are in metrics.jsonl, and the run"
        " goes on"
    ]
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


@pytest.mark.follows("logging.wandb = offline")
@needs_wandb
def test_without_an_account_the_real_wandb_is_used_offline(tmp_path, monkeypatch):
    for name, value in {"WANDB_API_KEY": "", "WANDB_ERROR_REPORTING": "false", "NETRC": str(tmp_path / "none")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr("socket.socket.connect_ex", lambda *args: pytest.fail("went to the network"))
    with pytest.raises(
        MeshwrightError, match=r'or set logging.wandb = "offline" and send the files later with: wandb sy'
    ):
        open_trackers(tmp_path, logging(wandb="online"), "run", {}, print)
    trackers = open_trackers(tmp_path, logging(wandb="offline"), "run", {}, print)
    trackers.log(1, {"loss": 1.0})
    trackers.close()
    _, _, (_, place) = trackers.places
    assert place.startswith("wandb  (wandb sync --id ") and list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"id": "../../x", "furthest": 1}', '{"id": "abc", "furthest": "1"}'])
def test_a_foreign_wandb_file_is_refused(fake, tmp_path, text):
    (tmp_path / "wandb.json").write_text(text)
    with pytest.raises(IntegrityError, match=r"wandb.json .*remove it to begin a new"):
        WeightsAndBiases(tmp_path, "offline", "words", {}, print)
    assert fake.opened == []


def records_of(content: bytes) -> list[bytes]:
    """The records of a .wandb file: 7 bytes of header, then blocks of 32 KiB in LevelDB's log format."""
    records, place = [], 7
    while place + 7 <= len(content):
        if 2**15 - place % 2**15 < 7:
            place += 2**15 - place % 2**15
            continue
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        part = content[place + 7 : place + 7 + length]
        # 1: whole, 2: its first part
        records = [*records, part] if kind in (1, 2) else [*records[:-1], records[-1] + part]
        place += 7 + length
    return records


PART_OF_A_RUN = """
import math, sys
from pathlib import Path
from types import SimpleNamespace
from meshwright.training.metrics import open_trackers

folder, resumed, *steps = sys.argv[1], *map(int, sys.argv[2:])
logging = SimpleNamespace(tensorboard="off", wandb="offline", wandb_project="")
trackers = open_trackers(Path(folder), logging, "tiny", {"model": {"dim": 64}}, print)
if resumed:
    trackers.resumed(resumed)
for step in steps:
    trackers.log(step, {"loss": math.nan if step == 2 else 10.0 + step, "tokens": 7})
trackers.event("startup", {"imports": 1.5})
trackers.close()
"""


@pytest.mark.all
@needs_wandb
def test_the_real_wandb_keeps_the_steps_of_a_continued_run_under_one_id(tmp_path, monkeypatch):
    """Each part in a process of its own, as runs are: W&B's service, one for each process, ends with all that it was
    given written.
    """
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    for resumed, steps in ((0, (1, 2, 3)), (1, (2, 3, 4))):
        subprocess.run([sys.executable, "-c", PART_OF_A_RUN, str(tmp_path), str(resumed), *map(str, steps)], check=True)
    from wandb.proto import wandb_internal_pb2

    kept, ids, configs = [], set(), []
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    assert len(files) >= 1
    for file in files:
        for data in records_of(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                ids.add((record.run.run_id, record.run.project))
                configs.append({update.key: json.loads(update.value_json) for update in record.run.config.update})
            if record.HasField("history"):
                items = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
                }
                kept.append((items["_step"], items["loss"]))
    assert ids == {(json.loads((tmp_path / "wandb.json").read_text())["id"], "tiny")}
    assert configs[0]["model"] == {"dim": 64}
    assert [step for step, _ in kept] == [1, 2, 3, 4] and [loss for step, loss in kept if step != 2] == [
        11.0,
        13.0,
        14.0,
    ]
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "wandb", "wandb.json"}


def test_neither_tensorboard_nor_wandb_nor_torch_nor_rich_is_imported_before_it_is_used(tmp_path):
    code = """
import sys
import meshwright.training.views.progress
import meshwright.training.metrics as trackers
from meshwright.training.config import Config
opened = trackers.open_trackers(__import__("pathlib").Path(sys.argv[1]), Config().logging, "run", {}, print)
opened.event("startup", {})
opened.close()
print([name for name in ("tensorboard", "torch", "rich", "wandb") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert [line["event"] for line in read_metrics(MetricsWriter(tmp_path).path)] == ["startup"]
