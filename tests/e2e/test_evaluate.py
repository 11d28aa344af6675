"""evaluate: a run's checkpoint and a folder of transformers' files, on text and on layouts, from the command line."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys

import numpy as np
import pytest
import torch
from e2e_runs import Job, metrics
from torch.nn import functional as F

from meshwright.data.tokenizers import FileTokenizer
from meshwright.training.run.occupancy import occupied

pytestmark = pytest.mark.all


@pytest.fixture(scope="module")
def ran(pool, tiny, tmp_path_factory):
    """A run of the decoder on bytes, which validated 8 rows at steps 2 and 4."""
    config = tiny | {"model.size": "debug", "out": str(tmp_path_factory.mktemp("runs")), "steps": 4}
    config |= {"checkpoint.every": 2, "validation.every": 2, "validation.samples": 8}
    return pool.run(Job(config), world=1, timeout=60)[0].folder


@pytest.fixture
def run(ran, tmp_path):
    return shutil.copytree(ran, tmp_path / "run")


def figures(ask, *words):
    status, out, err = ask("evaluate", *words, "--json")
    assert (status, err) == (0, "")
    return json.loads(out)


def test_a_runs_validation_part_gives_the_loss_of_its_own_validation(ask, run):
    validated = {row["step"]: row["validation_loss"] for row in metrics(run) if "validation_loss" in row}
    for words, step in (((), 4), (("--step=2",), 2)):
        found = figures(ask, run, "--rows=8", "--batch=3", *words)
        assert found["loss"] == pytest.approx(validated[step], rel=1e-6) and found["step"] == step
        assert found["perplexity"] == pytest.approx(math.exp(found["loss"])) and found["rows"] == 8
    assert figures(ask, run)["rows"] > 8
    status, out, _ = ask("evaluate", run, "--rows=8")
    assert status == 0 and f"{run}, step 4, float32, one process, on the run's validation part" in out


def test_a_run_that_is_being_trained_is_evaluated_by_its_latest_checkpoint(ask, run):
    (run / "checkpoints" / "step-00000006.partial").mkdir()
    with occupied(run):
        assert figures(ask, run, "--rows=2")["step"] == 4


def test_layouts_agree_with_one_process_through_worker_processes(ask, run):
    one = figures(ask, run, "--rows=7")
    for flags, layout in (
        (["--layout.tp=2"], {"tp": 2}),
        (["--process.count=2"], {"dp_shard": 2}),
        (["--layout.pp=2"], {"pp": 2}),
    ):
        found = figures(ask, run, "--rows=7", "--batch=2", *flags)
        assert found["layout"] == layout and found["loss"] == pytest.approx(one["loss"], rel=1e-6)
        assert (found["tokens"], found["rows"]) == (one["tokens"], one["rows"])


@pytest.mark.first
def test_a_folder_of_transformers_is_evaluated_as_transformers_computes(ask, model, tmp_path, cache):
    from transformers import AutoModelForCausalLM

    text = "loss(mesh)=1 axis.rank" * 3
    (tmp_path / "text.txt").write_text(text)
    found = figures(ask, model, "--data", tmp_path / "text.txt", "--data.seq_len=64", f"--data.cache={cache}")
    tokenizer, theirs = FileTokenizer(model), AutoModelForCausalLM.from_pretrained(model).eval()
    ids = torch.tensor([*tokenizer.encode(text).tolist(), tokenizer.end_of_document])
    losses = []
    with torch.no_grad():
        for begin in range(0, len(ids), 64):
            row, ahead = ids[begin : begin + 64], ids[begin + 1 : begin + 65]
            logits = theirs(row.unsqueeze(0)).logits[0, : len(ahead)]
            losses += F.cross_entropy(logits.double(), ahead, reduction="none").tolist()
    assert found["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-6) and found["tokens"] == len(losses)
    assert found["bits_per_byte"] == pytest.approx(sum(losses) / math.log(2) / len(text), rel=1e-6)
    assert found["step"] is None and found["dtype"] == "float32"


def test_files_of_token_ids_are_read_to_their_last_tokens(ask, run, tmp_path, cache):
    texts, found = [b"one plan " * 9, b"a mesh", b"rank " * 30], []
    (tmp_path / "all").mkdir()
    words = ["--data.seq_len=64", f"--data.cache={cache}"]
    for n, text in enumerate(texts):
        file = f"{n}.npy"
        np.save(tmp_path / file, np.array([*text, 256, *text], dtype=np.uint16))
        shutil.copy(tmp_path / file, tmp_path / "all")
        found.append(figures(ask, run, "--data", tmp_path / file, *words))
        assert found[-1]["tokens"] == 2 * len(text) - 1 and found[-1]["rows"] == -(-(2 * len(text) + 1) // 64)
    every = figures(ask, run, "--data", tmp_path / "all", *words)
    assert every["tokens"] == sum(one["tokens"] for one in found) and every["rows"] == sum(one["rows"] for one in found)
    assert every["loss"] * every["tokens"] == pytest.approx(sum(one["loss"] * one["tokens"] for one in found), rel=1e-6)


def test_rows_are_as_long_as_conversations_need_where_nobody_set_their_length(ask, run, tmp_path, cache):
    rows = [{"prompt": "a" * n, "completion": "so it is"} for n in (9, 200, 300)]
    text = [json.dumps(row) + "\n" for row in rows]
    (tmp_path / "a.jsonl").write_text("".join(text[:2]))
    words = [run, "--data", tmp_path / "a.jsonl", f"--data.cache={cache}"]
    status, _, err = ask("evaluate", *words)
    assert status == 2 and "1 of the 2 conversations of the evaluation split is longer than data.seq_len" in err
    long = figures(ask, *words, "--data.seq_len=256")
    request = run / "request.toml"
    request.write_text(re.sub(r"(?m)^seq_len = .*\n", "", request.read_text()))
    found = figures(ask, *words)
    assert found["loss"] == pytest.approx(long["loss"], rel=1e-6) and found["tokens"] == long["tokens"]
    (tmp_path / "a.jsonl").write_text("".join(text))
    assert "is longer than data.seq_len = 256 (the longest has 3" in ask("evaluate", *words)[2]


def test_tasks_print_what_lm_eval_finds(ask, model, tmp_path):
    (tmp_path / "texts.json").write_text('{"text": "loss of a mesh"}\n{"text": "rank"}\n')
    (tmp_path / "ours.yaml").write_text(
        "task: ours_rolling\ndataset_path: json\noutput_type: loglikelihood_rolling\ntest_split: test\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path}/texts.json}}}}\n"
        'doc_to_text: ""\ndoc_to_target: "{{text}}"\nmetric_list: [{metric: byte_perplexity}]\n'
    )
    status, out, _ = ask("evaluate", model, "--tasks=ours_rolling", f"--tasks_path={tmp_path}", "--limit=2")
    lines = [line.split() for line in out.splitlines()]
    assert status == 0 and ["ours_rolling"] in lines
    assert next(float(line[1]) for line in lines if line[0] == "byte_perplexity") > 1


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["{run}", "--data={run}/config.tml"], "config.tml). Did you mean 'config.toml'? Give a file"),
        (["{model}"], "has no validation part: give --data PATH"),
        (["{run}", "--rows=0"], "--rows = 0 is out of range: it must be 1 or more"),
        (["{run}", "--limit=3"], "--limit is for --tasks"),
        (["{run}", "--tasks=a", "--rows=3"], "--rows is for a loss on text"),
        (["{run}", "--data.column=x"], "--data.column says how a source is read: name the source with --data"),
        (["{run}", "--layuot.tp=2"], "does not know '--layuot.tp=2'"),
        (["{run}", "--layout.pt=2"], "layout.pt"),
        (["{run}", "--layout.tp=2", "--process.count=3"], "3"),
        (
            ["{run}", "--data={run}/config.toml", "--data.format=text", "--data.seq_len=4096"],
            "rows of at most 256 tokens",
        ),
        (["nowhere"], "nowhere does not exist"),
        (["{empty}"], "without a config.json, so it is no model of transformers either"),
        (["{run}", "--step=9"], "has no checkpoint of step 9; steps that are there: 2, 4"),
        (["--rows=3"], "needs the folder of a run"),
    ],
)
def test_bad_requests_are_refused_in_a_sentence(ask, run, model, tmp_path, words, complaint):
    (tmp_path / "empty").mkdir()
    places = {"run": run, "model": model, "empty": tmp_path / "empty"}
    status, out, err = ask("evaluate", *(word.format(**places) for word in words))
    assert (status, out) == (2, "") and complaint in err and len(err.splitlines()) == 1, err


def test_a_run_without_anything_held_out_says_how_to_go_on(ask, run):
    config = (run / "config.toml").read_text().replace("validation_fraction = 0.05", "validation_fraction = 0.0")
    (run / "config.toml").write_text(config)
    status, _, err = ask("evaluate", run)
    assert status == 2 and "name a source with --data" in err and len(err.splitlines()) == 1


def test_a_missing_harness_names_the_extra(ask, run, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "meshwright.integrations.lm_eval", raising=False)
    status, out, err = ask("evaluate", run, "--tasks=hellaswag")
    assert (status, out) == (2, "") and re.search("pip install .*lm-eval", err)
