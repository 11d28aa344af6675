"""A rehearsal's result: read back as it was written, or refused in a sentence; and the flags of the verb."""

from __future__ import annotations

import json

import pytest

from meshwright.cli import main as cli
from meshwright.core.config import to_toml
from meshwright.core.errors import ConfigError
from meshwright.planning.layout import Layout
from meshwright.training.config import Config, ModelConfig
from meshwright.training.rehearsal import FORMAT, MessageRow, Rehearsal, from_json, read, to_json

FOUND = Rehearsal(
    37,
    512,
    {"pp": 0, "tp": 1},
    alike=44,
    work="pp 0",
    device="cpu",
    build_seconds=2.5,
    first_step_seconds=3.0,
    step_seconds=(0.5, 0.25, 0.5),
    is_compiled=True,
    memory={"parameters": 1 << 20, "activations": 3 << 20},
    peak_bytes=5 << 20,
    peak_label="device peak",
    operators={"aten.mm.default": 12},
    messages=(MessageRow("all_gather", "dp_shard", 32, 2, 2048.0),),
)
REFUSED = Rehearsal(3, 512, refused="layout.tp = 3 divides nothing", exit_status=2)


def test_what_was_written_is_read():
    assert from_json(to_json([FOUND, REFUSED])) == [FOUND, REFUSED]


def test_a_page_says_the_figures():
    page = str(FOUND)
    for words in ("rank 37 of 512 (pp 0, tp 1) on cpu; 44 ranks like it: pp 0", "device peak 5 MiB", "2.5"):
        assert words in page
    for row in ("activations 3 MiB", "compilation, in the first step 2.5 s", "step, median of 3 500.0 ms"):
        assert row in " ".join(page.split())
    assert "all_gather dp_shard 32 2 2 KiB" in " ".join(page.split())
    assert str(REFUSED).endswith("refused: layout.tp = 3 divides nothing")


def _without(key: str) -> str:
    values = json.loads(to_json([FOUND]))
    del values["rehearsals"][0][key]
    return json.dumps(values)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "this text is no rehearsal: write one with meshwright rehearse"),
        ('{"format": 1, "rehearsals": []}', "is no rehearsal"),
        ('{"format": 9, "rehearsals": [{}]}', f"in format 9, and this meshwright reads format {FORMAT}"),
        ('{"format": 1, "rehearsals": {"rank": 1}}', "'rehearsals' is not a list"),
        ('{"format": 1, "rehearsals": [3]}', "'rehearsals' is not a list of objects"),
        (_without("world"), "damaged rehearsal"),
        (to_json([FOUND]).replace('"rank": 37', '"rank": "x"'), "damaged rehearsal"),
        (to_json([FOUND]).replace('"alike"', '"like"'), "damaged rehearsal"),
    ],
    ids=range(9),
)
def test_what_is_damaged_or_of_another_version_is_refused_in_a_sentence(text, words):
    with pytest.raises(ConfigError, match=words) as refusal:
        from_json(text)
    assert "\n" not in str(refusal.value)


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match="absent.json cannot be read"):
        read(tmp_path / "absent.json")
    (tmp_path / "cut.json").write_text(to_json([FOUND])[:-9])
    with pytest.raises(ConfigError, match="cut.json is no rehearsal: it is not JSON"):
        read(tmp_path / "cut.json")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(to_toml(Config(model=ModelConfig(size="debug"), layout=Layout(dp_shard=4, tp=2))))
    return str(path)


@pytest.mark.first
@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ("", "which rank? Give --rank 0, or --each-kind"),
        ("--rank 1 --each-kind", "--rank and --each-kind are both given"),
        ("--rank 8", "--rank = 8: 8 GPUs have the ranks 0 to 7"),
        ("--rank -1", "--rank = -1: 8 GPUs have the ranks 0 to 7"),
        ("--rank 1 --gpus 12", "dp_shard=4 * tp=2 = 8 does not divide the world size 12"),
        ("--rank 1 --gpus 0", "--gpus = 0 is out of range: it must be 1 or more"),
        ("--rank 1 --steps 0", "--steps = 0 is out of range: it must be 1 or more"),
        ("--rank one", 'rank = "one" is text; expected a whole number'),
        ("--rank 1 --device tpu", "--device = 'tpu' is none of"),
        (
            "--rank 1 --json=/nowhere/found.json",
            "--json = /nowhere/found.json: cannot write this file (there is no folder",
        ),
        ("--rank 1 --json=/", "--json = /: cannot write this file (it is a folder)"),
        ("--rank 1 --layout.dp_shard=-1", "the layout leaves open how many ranks there are"),
    ],
    ids=range(12),
)
def test_each_refusal_is_a_sentence_before_anything_is_computed(file, capsys, words, refusal):
    assert cli.main(["rehearse", file, *words.split()]) == 2
    found = capsys.readouterr()
    assert found.err.startswith("meshwright: ") and refusal in found.err and found.err.count("\n") == 1
    assert found.out == ""


def test_help_needs_no_rank(capsys):
    assert cli.main(["rehearse", "--help"]) == 0 and "--each-kind" in capsys.readouterr().out


def test_a_device_that_is_not_here_is_refused(file, capsys, monkeypatch):
    monkeypatch.setattr("meshwright.training.rehearsal.local_device", lambda: "cpu")
    assert cli.main(["rehearse", file, "--rank", "1", "--device", "cuda"]) == 2
    assert "--device = cuda: there is none here, and a rehearsal computes" in capsys.readouterr().err


def test_memory_of_other_ranks_cannot_be_read_in_a_rehearsal(file, capsys, monkeypatch):
    monkeypatch.setattr("meshwright.training.rehearsal.is_accelerator", lambda device: False)
    words = ["--rank", "1", "--device", "cuda", "--techniques.async_tensor_parallel=true"]
    assert cli.main(["rehearse", file, *words]) == 3
    assert "techniques.async_tensor_parallel reads other ranks' memory" in capsys.readouterr().err
