"""generate, inspect and plan, on the folder of a real run and on nonsense."""

from __future__ import annotations

import json
import shutil

import pytest
import torch.distributed as dist
from e2e_runs import Job, metrics, tree

from meshwright.planning.plan import Plan
from meshwright.training.views.telling import ClosingReport

pytestmark = pytest.mark.all


@pytest.fixture(scope="module")
def told(pool, tiny, tmp_path_factory):
    """A run of two ranks and three steps, as rank 0 told it."""
    config = tiny | {"model.size": "debug", "out": str(tmp_path_factory.mktemp("out")), "steps": 3}
    config |= {"sample.tokens": 30, "sample.prompt": "def ", "checkpoint.every": 2, "validation.every": 3}
    return pool.run(Job(config), world=2, timeout=60)[0]


@pytest.fixture
def run(told, tmp_path):
    """A copy of its folder."""
    return shutil.copytree(told.folder, tmp_path / "a run")


def test_generate_repeats_the_sample_of_the_run_and_follows_seed_and_temperature(ask, run, told):
    before = tree(run)

    def text(*flags):
        status, out, err = ask("generate", run, *flags)
        assert (status, err) == (0, "")
        return out.removesuffix("\n")

    report = ClosingReport(run, 3, 3, 1.0, sample=text()).text()
    assert report[report.index("\nsample\n") :] in told.out
    by_default = text("--tokens=20")
    assert (
        by_default.startswith("def ")
        and text("--tokens", "20", "--seed=0", "--temperature=0.8", "--step=3") == by_default
    )
    assert text("--tokens=20", "--seed=1") != by_default and text("--tokens=20", "--step=2") != by_default
    likeliest = text("--tokens=20", "--temperature=0")
    assert likeliest == text("--tokens=20", "--temperature=0", "--seed=5") and likeliest != by_default
    assert text("--prompt", "the mesh", "--tokens=0") == "the mesh"
    assert tree(run) == before


@pytest.mark.first('words4-tokens = "many" is text; expected a whole number')
@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "needs the folder of a run"),
        (["{run}", "--prompt="], "the prompt is empty"),
        (["{run}", "--prompt"], "--prompt needs a value"),
        (["{run}", "--promt=a"], "does not know '--promt=a'"),
        (["{run}", "--tokens=many"], 'tokens = "many" is text; expected a whole number'),
        (["{run}", "--temperature=nan"], "--temperature = nan is out of range"),
        (["{run}", "--temperature=-1"], "--temperature = -1.0 is out of range"),
        (["{run}", f"--seed={2**64}"], "is out of range: it must be from 0 to 2**63 - 1"),
        (["{run}", "--step=7"], "has no checkpoint of step 7; steps that are there: 2, 3"),
    ],
)
def test_generate_refuses_what_it_cannot_do(ask, run, words, complaint):
    status, out, err = ask("generate", *(word.format(run=run) for word in words))
    assert (
        (status, out) == (2, "") and err.startswith("meshwright: ") and complaint in err and len(err.splitlines()) == 1
    )


def test_a_run_without_a_checkpoint_or_a_config_is_refused(ask, run):
    shutil.rmtree(run / "checkpoints")
    assert ask("generate", run) == (2, "", f"meshwright: {run} has no checkpoint; steps that are there: none\n")
    (run / "config.toml").unlink()
    for verb in ("generate", "inspect"):
        status, _, err = ask(verb, run)
        assert status == 2 and "without a config.toml, so it is no run" in err


def test_inspect_tells_what_a_run_holds_and_what_is_wrong_with_it(ask, run):
    before = tree(run)
    status, out, _ = ask("inspect", run)
    last = metrics(run)[-1]
    assert status == 0 and tree(run) == before
    assert (
        f"step 3 of 3, {last['tokens']} tokens, loss {last['loss']:.4f}, validation loss {last['validation_loss']:.4f}"
        in out
    )
    assert "step-00000002: 25 parameters and buffers" in out and out.count("(latest)") == 1
    assert str(Plan.from_json((run / "plan.json").read_text())) in out

    shutil.copytree(run / "checkpoints/step-00000003", run / "checkpoints/step-00000004.partial")
    (run / "checkpoints/step-00000002/manifest.json").unlink()
    (run / "checkpoints/latest").write_text("step-00000099\n")
    status, out, _ = ask("inspect", run)
    assert status == 0 and "step-00000004.partial: an interrupted save, never used" in out
    assert (
        "step-00000002: " in out
        and "its writing was never finished" in out
        and "names step-00000099, which is gone" in out
    )


def test_inspect_knows_the_sizes_and_nothing_else(ask):
    status, out, _ = ask("inspect", "8B")
    assert status == 0 and "8,030,261,248 parameters" in out and "layers.* (32)" in out
    status, out, err = ask("inspect", "8b")
    assert (status, out) == (2, "") and "Did you mean '8B'?" in err
    assert ask("inspect", "nonsense")[0] == 2


def test_plan_needs_no_gpu_no_process_group_and_no_data(ask):
    words = (
        "plan --world 64 --model.size=8B --model.vocab_size=128256 --data.seq_len=8192 --data.source nowhere".split()
    )
    status, out, err = ask(
        *words, "--batch.global_batch=64", "--layout.dp_replicate=8", "--layout.dp_shard=8", "--device=cuda"
    )
    assert (status, err) == (0, "") and not dist.is_initialized()
    assert "8.03B parameters on 64 ranks (cuda), mesh dp_replicate=8 × dp_shard=8" in out and "compute bfloat16" in out

    status, out, err = ask(*words, "--json")
    made = Plan.from_json(out)
    assert (status, err, made.world, dict(made.mesh)["dp_shard"]) == (0, "", 64, 64)
    assert json.loads(made.to_json()) == json.loads(out)

    # the plan holds for any batch: it is shown before this one is refused
    status, out, err = ask(*words, "--batch.global_batch=32")
    assert (
        status == 2 and "on 64 ranks" in out and "batch.global_batch = 32 rows do not divide over 64 data ranks" in err
    )


def test_plan_of_a_run_is_the_plan_that_the_run_wrote(ask, run):
    status, out, _ = ask("plan", run, "--world=2", "--json")
    assert status == 0 and Plan.from_json(out).diff(Plan.from_json((run / "plan.json").read_text())) == []
    status, out, _ = ask("plan", run, "--world=4", "--json")
    assert "mesh[2][1]: 4 -> 2" in Plan.from_json(out).diff(Plan.from_json((run / "plan.json").read_text()))


@pytest.mark.first
@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--world=0"], "--world = 0"),
        (["--world=-4"], "--world = -4"),
        (["--world", "four"], 'world = "four" is text; expected a whole number'),
        (["--per-node=0"], "--per-node = 0"),
        (["--device=tpu"], "--device = 'tpu' is none of cpu, cuda"),
        (["--world=6", "--layout.dp_shard=4"], "world size 6"),
        (["--jsn"], "unknown key 'jsn'"),
    ],
)
def test_plan_refuses_a_cluster_that_cannot_be(ask, words, complaint):
    status, out, err = ask("plan", *words)
    assert (status, out) == (2, "") and err.startswith("meshwright: ") and complaint in err
