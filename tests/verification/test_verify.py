"""verify: equal layouts are called equal; each fault of the gallery is found, and found in the right place."""

from __future__ import annotations

import itertools
import json
import statistics
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support import families
from support.problems import TIED, UNTIED
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.comparison.equality import Comparison, Difference
from meshwright.core.errors import ConfigError, IntegrityError
from meshwright.distributed.process.world import get_world_info
from meshwright.models.decoder_config import DecoderConfig
from meshwright.planning.layout import Layout
from meshwright.verification.problem import Problem, RandomBatches
from meshwright.verification.verify import Report, coverage_of, default_batches, verify

pytestmark = pytest.mark.all

DDP, FSDP, HSDP = Layout(dp_replicate=2, dp_shard=1), Layout(dp_shard=2), Layout(dp_replicate=2, dp_shard=2)
BATCHES = RandomBatches(257, rows=8, seq_len=10)


@pytest.mark.parametrize("layout", [DDP, FSDP, HSDP], ids=str)
@pytest.mark.parametrize(
    "changes", [{}, {"microbatch_rows": 1}, {"techniques": {"activation_checkpointing": "full"}}], ids=str
)
def test_a_layout_that_is_equal_is_called_equal(pool, layout, changes):
    report = verify(TIED, layout, BATCHES, steps=2, pool=pool, **changes)
    assert report, report
    stages = {d.stage for d in report.comparisons[0].differences}
    recomputed = {"recomputed"} if "techniques" in changes else set()
    assert (
        stages
        == {"initial weight", "forward", "loss", "backward", "gradient", "norm", "parameter", "optimizer"} | recomputed
    )
    modules = {d.name for d in report.comparisons[0].differences if d.stage == "backward"}
    assert {"layers.0.attention", "layers.2.feed_forward.w_down", "head", ""} <= modules


def test_the_report_says_it_to_people_and_to_machines(pool):
    report = verify(UNTIED, FSDP, BATCHES, steps=1, dtypes=("float64",), pool=pool)
    assert str(report).startswith("dp_shard=2: equal within rounding (") and "gradient   equal" in str(report)
    told = json.loads(report.to_json())
    assert (
        told["equal"]
        and told["comparisons"][0]["dtype"] == "float64"
        and len(told["comparisons"][0]["differences"]) > 100
    )


ALL = "the gradient of the parameter embedding.weight, after the backward"
GALLERY = {
    "per_rank_mean": (UNTIED, FSDP, {}, "the loss of step 1"),
    "mean_of_microbatch_means": (UNTIED, FSDP, {"microbatch_rows": 1}, "the loss of step 1"),
    "averaged_gradients": (UNTIED, FSDP, {}, ALL),
    "same_batch_on_every_rank": (UNTIED, FSDP, {}, "the output of embedding (forward), on rank 1"),
    "frozen_parameter_trained": (
        UNTIED,
        DDP,
        {"techniques": {"freeze": ("wq",)}},
        ALL.replace("embedding", "layers.0.attention.wq"),
    ),
    "ddp_hook_without_sum": (UNTIED, DDP, {}, ALL),
    "divide_factor_on_the_root_only": (UNTIED, FSDP, {}, ALL.replace("embedding", "layers.0.attention_norm")),
    "untied": (TIED, DDP, {}, "the initial weight head.weight"),
    "clipped_by_the_local_norm": (UNTIED, FSDP, {}, "the gradient norm of step 1"),
    "last_microbatch_unsynced": (UNTIED, FSDP, {"microbatch_rows": 1}, ALL),
    "synced_gradients_summed_again": (
        UNTIED,
        DDP,
        {"microbatch_rows": 1, "techniques": {"sync_grad_accum": True}},
        ALL,
    ),
    "documents_mixed": (UNTIED, FSDP, {}, "the output of layers.0.attention.core (forward)"),
    "positions_dropped": (UNTIED, FSDP, {}, "the output of layers.0.attention.core (forward)"),
    "loss_mask_dropped": (UNTIED, FSDP, {}, "the loss of step 1"),
    "padding_counted": (UNTIED, FSDP, {}, "the loss of step 1"),
    "stale_after_the_step": (
        UNTIED,
        FSDP,
        {"microbatch_rows": 1, "techniques": {"zero_stage": 1}},
        "the output of embedding (forward) of step 2",
    ),
    "shards_lost_between_microbatches": (UNTIED, FSDP, {"microbatch_rows": 1, "techniques": {"zero_stage": 2}}, ALL),
    "same_block_on_every_rank": (UNTIED, FSDP, {}, "the initial weight embedding.weight"),
}
"""Mutant -> the model, the layout and the circumstances in which it shows, and where it shows first."""


