"""A run that cannot fit is refused before it starts, with a change that fits; one that can is never refused."""

from __future__ import annotations

import re
from dataclasses import replace
from unittest.mock import patch

import pytest

from meshwright.cli.main import main
from meshwright.core.devices import device_memory
from meshwright.core.errors import ConfigError
from meshwright.distributed.memory.dry_run import estimate_memory
from meshwright.introspection.cluster import Cluster
from meshwright.introspection.facts import ModelFacts, model_facts
from meshwright.introspection.source import as_module
from meshwright.models.decoder_config import SIZES
from meshwright.planning import memory as bounds
from meshwright.planning.build import plan
from meshwright.planning.layout import Layout
from meshwright.planning.memory import (
    MemoryEstimate,
    MemoryUse,
    RankMemory,
    bytes_at_least,
    bytes_at_most,
    bytes_of_states,
)
from meshwright.planning.plan import Plan
from meshwright.planning.values import Batch
from meshwright.training import capacity as capacity_module
from meshwright.training import memory as host
from meshwright.training.build import estimated_memory
from meshwright.training.capacity import Capacity, Fit, judge, nearest_that_fits, refuse_too_large, whether_it_fits
from meshwright.training.config import Config

MODEL = replace(SIZES["debug"], n_layers=4, vocab_size=300)
FACTS = model_facts(as_module(MODEL))
BYTES = 4 * FACTS.numel
IN_BLOCKS = sum(p.numel for p in FACTS.parameters if p.name.startswith("layers.")) / FACTS.numel
SHARDED = ("--layout.dp_replicate=1", "--layout.dp_shard=-1", "--techniques.activation_checkpointing=full")
BATCH = Batch(16, 128, 0, 300)
ONE = Layout(dp_shard=1)
FLAGS = "--model.size=debug --data.seq_len=64 --batch.global_batch=256 --steps=1".split()


def planned(layout: Layout = ONE, batch: Batch = BATCH, device: str = "cpu", **techniques):
    return plan(FACTS, layout, batch=batch, cluster=Cluster(layout.world, device=device), techniques=techniques)


UNKNOWN = MemoryEstimate((), "not estimated")


def by_dry_run(config: Config, made: Plan, batch: Batch) -> MemoryEstimate:
    return estimated_memory(config, FACTS, made, batch)


def judged(made: Plan, capacity: Capacity, *, batch: Batch = BATCH, **options):
    return judge(FACTS, made, batch, capacity, lambda: estimate_memory(FACTS, made, batch), **options)


def estimate_of(**most: int) -> MemoryEstimate:
    """An estimate whose kinds are all at their most at one time, but for what is in host memory."""
    held = {MemoryUse[name.upper()]: size for name, size in most.items()}
    peak = {kind: size for kind, size in held.items() if kind is not MemoryUse.HOST}
    return MemoryEstimate((RankMemory(held, peak),))


def on_host(size: float, ranks: int = 1) -> Capacity:
    return Capacity("cpu", None, int(size), ranks)


@pytest.fixture(autouse=True)
def _without_libraries(monkeypatch):
    """Small models fill the memory of these tests: libraries would outweigh them. Tensors alone are counted."""
    monkeypatch.setattr(capacity_module, "LIBRARIES", 0)
    monkeypatch.setattr(bounds, "LOST_BY_ALLOCATOR", 0.0)


# --- what a host has


