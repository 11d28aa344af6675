"""A run's first steps against a trace of one process: equal in every layout and precision.

Each fault is found where it is.
"""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path

import pytest
from e2e_runs import Job, metrics, nested
from support import mutants

from meshwright.cli.main import main
from meshwright.core.errors import ConfigError, IntegrityError
from meshwright.distributed import parallelize
from meshwright.training import build, trainer
from meshwright.training.config import Config
from meshwright.training.views.telling import build_progress
from meshwright.verification.of_config import write_trace

CONFIG = {"schedule.warmup_steps": 2, "optimizer.max_norm": 0.3, "model.tied_embeddings": True}
DDP, FSDP, HSDP = ({"layout.dp_replicate": r, "layout.dp_shard": s} for r, s in ((2, 1), (1, 2), (2, 2)))
PIPELINE, TENSOR, CONTEXT = ({"layout.dp_shard": 2, f"layout.{axis}": 2} for axis in ("pp", "tp", "cp"))
BF16 = {"techniques.precision.compute": "bfloat16"}


def world_of(changes: dict) -> int:
    return math.prod(size for key, size in changes.items() if key.startswith("layout."))


def write(changes: dict, path: str, steps: int) -> None:
    with build_progress(is_main=False) as progress:
        write_trace(Config.from_dict(nested(changes)), Path(path), steps, progress)


@pytest.fixture(scope="module")
def written(pool, tmp_path_factory):
    """``written(changes)``: the path of a trace of three steps."""
    known = {}

    def ask(changes: dict) -> str:
        key = json.dumps({key: value for key, value in changes.items() if key != "out"})
        if key not in known:
            known[key] = str(tmp_path_factory.mktemp("trace") / "reference.trace")
            pool.run(write, changes, known[key], 3, world=1, timeout=120)
        return known[key]

    return ask


@pytest.fixture
def small(small, tmp_path_factory):
    """The tiny config on questions and answers: rows of several documents, each with its own share of tokens without
    a loss.
    """
    path = tmp_path_factory.getbasetemp() / "questions.jsonl"
    draw = random.Random(0)
    rows = ({"prompt": "?" * draw.randint(1, 12), "completion": "yes " * draw.randint(1, 3)} for _ in range(200))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return lambda changes=None: small({"data.source": [str(path)], **(changes or {})})


@pytest.mark.first("{'layout.dp_shard': 2, 'layout.cp': 2}")
@pytest.mark.parametrize(
    "changes",
    [
        {"layout.dp_shard": 1},
        DDP,
        FSDP | {"batch.microbatch": 1},
        HSDP | {"techniques.activation_checkpointing": "full"},
        FSDP | {"techniques.cpu_offload": True},
        {"layout.dp_shard": 4} | BF16,
        DDP | BF16 | {"batch.microbatch": 2},
        HSDP | BF16,
        FSDP | {"techniques.compile": True, "techniques.compile_backend": "aot_eager"},
        PIPELINE,
        PIPELINE | BF16 | {"techniques.activation_checkpointing": "full"},
        TENSOR,
        TENSOR | {"techniques.sequence_parallel": False},
        CONTEXT,
        CONTEXT | {"layout.dp_shard": 1, "layout.tp": 2, "techniques.context_parallel_method": "ring"},
    ],
    ids=str,
)
def test_a_sound_run_is_equal_and_trains_on(spmd, small, written, changes):
    trace = written(small(CONFIG))
    done = spmd(world_of(changes), Job(small(CONFIG | changes | {"check_trace": trace})))[0]
    assert done.error is None, str(done.error)
    assert re.search(rf"trace {trace}: equal within rounding \(3 of 3 steps", done.out), done.out
    found = json.loads((done.folder / "trace_check.json").read_text())
    assert found["equal"] and found["dtype"] == ("bfloat16" if changes.keys() >= BF16.keys() else "float32")
    stages = {row["stage"] for row in found["differences"] if row["step"] == 3}
    assert stages == {"batch", "loss", "gradient", "norm", "parameter", "forward", "backward"}
    assert ("modules ranks have some features each" in done.out) == (changes.get("layout.tp", 1) > 1)
    assert ("modules inside compiled blocks were not seen" in done.out) == ("techniques.compile" in changes)
    assert len(metrics(done.folder)) == 6 and Config.from_toml(done.folder / "config.toml").check_trace == ""