@pytest.mark.kills("verify", "name")
@pytest.mark.parametrize("name", GALLERY)
def test_a_fault_is_found_where_it_is(judged, name):
    model, layout, changes, where = GALLERY[name]
    problem = Problem(model, BATCHES, 2, max_norm=0.1, **changes)
    found = judged(problem, layout, name)
    first = found.first
    assert first is not None and first.place == where
    assert first.error > 1e4 * first.bound, "found by a hair"
    batch = BATCHES(0)
    real = int(((batch["labels"] != -100) & batch["loss_mask"]).sum())
    factor = {"averaged_gradients": 0.5, "padding_counted": real / batch["labels"].numel()}.get(name)
    assert found.factor == (pytest.approx(factor) if factor else None)
    assert judged(problem, layout).first is None


# --- somebody else's composition


def torchs_ddp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def even(step: int):
    """Every rank has as many real tokens as the others, and no documents: there the mean of means is the mean."""
    g = torch.Generator().manual_seed(step)
    return {key: torch.randint(0, 257, (4, 8), generator=g) for key in ("tokens", "labels")}


def off_by_a_little(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    model.get_parameter("layers.1.attention.wq.weight").data.add_(1e-7 * get_world_info()[0])
    return nn.parallel.DistributedDataParallel(model, init_sync=False)


def test_somebody_elses_composition_is_judged_by_what_it_computes(pool):
    report = verify(UNTIED, DDP, even, parallelize_fn=torchs_ddp, steps=2, pool=pool)
    assert report, report
    report = verify(UNTIED, DDP, BATCHES, parallelize_fn=torchs_ddp, steps=2, dtypes=("float64",), pool=pool)
    assert report and "compared with the mean of the 2 ranks' mean losses" in str(report), (
        "ranks have different numbers of tokens"
    )
    assert "covered: 2 steps of 8 rows of 10 tokens, with document_ids, loss_mask, positions" in str(report)
    report = verify(UNTIED, DDP, even, parallelize_fn=off_by_a_little, steps=2, dtypes=("float64",), pool=pool)
    assert "first differs at the initial weight layers.1.attention.wq.weight, on rank 1" in str(report), (
        "it is off by 1e-7"
    )


# --- what cannot be compared


class Unseeded(nn.Module):
    """Draws its weights from the clock."""

    vocab_size = 257

    def __init__(self):
        super().__init__()
        import time

        g = torch.Generator(device="cpu").manual_seed(time.monotonic_ns())
        self.embedding = nn.Embedding(257, 8, _weight=torch.randn(257, 8, generator=g, device="cpu"))

    def forward(self, tokens):
        return self.embedding(tokens) @ self.embedding.weight.T


class Infinite(Unseeded):
    def __init__(self):
        super().__init__()
        self.embedding.weight.data.fill_(float("inf"))


@pytest.mark.first
@pytest.mark.parametrize(
    ("model", "layout", "batches", "error", "words"),
    [
        (
            Unseeded,
            DDP,
            even,
            IntegrityError,
            r"different weights \(first: embedding.weight\).*Seed it inside the factory",
        ),
        (Infinite, DDP, even, ConfigError, "the loss of step 1 is nan in one process already"),
        (
            UNTIED,
            Layout(dp_shard=3),
            even,
            ConfigError,
            "the batch has 4 rows, which 3 ranks cannot share: give a multiple of 3, like 6",
        ),
        (UNTIED, Layout(dp_shard=-1), even, ConfigError, "open size"),
        ("support.problems:NOTHING", DDP, even, ConfigError, "cannot import 'support.problems:NOTHING'"),
    ],
)
def test_refusals_teach(pool, model, layout, batches, error, words):
    with pytest.raises(error, match=words):
        verify(model, layout, batches, steps=1, pool=pool)


@st.composite
def cases(draw):
    kv_heads, group, head_dim = draw(st.integers(1, 2)), draw(st.integers(1, 3)), 2 * draw(st.integers(1, 4))
    heads = kv_heads * group
    model = DecoderConfig(
        draw(st.integers(3, 90)),
        heads * head_dim,
        draw(st.integers(1, 3)),
        heads,
        kv_heads,
        hidden_dim=draw(st.integers(1, 30)),
        max_seq_len=24,
        qk_norm=draw(st.booleans()),
        tied_embeddings=draw(st.booleans()),
    )
    batches = RandomBatches(
        model.vocab_size,
        rows=4 * draw(st.integers(1, 2)),
        seq_len=draw(st.integers(1, 18)),
        seed=draw(st.integers(0, 9)),
    )
    techniques = {"freeze": draw(st.sampled_from([(), ("wq|w_down",), ("layers.0",)]))}
    techniques["activation_checkpointing"] = draw(st.sampled_from(["none", "full", "selective"]))
    return draw(st.sampled_from([DDP, FSDP, HSDP])), model, batches, draw(st.sampled_from([0, 1])), techniques


@settings(
    max_examples=8,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=[Phase.generate],
)
@given(cases())
def test_any_legal_case_is_equal(pool, case):
    layout, model, batches, microbatch_rows, techniques = case
    report = verify(
        model,
        layout,
        batches,
        steps=2,
        microbatch_rows=microbatch_rows,
        techniques=techniques,
        dtypes=("float64",),
        pool=pool,
    )
    assert report, f"{case}\n{report}"


# --- what a model may do


class Odd(nn.Module):
    """Calls one module twice, adds a table without rows, and returns a tuple."""

    vocab_size = 257

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(257, 8)
        self.places = nn.Embedding(16, 8)
        self.twice = nn.Linear(8, 8)
        self.head = nn.Linear(8, 257)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.twice(torch.tanh(self.twice(x))))


