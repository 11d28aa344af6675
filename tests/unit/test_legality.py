"""What a plan calls legal, a run accepts, and the other way round: nothing legal is called illegal by a search."""

from __future__ import annotations

import pytest

from benchmarks import legality
from benchmarks.legality import VOCABULARY, Question, facts_of, judge
from meshwright import Batch, Cluster, Layout, MeshwrightError, PreferenceLoss, foresee, parallelize, plan
from meshwright.cli.arguments import read_config
from meshwright.cli.main import main
from meshwright.simulation import foresee as door
from meshwright.simulation.search import search
from meshwright.training.build import build_run
from meshwright.training.stopping import StopRequest
from meshwright.training.throughput import StartupTimeline
from meshwright.training.views.progress import Progress


def batch(rows: int, seq: int, microbatch: int = 0, *, pairs: bool = False) -> Batch:
    return Batch(rows, seq, microbatch, VOCABULARY, pairs)


UNUSUAL = {
    "more tokens at a time than are tried": Question("dense", 4, 8, batch(64, 4096, 32), {}, Layout(), ("cp=1",)),
    "a factor that divides no heads": Question("own", 20, 4, batch(1, 96), {}, Layout(), ("pp=1",)),
    "a setting of an axis that no fast layout has": Question(
        "mixture", 256, 8, batch(1024, 128, 1), {"context_parallel_method": "ring"}, Layout(), ()
    ),
}
"""Questions that only layouts answer which a search does not try first."""


@pytest.mark.parametrize("name", UNUSUAL)
def test_a_legal_layout_is_found_beyond_those_that_are_usual(name, monkeypatch):
    asked = UNUSUAL[name]
    assert judge(asked) == ("answered", "")
    if "heads" in name:
        monkeypatch.setattr(door, "search", lambda *args, usual=True, **options: search(*args, **options))
        word, problem = judge(asked)  # what the benchmark says of a search that stops at the usual ones
        assert word == "refused" and "is legal, and is refused" in problem


@pytest.mark.first
@pytest.mark.parametrize("seed", range(3))
def test_random_questions_are_judged_as_the_rules_judge(seed):
    _, wrong = legality.run(4, seed)
    assert not wrong, wrong


# --- a rule about pairs, and those about a config, are asked alike by plan and by train


@pytest.mark.parametrize(
    ("techniques", "rows", "words"),
    [
        ({"loss_chunks": 4}, batch(8, 128, pairs=True), "techniques.loss_chunks = 4"),
        ({}, batch(8, 128, 3, pairs=True), "batch.microbatch = 3 rows would part the two rows"),
        ({}, batch(6, 128, pairs=True), "each pair of answers takes 2. Legal: a multiple of 4, like 4 or 8"),
    ],
)
def test_pairs_are_planned_as_they_are_trained(techniques, rows, words):
    layout, facts = Layout(dp_shard=2), facts_of("dense")
    with pytest.raises(MeshwrightError, match=words):
        plan(facts, layout, batch=rows, techniques=techniques)
    with pytest.raises(MeshwrightError, match=words):
        foresee(facts, layout, batch=rows, cluster=Cluster(2, gpu="h100"), techniques=techniques)
    if rows.global_rows % 4 == 0:  # a call knows no step's rows
        with pytest.raises(MeshwrightError, match=words):
            parallelize(
                legality.OURS["dense"],
                techniques=techniques,
                microbatch_rows=rows.microbatch_rows,
                loss_fn=PreferenceLoss(),
            )


def test_a_search_for_pairs_tries_whole_pairs_and_no_chunks():
    found = foresee(facts_of("dense"), batch=batch(16, 128, pairs=True), cluster=Cluster(2, gpu="h100"))
    assert not found.refused
    assert all(one.microbatch % 2 == 0 and one.techniques.loss_chunks == 1 for one in (*found.candidates, *found.front))


CONTRADICTIONS = {
    "schedule.warmup_steps": ["--steps=10", "--schedule.warmup_steps=10"],
    "data.curriculum": ["--data.curriculum=[{from_step = 5, weights = [1.0]}]"],
    "matches no trainable parameter": ['--optimizer.overrides=[{pattern = "nothing", lr_scale = 0.1}]'],
    "check_trace": ["--check_trace=trace.json", "--techniques.optimizer_state=8bit"],
}


@pytest.mark.parametrize("words", CONTRADICTIONS)
def test_a_config_that_train_refuses_is_refused_by_plan_in_the_same_words(words, capsys):
    flags = ["--model.size=debug", "--process.count=1", *CONTRADICTIONS[words]]
    with pytest.raises(MeshwrightError, match=words) as trained:
        build_run(read_config(flags, prog="meshwright train"), StartupTimeline(), Progress(), StopRequest())
    for more in ([], ["--gpus=1", "--gpu=h100", "--layout.dp_shard=1"]):
        assert main(["plan", *flags, *more]) == trained.value.exit_status
        assert str(trained.value) in capsys.readouterr().err
