"""``python -m silent100`` on two small cases of a folder that somebody brings."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import argparse, torch, torch.distributed as dist
cli = argparse.ArgumentParser()
for flag in ("--one", "--faulty"):
    cli.add_argument(flag, action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, ranks = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 6))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 4):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))[rank::ranks]
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    for name, p in model.named_parameters():
        if ranks > 1 and not (args.faulty and name == "2.weight"):
            dist.all_reduce(p.grad)
            p.grad /= ranks
    optimizer.step()
    print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    torch.save(model.state_dict(), f"{args.save}/rank{rank}.pt")
if ranks > 1:
    dist.destroy_process_group()
"""
TOML = """
id = "{id}"
title = "A head that is not reduced"
source = "somebody/something#1"
edge = "step"
axis = "data"
processes = 2
tier = 1
{rest}
"""
ANSWER = "[answer]\nplace = '2.*'\nstep = 1\nranks = [0, 1]\nkind = 'missing reduction'"


@pytest.mark.first
def test_judges_are_scored_on_a_folder_of_cases(tmp_path: Path):
    for name, rest in {"head-not-reduced": ANSWER, "sound-mean": "sound = true", "unused": ANSWER}.items():
        folder = tmp_path / "cases" / name
        folder.mkdir(parents=True)
        (folder / "case.py").write_text(SCRIPT)
        (folder / "case.toml").write_text(TOML.format(id=name, rest=rest))
    words = [sys.executable, "-m", "silent100", "--cases", str(tmp_path / "cases"), "--only", "*ea*"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    done = subprocess.run(
        [*words, "--json", str(tmp_path / "found.json"), "checksums", "meshwright"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert [entry["case"] for entry in found["meshwright"]] == ["head-not-reduced", "sound-mean"]
    marks = found["meshwright"][0]["marks"]
    assert marks == {"false alarm": False} | dict.fromkeys(["found", "placed", "first step", "kind", "ranks"], True), (
        done.stdout
    )
    assert found["meshwright"][1]["marks"] == {"false alarm": False}
    assert found["checksums"][0]["marks"]["found"] and not found["checksums"][1]["marks"]["false alarm"]
    assert "judge: meshwright" in done.stdout and "tier 1" in done.stdout


@pytest.mark.all
@pytest.mark.parametrize(
    "name",
    [
        "counts-skipped-when-pieces-are-read",  # a second model and optimizer midway
        "one-block-copied-for-every-pass",  # several parameters are one in one process
        "bf16-gathered-before-the-update",  # weights that stay to the bit while one process moves them
        "pool-over-own-patches",  # parts of a mean
        "tp-padding-known-to-one-rank",  # keys in sight of one rank's queries
        "balance-counts-of-the-tensor-group",  # numbers that a group's ranks have in common, beside other microbatches
        "columns-counted-from-the-own-first-patch",  # other places of a table
        "idle-expert-hands-in-its-last-buffer",  # tokens that both ranks have
        "memory-learns-from-one-decoder-layer",  # a part of what comes back to a stage
        "moments-read-in-the-order-of-names",
        "attention-summed-again-with-the-mlp",
        "average-of-weights-kept-in-bfloat16",  # a model that no optimizer steps
        "half-life-in-own-images",  # an average in a list
        "mean-teacher-of-rank-zero",  # a dict that one rank does not update
        "stopped-between-microbatches",  # gradients, lost at a resume
        "queue-of-own-keys",  # ranks that draw noise of their own
        "caution-averaged-over-own-piece",  # updates of other sizes on each rank
        "overlap-of-own-pictures",  # a loss of own rows that is no sum
        "strength-of-adapters-by-cut-rank",  # parameters of zeros, cut as their neighbours
        "spike-judged-on-rank-zero",  # a step that one process skips
        "recursive-block-in-two-copies",  # a parameter on two stages
        "assignments-balanced-at-home",  # rows that each count by another share
        "word2vec-rank-negatives",  # rows that ranks choose
        "sound-loss-averaged-by-a-collective",  # sums that cancel
        "prompts-before-a-frozen-stage",  # a parameter beside modules that gradients come back to
        "sound-average-on-rank-zero",
        "sound-convolution-as-a-product",  # weights of other dims
        "sound-cut-the-other-way-each-step",  # parameters that find a new place in each step
        "sound-joiner-with-everything",  # rows that a model is given twice, beside others
        "sound-pieces-of-four-read-by-two",  # a second model, and updates by hand of gradients that nobody reduced
        "sound-sparse-table-gradients",
        "sound-teacher-has-a-rank-to-itself",  # a rank that never steps
        "sound-weights-stored-at-half-their-size",
    ],
)
def test_our_judge_is_right_about_a_case(name: str):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    words = [sys.executable, "-m", "silent100", "--only", name, "meshwright"]
    done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert f"{name}: right" in done.stdout, done.stdout + done.stderr
