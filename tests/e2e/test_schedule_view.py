"""A pipeline's timeline, by name and of a run, as their users ask for it."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest
from e2e_runs import only_run
from support.schedule_tables import write_schedule

from meshwright.cli.main import main
from meshwright.planning.pipeline.orders import KINDS
from meshwright.planning.pipeline.schedule import simulate


@pytest.mark.parametrize("name", KINDS)
def test_a_schedule_is_drawn_with_its_bubble(name, tmp_path, capsys):
    assert (
        main(["inspect", "--schedule", name, "--pp", "4", "--microbatches", "8", "--svg", str(tmp_path / "a.svg")]) == 0
    )
    said = capsys.readouterr().out
    kind = KINDS[name]
    schedule = kind.build(4, 8, kind.per_rank(99, 4))
    assert f"bubble {simulate(schedule).bubble:.1%} of the time" in said
    assert [line[:9] for line in said.splitlines()[:4]] == [f"  rank  {rank}" for rank in range(4)]
    boxes = [e for e in ElementTree.parse(tmp_path / "a.svg").iter() if e.tag.endswith("title")]
    assert [box.text.partition(":")[0] for box in boxes if box.text] == [
        str(a) for actions in schedule.ranks for a in actions
    ]


def test_a_table_is_drawn(tmp_path, capsys):
    write_schedule(KINDS["gpipe"].build(2, 3, 1), tmp_path / "mine.csv")
    assert main(["inspect", "--schedule", str(tmp_path / "mine.csv")]) == 0
    assert "2 ranks, 2 stages, 3 microbatches" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["1f2b"], "legal are gpipe, 1f1b, "),
        (
            ["dualpipe_v", "--pp", "4", "--microbatches", "3"],
            "3 microbatches cannot be scheduled; the next that can are 8",
        ),
        (["1f1b", "--pp", "1"], "a pipeline has 2 ranks or more"),
        (["zbv_zero_bubble", "--stages-per-rank", "3"], "--stages-per-rank = 3: zbv_zero_bubble has 2"),
        (["1f1b", "--ranks", "4"], "--ranks"),
    ],
)
def test_what_cannot_be_drawn_is_refused(words, said, capsys):
    assert main(["inspect", "--schedule", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.all
def test_a_run_shows_its_last_step_as_it_was(flags, tmp_path, capsys, meshwright):
    done = meshwright("train", *flags({"layout.pp": 2, "process.count": 2, "steps": 2}), cwd=tmp_path)
    assert done.status == 0, done.err
    run = only_run(tmp_path / "runs")
    said = json.loads((run / "schedule_times.json").read_text())
    assert said["schedule"] == "1f1b" and [len(actions) for actions in said["ranks"]] == [8, 8]
    assert main(["inspect", "--schedule", str(run), "--svg", str(tmp_path / "run.svg")]) == 0
    text = capsys.readouterr().out
    assert "1f1b, 2 ranks" in text and text.count("waited") == 2
    assert (tmp_path / "run.svg").read_text().startswith("<svg")


def test_a_drawing_that_cannot_be_written_is_said_in_a_sentence(tmp_path, capsys):
    words = ["--pp", "2", "--microbatches", "4", "--svg", str(tmp_path / "no" / "a.svg")]
    assert main(["inspect", "--schedule", "1f1b", *words]) == 2
    assert "--svg = " in (said := capsys.readouterr().err) and "cannot write this file (No such file" in said


def test_a_run_without_a_pipeline_has_nothing_to_show(tmp_path, capsys):
    assert main(["inspect", "--schedule", str(tmp_path)]) == 2
    assert "it is written at the end of a run with layout.pp > 1" in capsys.readouterr().err