@pytest.mark.all
@pytest.mark.parametrize("changes", [FSDP, TENSOR], ids=str)
def test_a_trace_is_of_the_optimizer_that_is_asked_for(spmd, small, written, changes):
    sgd = {"optimizer.kind": "sgd", "optimizer.lr": 0.05}
    trace = written(small(CONFIG | sgd))
    done = spmd(world_of(changes), Job(small(CONFIG | changes | sgd | {"check_trace": trace})))[0]
    assert done.error is None and "equal within rounding (3 of 3 steps" in done.out, str(done.error)
    other = {"optimizer.lr": 0.05, "check_trace": trace}
    refused = spmd(1, Job(small(CONFIG | other | {"layout.dp_shard": 1})))[0].error
    assert isinstance(refused, ConfigError) and "optimizer.kind was sgd and is now adamw" in str(refused), refused


def mutated(name: str, changes: dict):
    with getattr(mutants, name)(), mutants.unaudited(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "make_plan", parallelize.make_plan)  # a run makes its plan itself
        return Job(changes)()


GRADIENT = "the gradient of the parameter embedding.weight, after the backward"
FAULTS = [
    ("per_rank_mean", FSDP, "the loss of step 1"),
    ("averaged_gradients", FSDP, GRADIENT),
    ("same_batch_on_every_rank", DDP, "the output of embedding (forward)"),
    ("clipped_by_the_local_norm", FSDP, "the gradient norm of step 1"),
    ("documents_mixed", FSDP, "the output of layers.0.attention.core (forward)"),
    ("same_block_on_every_rank", FSDP, "the initial weight embedding.weight"),
    ("last_microbatch_unsynced", FSDP | {"batch.microbatch": 1}, GRADIENT),
    ("ddp_hook_without_sum", DDP, GRADIENT),
    ("averaged_gradients", FSDP | BF16, GRADIENT),
    ("documents_mixed", HSDP | BF16, "the output of layers.0.attention.core (forward)"),
    ("clipped_by_the_local_norm", FSDP | BF16, "the gradient norm of step 1"),
    ("documents_mixed", PIPELINE, "the output of layers.0.attention.core (forward)"),
    ("averaged_gradients", PIPELINE, GRADIENT),
]


@pytest.mark.kills("trace", "name")
@pytest.mark.parametrize(("name", "changes", "where"), FAULTS, ids=str)
def test_a_fault_ends_the_run_and_is_found_where_it_is(spmd, small, written, name, changes, where):
    trace = written(small(CONFIG))
    results = spmd(
        world_of(changes), mutated, name, small(CONFIG | changes | {"check_trace": trace, "checkpoint.every": 1})
    )
    for result in results:
        assert result.status == 1 and isinstance(result.error, IntegrityError)
        assert f"first differs at {where}: " in str(result.error), result.error
    halved = "every gradient is 0.5 × that of one process" in str(results[0].error)
    assert halved == (name == "averaged_gradients" and changes in (FSDP, PIPELINE))
    assert not list(results[0].folder.glob("checkpoints/*")), "a run that is wrong must save nothing"
    assert not json.loads((results[0].folder / "trace_check.json").read_text())["equal"]


def hooks(changes: dict) -> list[int]:
    """Hooks on the model's modules after every step."""
    counts = []
    step = trainer._Loop._one_step

    def counting(loop):
        report = step(loop)
        modules = [module for part in loop.r.model.parts for module in part.modules()]
        counts.append(sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules))
        return report

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer._Loop, "_one_step", counting)
        assert Job(changes)().error is None
    return counts


@pytest.mark.all
def test_afterwards_nothing_is_left_of_it(spmd, small, written):
    trace = written(small(CONFIG))
    plain, checked = (spmd(2, hooks, small(CONFIG | FSDP | more))[0] for more in ({}, {"check_trace": trace}))
    assert checked == plain


# --- refusals


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 1}, "is the trace of another run: seed was 0 and is now 1"),
        ({"optimizer.lr": 1e-4}, "optimizer.lr was 0.003 and is now 0.0001, learning_rates was"),
        ({"batch.global_batch": 16}, "batch.global_batch was 8 and is now 16"),
        ({"model.dim": 128}, "model.dim was 64 and is now 128"),
        ({"techniques.freeze": ["embedding"]}, "techniques.freeze was"),
        ({"techniques.precision.master": "float64"}, "precision.master was float32 and is now float64"),
        (
            {"techniques.precision.master": "float64", "techniques.precision.compute": "float32"},
            "precision.master was float32",
        ),
        ({"schedule.kind": "constant", "steps": 2, "schedule.warmup_steps": 1}, "learning_rates was"),
    ],
)
def test_a_trace_of_another_run_is_refused_before_a_folder_is_made(spmd, small, written, changes, words, tmp_path):
    result = spmd(
        1, Job(small(CONFIG | changes | {"check_trace": written(small(CONFIG)), "out": str(tmp_path / "none")}))
    )[0]
    assert isinstance(result.error, ConfigError) and words in str(result.error), result.error
    assert not (tmp_path / "none").exists()