@pytest.mark.parametrize(
    ("membership", "files", "limit"),
    [
        ("0::/job/step\n", {"job/memory.max": "5000", "job/step/memory.max": "max"}, 5000),
        ("0::/job/step\n", {"job/memory.max": "5000", "job/step/memory.max": "3000"}, 3000),
        ("0::/elsewhere\n", {"memory.max": "7000"}, 7000),
        ("0::/\n", {"memory.max": "max"}, None),
        ("4:memory:/docker/a\n3:cpu,cpuacct:/x\n", {"memory/docker/a/memory.limit_in_bytes": "9000"}, 9000),
        ("4:cpu:/docker/a\n", {"memory/docker/a/memory.limit_in_bytes": "9000"}, None),
    ],
)
def test_a_control_group_limits_the_memory_of_a_host(tmp_path, membership, files, limit):
    (tmp_path / "membership").write_text(membership)
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text)
    assert host.control_group_limit(tmp_path / "groups", tmp_path / "membership") == limit
    assert host.control_group_limit(tmp_path / "groups", tmp_path / "absent") is None


def test_a_host_has_what_its_control_group_allows_and_its_swap(monkeypatch):
    import psutil

    swap = psutil.swap_memory().total
    monkeypatch.setattr(host, "control_group_limit", lambda: 1000)
    assert host.host_memory() == 1000 + swap
    monkeypatch.setattr(host, "control_group_limit", lambda: None)
    assert host.host_memory() == psutil.virtual_memory().total + swap
    assert device_memory("cpu") is None


# --- bounds