class Centred(Odd):
    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(x - x.mean(0, keepdim=True))


def bent(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Rank 1 computes something else in the second call."""
    calls = itertools.count(1)

    def bend(module, args, output):
        return output * (1 + 1e-6) if next(calls) % 2 == 0 else output

    if get_world_info()[0] == 1:
        model.twice.register_forward_hook(bend)
    return nn.parallel.DistributedDataParallel(model)


def test_a_module_called_twice_is_compared_call_by_call(pool):
    report = verify(Odd, DDP, even, steps=1, pool=pool)
    assert report, report
    names = {d.name for d in report.comparisons[0].differences if d.stage == "forward"}
    assert {"twice", "twice (call 2)"} <= names and "places" not in names
    report = verify(Odd, DDP, even, steps=1, dtypes=("float64",), parallelize_fn=bent, pool=pool)
    assert not report and "the output of twice (call 2) (forward), on rank 1" in str(report)
    assert json.loads(report.to_json())["comparisons"][0]["first"]["name"] == "twice (call 2)"


@pytest.mark.first
def test_a_model_whose_rows_depend_on_each_other_is_refused_and_not_called_equal(pool):
    with pytest.raises(ConfigError, match="rows depend on each other, as a batch norm makes them"):
        verify(Centred, DDP, even, steps=1, pool=pool)


@pytest.mark.first
def test_what_is_missing_is_null_in_json_and_first_in_the_table():
    inf = float("inf")
    found = (
        Difference("gradient", "a", 1.0, 1e-10),
        Difference("gradient", "b", inf, 1e-10),
        Difference("gradient", "c", 1e-16, 1e-10),
    )
    report = Report(FSDP, (Comparison("float64", found),), 1.0)
    told = json.loads(report.to_json(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert told["comparisons"][0]["differences"][1]["error"] is None and not report
    assert [d.name for d in report.comparisons[0].of("gradient")] == ["b", "a", "c"] and "gradient   differs" in str(
        report
    )


@pytest.mark.parametrize("layout", [DDP, FSDP, HSDP], ids=str)
@pytest.mark.parametrize("model", [TIED, UNTIED], ids=["tied", "untied"])
def test_bfloat16_is_compared_with_bfloat16_by_what_it_loses(pool, layout, model):
    for rows in (0, 1):
        report = verify(model, layout, BATCHES, dtypes=("bfloat16",), microbatch_rows=rows, pool=pool)
        assert report, report
        bounds = [d.bound for d in report.comparisons[0].differences if d.stage == "gradient"]
        assert statistics.median(bounds) < 0.03, "bounds that wide catch nothing"


@pytest.mark.parametrize(
    "name", ["per_rank_mean", "averaged_gradients", "documents_mixed", "padding_counted", "clipped_by_the_local_norm"]
)
def test_a_fault_is_found_in_bfloat16_too(judged, name):
    first = judged(Problem(UNTIED, BATCHES, 2, dtype="bfloat16", optimizer="sgd", max_norm=0.1), FSDP, name).first
    assert first is not None and first.place == GALLERY[name][3]


# --- what was covered


def with_window(size: int) -> nn.Module:
    from transformers import AutoModelForCausalLM

    config = families.config_of("mistral", sliding_window=size)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.first
@pytest.mark.parametrize(("size", "tokens", "said"), [(20, 28, ""), (4096, 16, "; not reached: sliding_window = 4096")])
def test_rows_reach_beyond_a_window_or_it_is_said(size, tokens, said):
    factory = partial(with_window, size)
    batches = default_batches(factory, 2)
    assert batches.seq_len == tokens
    told = coverage_of(Problem(factory, batches))
    assert (
        told.startswith(f"covered: 3 steps of 4 rows of {tokens} tokens")
        and said in told
        and ("not reached" in told) == bool(said)
    )