def test_a_file_that_is_no_trace_is_refused(spmd, small, tmp_path):
    (tmp_path / "text.trace").write_text("no trace")
    for name, words in (("none.trace", "No such file"), ("text.trace", "check_trace = ")):
        result = spmd(1, Job(small({"check_trace": str(tmp_path / name)})))[0]
        assert (
            isinstance(result.error, ConfigError)
            and words in str(result.error)
            and "--write-trace" in str(result.error)
        )


@pytest.mark.all
def test_a_run_that_goes_on_is_not_compared_again_and_one_that_never_was_is_refused(spmd, small, written):
    trace = written(small(CONFIG))
    first = spmd(2, Job(small(CONFIG | FSDP | {"steps": 6, "check_trace": trace})))[0]
    more = spmd(2, Job({"steps": 8, "check_trace": trace}, str(first.folder)))[0]
    # another number of steps is another schedule; the trace is still that of its first steps where the rates are equal
    assert isinstance(more.error, ConfigError) and "learning_rates was" in str(more.error)
    again = spmd(2, Job({"check_trace": trace}, str(first.folder)))[0]
    assert again.error is None and "this run is complete" in again.out
    plain = spmd(2, Job(small(CONFIG | FSDP | {"schedule.kind": "constant", "steps": 4})))[0]
    constant = written(small(CONFIG | {"schedule.kind": "constant"}))
    late = spmd(2, Job({"steps": 6, "check_trace": constant}, str(plain.folder)))[0]
    assert isinstance(late.error, ConfigError) and "this run goes on from step 4; leave check_trace out" in str(
        late.error
    )
    known = spmd(2, Job(small(CONFIG | FSDP | {"schedule.kind": "constant", "steps": 4, "check_trace": constant})))[0]
    late = spmd(2, Job({"steps": 6, "check_trace": constant}, str(known.folder)))[0]
    assert late.error is None and "its first steps were compared with a trace already" in late.out


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--layout=dp_shard=2"], 2, "--layout and --write-trace are both given"),
        (["--shrink"], 2, "--shrink and --write-trace are both given"),
        (["--trace-steps=7"], 2, "--trace-steps = 7: the run has steps = 6"),
        (["--trace-steps=0"], 2, "--trace-steps = 0 is out of range: it must be 1 or more"),
        (
            ["--techniques.precision.master=bfloat16"],
            3,
            "techniques.precision.master = bfloat16: a trace is written for weights in",
        ),
        (
            ["--model.moe.batch-loss=0.01"],
            3,
            "model.moe.batch_loss depends on how a layout cuts batches into microbatches",
        ),
        (["--model.size=70B", "--model.vocab-size=128256"], 2, "3 steps in one process need about"),
        (
            ["--optimizer.lr=1e38", "--schedule.warmup-steps=0"],
            2,
            "in one process already: there is nothing to compare a run with",
        ),
    ],
)
def test_what_cannot_be_written_is_refused(flags, capsys, tmp_path, words, status, said):
    path = tmp_path / "reference.trace"
    found = main(["verify", "--write-trace", str(path), *flags(), *words])
    err = capsys.readouterr().err
    assert found == status and said in err and "Traceback" not in err
    assert not path.exists() and not list(tmp_path.glob("*.new-*"))


@pytest.mark.all
def test_the_commands_write_a_trace_and_check_a_run(meshwright, flags, tmp_path):
    path = tmp_path / "reference.trace"
    done = meshwright("verify", *flags(), "--write-trace", path, "--trace-steps", "2")
    assert (done.status, done.err) == (0, "") and f"wrote {path}" in done.out and "compare a run with it" in done.out
    done = meshwright("train", *flags({"process.count": 2}), "--check-trace", path)
    assert (done.status, done.err) == (0, "") and f"trace {path}: equal within rounding (2 of 2 steps)" in done.out
    missing = meshwright("verify", *flags(), "--write-trace", tmp_path / "none" / "reference.trace")
    assert missing.status == 2 and "there is no folder" in missing.err