@pytest.mark.parametrize(
    ("layout", "techniques", "times"),
    [
        (Layout(dp_shard=1), {}, 4),
        (Layout(dp_shard=4), {}, 1),
        (Layout(dp_shard=1), {"freeze": [r"layers\."]}, 4 - 3 * IN_BLOCKS),
        (Layout(dp_shard=1), {"optimizer": "sgd"}, 3),
    ],
)
def test_model_states_bound_a_rank_from_below(layout, techniques, times):
    """AdamW in float32: weight, gradient and two moments; of shards also the whole gradients of one block."""
    batch = replace(BATCH, microbatch_rows=16 // layout.world)
    (least,) = bytes_of_states(planned(layout, batch, **techniques), batch)
    assert 0.97 * times * BYTES < least.host <= 1.2 * times * BYTES and least.device == 0


def test_offloaded_states_are_the_hosts_and_activations_the_devices():
    estimate = estimate_of(activations=1000, logits=500, host=4 * BYTES)
    offloaded = planned(device="cuda", cpu_offload=True)
    (states,) = bytes_of_states(offloaded, BATCH)
    (least,) = bytes_at_least(offloaded, estimate)
    (most,) = bytes_at_most(offloaded, estimate)
    assert states.device == 0 and 3.9 * BYTES < states.host <= least.host == 4 * BYTES < most.host
    assert 1400 < least.device < 1500 < most.device
    (state,) = bytes_of_states(planned(device="cuda", cpu_offload="optimizer"), BATCH)
    assert state.host == pytest.approx(2 * BYTES, rel=0.01) and state.device < 4 * BYTES


def test_an_upper_bound_has_what_an_allocator_loses(monkeypatch):
    (tensors,) = bytes_at_most(planned(), estimate_of(activations=1000))
    monkeypatch.setattr(bounds, "LOST_BY_ALLOCATOR", 0.2)
    assert bytes_at_most(planned(), estimate_of(activations=1000))[0].host == int(1.2 * tensors.host)


def test_an_estimate_bounds_a_step_on_both_sides():
    estimate = estimate_of(parameters=1000, gradients=1000, optimizer=2000, activations=5000, logits=1000)
    (least,), (most,) = bytes_at_least(planned(), estimate), bytes_at_most(planned(), estimate)
    assert least.host == 9700 and most.host == 10300 and least.device == most.device == 0
    assert least.parts["activations"] == 5000 and sum(least.parts.values()) == 10000
    (first,) = bytes_at_least(planned(), estimate, optimizer=False)  # there is no optimizer state yet
    assert first.host == 0.97 * 8000 and "optimizer" not in first.parts
    (capped,) = bytes_at_least(planned(), estimate, activations=1500.0)
    assert capped.host == int(0.97 * 5500) and not capped.parts
    (compiled,) = bytes_at_least(planned(), replace(estimate, least=(6000,)))
    assert compiled.host == 0.97 * 6000


def states_on(made, capacity: Capacity) -> Fit:
    return judge(FACTS, made, BATCH, capacity, lambda: UNKNOWN).verdict


def test_ranks_of_one_host_share_its_memory_and_stages_count_apart():
    pipeline = planned(Layout(pp=4, dp_shard=1))
    ranks = bytes_of_states(pipeline, BATCH)
    together = sum(one.host for one in ranks)
    assert len({one.host for one in ranks}) > 1
    assert states_on(pipeline, on_host(together - 1, 4)) is Fit.TOO_LARGE
    assert states_on(pipeline, on_host(together + 1, 4)) is not Fit.TOO_LARGE
    # two of four ranks: which ones is not known, so the smallest count
    least = 2 * min(one.host for one in ranks)
    assert states_on(pipeline, on_host(least + 1, 2)) is not Fit.TOO_LARGE
    assert states_on(pipeline, on_host(least - 1, 2)) is Fit.TOO_LARGE


def test_states_that_some_weights_never_have_refuse_nothing():
    """Of a tower's last layer LLaVA uses nothing, and a condition may leave others out: no gradients, no moments."""
    (states,) = bytes_of_states(made := planned(), BATCH)
    short, found = on_host(0.95 * states.host), estimate_of(parameters=BYTES, gradients=BYTES)
    assert judge(FACTS, made, BATCH, short, lambda: found).verdict is Fit.TOO_LARGE
    may_be_idle = patch("meshwright.training.capacity.may_be_idle", return_value={"head.weight"})
    for without_gradient in (patch.object(ModelFacts, "images", object()), may_be_idle):
        with without_gradient:
            assert judge(FACTS, made, BATCH, short, lambda: found).verdict is Fit.FITS


@pytest.mark.parametrize("tokens", [BATCH.seq_len // 2, BATCH.seq_len])
def test_a_sample_of_more_tokens_than_half_a_microbatch_is_said_to_be_left_out(tokens):
    config, rows = Config.from_dict({"sample": {"tokens": tokens}}), replace(BATCH, microbatch_rows=1)
    said = f"a sample of sample.tokens = {tokens} may need more" in "".join(by_dry_run(config, planned(), rows).notes)
    assert said == (2 * tokens > BATCH.seq_len)


def test_a_rank_is_judged_by_its_own_device():
    pipeline = planned(Layout(pp=2, dp_shard=1), device="cuda")
    first, last = (one.device for one in bytes_of_states(pipeline, BATCH))
    small = Capacity("cuda", min(first, last), 1 << 40, 2, rank=0 if first < last else 1)
    assert first != last and states_on(pipeline, small) is not Fit.TOO_LARGE
    assert states_on(pipeline, replace(small, rank=1 - small.rank)) is Fit.TOO_LARGE


@pytest.mark.all
def test_verdicts():
    sure = judged(planned(), on_host(1 << 40), fully=True)
    assert sure.verdict is Fit.FITS and sure.most is not None and sure.least.bytes < sure.most.bytes
    between = (sure.least.bytes + sure.most.bytes) // 2
    assert judged(planned(), on_host(between), fully=True).verdict is Fit.UNSURE
    assert judged(planned(), on_host(sure.least.bytes - 1)).verdict is Fit.TOO_LARGE
    assert judged(planned(), on_host(sure.most.bytes)).verdict is Fit.FITS


def test_nothing_is_refused_for_activations_that_are_unknown():
    states = bytes_of_states(planned(), BATCH)[0].host
    assert states_on(planned(), on_host(states + 1)) is Fit.UNSURE
    assert states_on(planned(), on_host(states - 1)) is Fit.TOO_LARGE


def test_a_dry_run_is_made_only_where_the_answer_needs_it():
    def refuse() -> MemoryEstimate:
        raise AssertionError("a dry run")

    states = bytes_of_states(planned(), BATCH)[0].host
    assert judge(FACTS, planned(), BATCH, on_host(64e9), refuse).verdict is not Fit.TOO_LARGE
    assert judge(FACTS, planned(), BATCH, on_host(states - 1), refuse).verdict is Fit.TOO_LARGE
    with pytest.raises(AssertionError):
        judge(FACTS, planned(), BATCH, on_host(4 * states), refuse)


def test_a_device_counts_what_its_kernels_may_not_keep():
    """Attention whose probabilities the CPU keeps may keep none of them on a device."""
    keeps = estimate_of(activations=1 << 40)
    on_device = Capacity("cuda", 1 << 30, 1 << 40, 1)
    on_cuda = planned(device="cuda")
    assert judge(FACTS, on_cuda, BATCH, on_device, lambda: keeps, fully=True).verdict is Fit.UNSURE
    assert judge(FACTS, planned(), BATCH, on_host(1 << 30), lambda: keeps, fully=True).verdict is Fit.TOO_LARGE


# --- the nearest change


def config(layout: Layout, **changes: object) -> Config:
    made = Config.from_dict({"model": {"size": "debug"}})
    techniques = replace(made.techniques, **changes)  # type: ignore[arg-type]
    return replace(made, layout=layout, techniques=techniques, batch=replace(made.batch, global_batch=16))


@pytest.mark.all
@pytest.mark.parametrize(
    ("layout", "device", "share", "proposed"),
    [
        (Layout(dp_shard=1), "cpu", 0.7, ("--batch.microbatch=8",)),
        (Layout(dp_shard=1), "cpu", 0.25, ("--batch.microbatch=2",)),
        (Layout(dp_replicate=4, dp_shard=1), "cuda", 3.2 * BYTES, SHARDED),
    ],
)
def test_the_nearest_change_is_legal_and_fits(layout, device, share, proposed, monkeypatch):
    monkeypatch.setattr(capacity_module, "LIBRARIES_OF_DEVICES", 0)
    batch = BATCH if device == "cpu" else replace(BATCH, microbatch_rows=1)
    made, cluster = planned(layout, batch, device), Cluster(layout.world, device=device)
    whole = judged(made, on_host(1 << 50), batch=batch, fully=True).most
    assert whole is not None
    size = int(share * whole.bytes if device == "cpu" else share)
    here = on_host(size) if device == "cpu" else Capacity(device, size, 1 << 40, layout.world)
    asked = replace(config(layout), batch=replace(config(layout).batch, microbatch=batch.microbatch_rows))
    found = nearest_that_fits(asked, FACTS, made, batch, cluster, here, by_dry_run)
    assert found is not None and found.judgement.verdict is Fit.FITS
    assert found.judgement.most is not None and found.judgement.most.bytes <= size
    assert found.flags == proposed and found.ranks == 0


@pytest.mark.all
def test_more_ranks_are_proposed_where_nothing_else_fits_and_nothing_where_they_do_not():
    made, cluster = planned(), Cluster(1)
    asked = replace(config(Layout(dp_shard=1)), batch=replace(config(Layout()).batch, global_batch=16))
    found = nearest_that_fits(asked, FACTS, made, BATCH, cluster, on_host(2.6 * BYTES), by_dry_run)
    assert found is not None and found.ranks > 1 and f"{found.ranks} ranks, 1 on a host, with --" in str(found)
    assert nearest_that_fits(asked, FACTS, made, BATCH, cluster, on_host(0.05 * BYTES), by_dry_run) is None


# --- the command


@pytest.fixture
def refused(monkeypatch, capsys, tmp_path):
    """Train with so many bytes of memory in the host; the exit status and what was said."""
    monkeypatch.chdir(tmp_path)

    def train(size: float, *flags: str) -> tuple[int, str]:
        monkeypatch.setattr(capacity_module, "host_memory", lambda: int(size))
        status = main(["train", *FLAGS, "--process.count=1", "--sample.tokens=0", *flags])
        return status, capsys.readouterr().err

    return train


@pytest.mark.all
def test_a_run_that_cannot_fit_is_refused_before_anything_starts(refused, tmp_path):
    status, error = refused(32e6)
    assert status == 2 and not list(tmp_path.iterdir()) and "Traceback" not in error
    assert re.search(
        r"does not fit: it needs at least \d+ MiB of the memory of this host \(parameters .*, activations .*\), which"
        r" has 30\.5 MiB\. Nearest change that fits, with about [\d.]+ MiB: --batch.microbatch=\d+\."
        r" process.check_memory = false starts it",
        error,
    )
    change = re.search(r"--batch.microbatch=\d+", error)
    assert change is not None
    status, error = refused(32e6, change[0])
    assert status == 0, error


def test_the_check_can_be_switched_off(refused):
    status, error = refused(1e6, "--process.check_memory=false", "--batch.global_batch=4")
    assert status == 0, error


def test_states_without_momentum_are_not_counted():
    asked = config(Layout(dp_shard=1))
    asked = replace(asked, optimizer=replace(asked.optimizer, kind="sgd"))
    made = planned(optimizer="sgd")
    with_momentum = bytes_of_states(made, BATCH)[0].host
    assert with_momentum > 1.4 * bytes_of_states(made, BATCH, state_tensors=0)[0].host
    plain = replace(asked, optimizer=replace(asked.optimizer, beta1=0.0))

    def unknown(*_: object) -> MemoryEstimate:
        return UNKNOWN

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capacity_module, "host_memory", lambda: with_momentum - 1)
        refuse_too_large(plain, FACTS, made, BATCH, Cluster(1), unknown)
        with pytest.raises(ConfigError, match="does not fit"):
            refuse_too_large(asked, FACTS, made, BATCH, Cluster(1), unknown)


# --- plan


@pytest.fixture
def planned_line(monkeypatch, capsys):
    """The line below the memory of ``meshwright plan``, in a host of so many bytes."""
    from meshwright.cli import plan as verb

    def line(size: float, *flags: str) -> str:
        monkeypatch.setattr("meshwright.training.memory.host_memory", lambda: int(size))
        assert verb.run([*FLAGS, *flags]) == 0
        memory = capsys.readouterr().out.partition("\nmemory of")[2].partition("\n\n")[0]
        return memory.splitlines()[-1].strip()

    return line


@pytest.mark.first
@pytest.mark.parametrize(
    ("size", "flags", "says"),
    [
        (64e9, ["--world=1"], r"fits this host: at most [\d.]+ MiB, libraries included, 59.6 GiB there"),
        (40e6, ["--world=1"], r"does not fit this host: at least [\d.]+ MiB, 38.1 MiB there"),
        (254 << 20, ["--world=1"], r"may not fit this host: between [\d.]+ MiB and [\d.]+ MiB, 254 MiB there"),
        (64e9, ["--process.count=4"], r"fits this host: at most [\d.]+ MiB for 4 ranks, .*"),
        (64e9, ["--world=4"], r"fits this host: at most [\d.]+ MiB for 1 of 4 ranks, .*"),
        (64e9, ["--world=4", "--per-node=2"], r"fits this host: at most [\d.]+ MiB for 2 of 4 ranks, .*"),
        (254 << 20, ["--world=1", "--techniques.compile=true"], r"may not fit this host: between .*"),
        (64e9, ["--world=1", "--device=cuda"], r"together .*"),
    ],
)
def test_the_plan_says_whether_it_fits_this_machine(planned_line, size, flags, says):
    assert re.fullmatch(says, planned_line(size, *flags)), planned_line(size, *flags)


def test_the_plan_says_that_activations_are_unknown():
    line = whether_it_fits(FACTS, planned(), BATCH, on_host(64e9), UNKNOWN)
    assert re.fullmatch(r"  this host: at least .*; with activations, which are unknown, it may not fit", line)
