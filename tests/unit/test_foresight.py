"""Forecasts of steps: cards, links, the search against enumeration, and measurements that others published."""

from __future__ import annotations

import importlib
import json
import re
import statistics
import sys
import tomllib
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from support.forecasts import CONFIG

from benchmarks.published.rows import limited_to
from benchmarks.published.shapes import decoder_block
from meshwright.cli.main import main
from meshwright.core.errors import ConfigError
from meshwright.core.torch_private import TorchDispatchMode
from meshwright.distributed.memory.live import addresses, newly_made, tensors_in
from meshwright.distributed.nf4 import pack, unpack
from meshwright.planning.layout import Layout
from meshwright.planning.techniques import Techniques
from meshwright.simulation.answer import open_works, words
from meshwright.simulation.cards import Group, card_names, device, link_across, machines, sheets
from meshwright.simulation.job import Architecture, Execution, Job, even_cuts
from meshwright.simulation.search import FRONT, Pin, meshes, microbatches, recomputations, schedules, search
from meshwright.simulation.step_memory import block_activations, step_memory
from meshwright.simulation.step_time import UNPACKING, Cost, step_time
from meshwright.training.config import Config
from meshwright.training.throughput import peak_flops

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def job(gpus: int = 8, **layout: int) -> Job:
    block = decoder_block(2048, 16, 8, 5632)
    model = Architecture("small", (block,) * 8, 32_000)
    return Job(model, Layout(**{"dp_shard": gpus, **layout}), 2048, 32, 1, Execution(), machines("h100", gpus))


def test_every_card_has_a_source_and_all_figures():
    for name in card_names():
        card = device(name)
        assert (
            sheets()[name]["source"]
            and card.memory_bytes > 1e10
            and card.bandwidth > 1e11
            and card.speed(card.half) > 1e13
        )


@pytest.mark.parametrize(
    "name", ["V100", "A100", "H100", "H100 PCIe", "H100 NVL", "H200", "B200", "GB200", "L4", "L40S", "MI300X"]
)
def test_cards_have_the_peaks_by_which_runs_are_judged(name):
    card = device(name)
    assert card.flops[card.half] == peak_flops(f"NVIDIA {name}", card.half)


def test_recomputing_attention_modules_costs_more_and_saves_more_than_their_core():
    modes = [Execution(recompute=mode, attention="unfused") for mode in ("none", "core", "selective")]
    none, core, module = (replace(job(), execution=mode) for mode in modes)
    seconds = [step_time(one).seconds for one in (none, core, module)]
    sizes = [step_memory(one).activations for one in (none, core, module)]
    assert seconds == sorted(set(seconds)) and sizes == sorted(set(sizes), reverse=True)


@pytest.mark.parametrize(
    ("tp", "cuts_norms", "recompute", "each"),
    [
        (1, False, "none", lambda scores, t: 34 + scores),
        (8, False, "none", lambda scores, t: 10 + 24 / t + scores / t),
        (8, True, "none", lambda scores, t: 34 / t + scores / t),
        (8, True, "core", lambda scores, t: 34 / t),
    ],
)
def test_a_block_saves_what_the_paper_that_counted_it_says(tp, cuts_norms, recompute, each):
    """arXiv 2205.05198, equations 1 to 6: bytes over sequence, rows and features, with 5as/h of attention's scores."""
    heads, hidden, length, rows = 96, 12288, 2048, 2
    block = decoder_block(hidden, heads, heads, 4 * hidden, gated=False, dropout=True)
    run = Execution(attention="unfused", fused=True, sequence_parallel=cuts_norms, recompute=recompute)
    model, layout = Architecture("GPT", (block,), 51200), Layout(dp_shard=1, tp=tp)
    one = Job(model, layout, length, rows, rows, run, machines("a100", tp))
    scores = 5 * heads * length / hidden
    assert block_activations(block, one) == pytest.approx(length * rows * hidden * each(scores, tp))


def test_unpacking_weights_in_4_bits_takes_what_its_operators_read_and_write():
    class Moved(TorchDispatchMode):
        sizes = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            made, given = func(*args, **kwargs), tensors_in((args, kwargs))
            is_written = "out" in kwargs or newly_made(addresses(given), made)
            if is_written and func is not torch.ops.aten.empty_like.default:
                self.sizes += sum({id(tensor): tensor.nbytes for tensor in (*given, made)}.values())
            return made

    weight = torch.randn(512, 4096)
    packed = pack(weight)
    with Moved() as moved:
        unpack(packed, torch.bfloat16)
    assert moved.sizes / weight.numel() == pytest.approx(UNPACKING[0] + 2, rel=0.01)
    whole, each = job(), job().architecture.blocks[0].dense_elements * (UNPACKING[0] + 2)
    for recompute, passes in (("none", 2), ("full", 3)):
        plain, packs = (
            step_time(whole.with_execution(recompute=recompute, unpacked=unpacked)).costs[Cost.TRAFFIC]
            for unpacked in (0.0, 1.0)
        )
        microbatches, blocks = whole.microbatches, len(whole.architecture.blocks)
        seconds = whole.machines.device.traffic_s(each) * passes * blocks * microbatches
        assert packs - plain == pytest.approx(seconds, rel=0.02)


def test_products_never_beat_the_data_sheet_and_small_ones_are_slower():
    card = device("h100")
    large, small = (2.0 * n**3 / card.product_s(n, n, n, "bfloat16") for n in (8192, 512))
    assert small < large < card.flops["bfloat16"]
    odd = card.product_s(4096, 4092, 4096, "bfloat16")  # no multiple of 8: slower although it is less work
    assert odd > card.product_s(4096, 4096, 4096, "bfloat16")


def test_cards_with_less_power_compute_slower_and_move_as_fast():
    full = device("h100")
    less = limited_to(full, 500, 700)
    assert less.speed("bfloat16") / full.speed("bfloat16") == pytest.approx((500 / 700) ** 0.7)
    assert less.attention_s(1e15, "fused", backward=True, head_dim=128) > full.attention_s(
        1e15, "fused", backward=True, head_dim=128
    )
    assert less.traffic_s(1e9) == full.traffic_s(1e9)


def test_on_boards_without_a_switch_a_group_has_the_links_between_its_own():
    board, switched = machines("h200", 8, per_node=4), machines("h200", 4)
    seconds = [one.gather_s(1e10, Group(2)) for one in (board, switched)]
    assert seconds[0] / seconds[1] == pytest.approx(3, rel=0.01)  # one of three sixths of a device's links
    assert board.gather_s(1e10, Group(4)) == switched.gather_s(1e10, Group(4))


def test_what_a_system_computes_or_sends_twice_takes_time():
    base = job(8, dp_shard=4, tp=2).with_execution(recompute="full")
    plain = step_time(base).costs
    last = step_time(base.with_execution(stops_early=False)).costs
    assert last[Cost.PRODUCTS] > plain[Cost.PRODUCTS] and last[Cost.TENSOR] == plain[Cost.TENSOR]
    fewer = step_time(base.with_execution(recompute="none")).costs
    assert plain[Cost.PRODUCTS] > fewer[Cost.PRODUCTS]
    more = step_time(base.with_execution(tensor_passes=7)).costs
    assert more[Cost.TENSOR] / plain[Cost.TENSOR] == pytest.approx(20 / 11)  # forward, backward, all but one again
    whole = step_time(base.with_execution(gathers_logits=True)).costs
    assert whole[Cost.TENSOR] > plain[Cost.TENSOR] and whole[Cost.TRAFFIC] > plain[Cost.TRAFFIC]


def test_collectives_carry_the_bytes_of_their_rings():
    cluster = machines("h100", 16, across="ib400")
    inside = cluster.gather_s(1e9, Group(8))
    assert inside == pytest.approx(1e9 * 7 / 8 / cluster.inside.speed, rel=0.01)
    across = cluster.gather_s(1e9, Group(16))
    assert across == pytest.approx(1e9 * 15 / 16 / min(cluster.inside.speed, 8 * cluster.across.speed), rel=0.02)
    assert cluster.gather_s(1e9, Group(2, 8)) > cluster.gather_s(1e9, Group(2, 1))
    assert cluster.reduce_s(1e9, Group(8)) == pytest.approx(2 * inside, rel=0.01)
    assert cluster.gather_s(1e9, Group(1)) == cluster.reduce_s(0, Group(8)) == 0


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda: device("H10"), "Did you mean 'H100'"),
        (lambda: link_across("fast"), "ib400"),
        (lambda: machines("h100", 12), "8 or 16"),
        (lambda: machines("h100", 0), "at least 1"),
        (lambda: Pin.parse("tpp<=8"), "Did you mean 'tp'"),
        (lambda: Pin.parse("tp~8"), "tp<=8"),
        (lambda: Pin.parse("recompute=all"), "recompute=full"),
        (lambda: device("v100").speed("float8"), "Legal are float16"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(ask, words):
    with pytest.raises(ConfigError, match=words):
        ask()


def test_stages_cover_all_blocks_and_the_last_is_lighter_for_its_head():
    for blocks, stages in ((80, 8), (126, 16), (7, 3), (126, 128)):
        bounds = even_cuts(blocks, stages)
        assert bounds[0][0] == 0 and bounds[-1][1] == blocks and len(bounds) == stages
        assert all(a[1] == b[0] for a, b in zip(bounds, bounds[1:], strict=False))
    block = decoder_block(2048, 16, 8, 5632)
    heavy = Architecture("heavy head", (block,) * 80, round(2 * block.elements / 2048))  # as much work as two blocks
    sizes = [b - a for a, b in heavy.balanced_cuts(8)]
    assert sum(sizes) == 80 and sizes[-1] == min(sizes) < max(sizes)


def test_costs_move_as_the_field_knows():
    base, gathers = job(), Execution()
    longer = step_time(replace(base, execution=replace(gathers, recompute="full"))).seconds
    assert 1.2 < longer / step_time(base).seconds < 1.4  # a forward more: a third of forward and backward
    assert (
        step_memory(replace(base, execution=replace(gathers, recompute="full"))).activations
        < step_memory(base).activations
    )
    assert step_memory(job(8)).parameters == pytest.approx(step_memory(job(4)).parameters / 2)
    pipeline = replace(job(8, dp_shard=2, pp=4), rows=32)
    few = step_time(replace(pipeline, rows=8))
    many = step_time(pipeline)
    assert few.costs["pipeline bubble"] == pytest.approx(many.costs["pipeline bubble"])
    assert few.seconds / 8 > many.seconds / 32


def every_candidate(base: Job):
    """Enumerate the space of a search without any bound."""
    for mesh in meshes(base, ()):
        for rows in microbatches(base, mesh, ()):
            for run in recomputations(base, ()):
                for per_rank, schedule in schedules(base, mesh, rows, ()):
                    for shard in mesh.shards():
                        for reshard, chunks, each in product((True, False), (1, 8), (False, True)):
                            layout = mesh.layout(shard)
                            if shard * layout.cp == 1 and (each or not reshard):
                                continue
                            if each and (base.rows == mesh.data * rows or schedule == "zbv_zero_bubble"):
                                continue
                            changed = replace(
                                run,
                                schedule=schedule,
                                stages_per_rank=per_rank,
                                gathers_each=reshard,
                                loss_chunks=chunks,
                                reduces_each=each,
                            )
                            yield replace(base, layout=layout, microbatch=rows, execution=changed)


@pytest.mark.first
@pytest.mark.parametrize("gpu", ["h100", "rtx4090"])
def test_a_search_finds_what_enumeration_finds(gpu):
    base = replace(job(8), machines=machines(gpu, 8))
    limit = base.machines.device.memory_bytes
    every = sorted((step_time(one).seconds, step_memory(one).total) for one in every_candidate(base))
    fitting = [one for one in every if one[1] <= limit]
    found = search(base, keep=3)
    assert fitting and [one.time.seconds for one in found.best] == pytest.approx([s for s, _ in fitting[:3]])
    front: list[tuple[float, float]] = []
    for seconds, size in fitting:
        if (not front or size < front[-1][1]) and seconds <= FRONT * fitting[0][0]:
            front.append((seconds, size))
    assert len(front) > 2
    assert [(one.time.seconds, one.memory.total) for one in found.front] == [pytest.approx(one) for one in front]


def test_pins_hold_in_everything_that_a_search_returns():
    found = search(job(8), (Pin.parse("tp=2"), Pin.parse("recompute=full"), Pin.parse("microbatch<=2")))
    assert found.best
    for candidate in (*found.best, *found.front):
        assert candidate.job.layout.tp == 2 and candidate.job.execution.recompute == "full"
        assert candidate.job.microbatch <= 2


@pytest.fixture(scope="module")
def foreseen():
    """``foreseen(file)``: the rows of a file of published measurements that are forecast."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        foresight = importlib.import_module("foresight")

        def read(file):
            rows = foresight.read_rows(BENCHMARKS / "published" / file)
            return [one for one in map(foresight.foresee, rows) if isinstance(one, foresight.Foreseen)]

        yield read
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def published(foreseen):
    return foreseen("published.csv")


@pytest.mark.all
@pytest.mark.parametrize(
    ("kind", "median", "ninetieth"),
    [("dense, one node", 0.05, 0.14), ("dense, many nodes", 0.075, 0.19), ("mixture", 0.09, 0.24)],
)
def test_steps_that_others_measured_are_foreseen(published, kind, median, ninetieth):
    errors = sorted(abs(one.error) for one in published if one.measured_s and one.kind == kind)
    assert len(errors) > 50
    assert statistics.median(errors) <= median
    assert errors[int(0.9 * len(errors))] <= ninetieth


@pytest.mark.all
def test_memory_that_others_measured_is_foreseen(published):
    errors = [abs(one.memory_error) for one in published if one.row["mem_per_gpu"]]
    assert len(errors) > 50 and statistics.median(errors) <= 0.03
    ran = [one for one in published if one.row["fits"] == "yes"]
    assert sum(not one.fits for one in ran) / len(ran) <= 0.01


@pytest.mark.parametrize(
    ("source", "median", "most"),
    [("torchtune README", 0.06, 0.25), ("KempnerForge MFU scaling", 0.02, 0.06), ("torchtitan", 0.06, 0.4)],
)
def test_what_systems_hold_in_memory_is_foreseen_by_what_they_do(foreseen, source, median, most):
    errors = [abs(one.memory_error) for one in foreseen("states.csv") if one.row["source"] == source]
    assert len(errors) > 10 and statistics.median(errors) <= median and max(errors) <= most


@pytest.mark.parametrize(
    ("source", "median", "most"),
    [
        ("nanotron best configurations", 0.12, 0.3),
        ("KempnerForge config validation", 0.05, 0.06),
        ("KempnerForge mixtures", 0.1, 0.1),
    ],
)
def test_memory_of_rows_that_nothing_was_fitted_to_is_foreseen(foreseen, source, median, most):
    errors = [abs(one.memory_error) for one in foreseen("unseen.csv") if one.row["source"] == source]
    assert len(errors) > 5 and statistics.median(errors) <= median and max(errors) <= most


@pytest.mark.parametrize(
    ("file", "source", "median", "most"),
    [
        ("states.csv", "torchtune README", 0.1, 0.25),
        ("states.csv", "KempnerForge MFU scaling", 0.07, 0.26),
        ("states.csv", "torchtitan", 0.08, 0.31),
        ("unseen.csv", "KempnerForge mixtures", 0.21, 0.56),
    ],
)
def test_steps_of_rows_beside_those_that_were_fitted_to_are_foreseen(foreseen, file, source, median, most):
    errors = [abs(one.error) for one in foreseen(file) if one.measured_s and one.row["source"] == source]
    assert len(errors) > 5 and statistics.median(errors) <= median and max(errors) <= most


def test_ranks_of_layouts_count_what_measurements_tell_apart(foreseen):
    kendall = importlib.import_module("foresight").kendall
    assert kendall([(1.0, 5.0), (2.0, 6.0), (2.02, 1.0)], 0.05) == (0.0, 2)  # of three pairs one is alike as measured
    assert kendall([(1.0, 5.0), (2.0, 5.0)], 0.05) == (0.0, 1)  # foreseen alike: half right
    assert kendall([(1.0, 2.0), (2.0, 1.0)], 0.05) == (-1.0, 1)


@pytest.mark.parametrize(
    ("sp", "ac", "each"),
    [
        ("", "", 10 + 24 / 8 + 5 * 64 * 2048 / 6144 / 8),
        ("yes", "", 34 / 8 + 5 * 64 * 2048 / 6144 / 8),
        ("yes", "selective", 34 / 8),
    ],
)
def test_the_figure_of_the_paper_that_counted_activations_is_counted_alike(foreseen, sp, ac, each):
    """arXiv 2205.05198, table 2 and figure 1: 22B on tensor axes of 8; 18 bytes for each element."""
    foresight = importlib.import_module("foresight")
    row = dict.fromkeys(foresight.read_rows(BENCHMARKS / "published" / "states.csv")[0], "")
    row |= {"source": "Korthikanti figure 1", "system": "A100 80GB", "model": "22B", "layers": "48", "hidden": "6144"}
    row |= {"heads": "64", "vocab": "51200", "seq": "2048", "gbs_seqs": "4", "mbs": "4", "gpus": "8", "tp": "8"}
    row |= {"sp": sp, "ac": ac, "precision": "fp16", "mem_per_gpu": "100", "mem_unit": "GB", "fits": "yes"}
    counted = 48 * each * 2048 * 4 * 6144 + 18 * (12 * 48 * 6144**2 + 51200 * 6144) / 8
    assert foresight.foresee(row).memory_error == pytest.approx(counted / 100e9 - 1, abs=0.04)


@pytest.mark.parametrize("figures", [{"tp": "0"}, {"hidden": "7", "heads": "0", "model": ""}, {"gpus": "n/a"}])
def test_rows_that_cannot_be_are_left_out_with_a_reason(foreseen, figures):
    foresight = importlib.import_module("foresight")
    row = foresight.read_rows(BENCHMARKS / "published" / "states.csv")[20]
    found = foresight.foresee({**row, **figures})
    assert isinstance(found, foresight.Foreseen) or found.reason


@pytest.mark.all
def test_descriptions_of_published_mixtures_look_at_no_measured_figure(published):
    rows = importlib.import_module("published.rows")
    blank = dict.fromkeys(("tok_s_gpu", "tok_s_total", "tflops_gpu", "mfu_pct", "hfu_pct", "step_s", "mem_per_gpu"), "")
    mixtures = [one for one in published if one.kind == "mixture"]
    assert len(mixtures) > 50
    for one in mixtures:
        assert rows.job_of({**one.row, **blank}).execution == one.job.execution


@pytest.mark.all
def test_a_group_held_out_is_scored_by_what_the_others_were_fitted_to(published):
    fit = importlib.import_module("published.fit")  # on the path while rows are
    some = [one for one in published if one.row["source"].startswith("InternEvo") and one.measured_s][:5]
    rows = []
    for source, efficiency in (("a", 0.5), ("b", 0.8)):
        for one in some:
            measured = fit.Measured({"source": source, "where": ""}, one.job, 1.0, source)
            rows.append(replace(measured, seconds=1 + measured.error(efficiency)))
    assert fit.fitted(rows[:5]) == {rows[0].unit: pytest.approx(0.5, abs=1e-3)}
    errors = fit.held_out(rows, "source")
    assert all(one < -0.1 for one in errors["a"]) and all(one > 0.1 for one in errors["b"])  # by each other's fits


@pytest.mark.all
def test_plan_answers_which_layout_with_stable_keys(tmp_path, capsys):
    (tmp_path / "c.toml").write_text(CONFIG)
    assert main(["plan", str(tmp_path / "c.toml"), "--gpus", "8", "--gpu", "h100", "--pin", "tp=1", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    chosen = answer["chosen"]
    assert chosen == answer["candidates"][0] and chosen["fits"] and chosen["layout"]["tp"] == 1
    assert {"mem_gb", "step_s", "tok_s_gpu", "mfu"} <= chosen.keys() and 0.2 < chosen["mfu"] < 0.7
    assert sum(chosen["step_parts_s"].values()) == pytest.approx(chosen["step_s"])


@pytest.mark.all
@pytest.mark.parametrize("kind", ["adamw", "muon", "sgd"])
def test_the_config_that_plan_prints_is_one(tmp_path, capsys, kind):
    (tmp_path / "c.toml").write_text(CONFIG)
    given = ["plan", str(tmp_path / "c.toml"), "--gpus", "8", "--gpu", "h100", f"--optimizer.kind={kind}"]
    assert main(given) == 0
    printed = tomllib.loads(capsys.readouterr().out.rpartition("[layout]")[2].join(("[layout]", "")))
    config = Config.from_dict(printed)
    assert config.optimizer.kind == kind and config.layout.world == 8


@pytest.mark.all
def test_plan_judges_a_layout_that_is_given_and_refuses_what_fits_nowhere(tmp_path, capsys):
    (tmp_path / "c.toml").write_text(CONFIG)
    given = ["plan", str(tmp_path / "c.toml"), "--gpus", "8", "--layout.dp_replicate", "8", "--layout.dp_shard", "1"]
    assert main([*given, "--gpu", "rtx4090"]) == 1
    assert "GB too much" in capsys.readouterr().out
    assert main(["plan", str(tmp_path / "c.toml"), "--gpus", "1", "--gpu", "rtx4090"]) == 2
    assert "nothing fits on 1 RTX4090" in capsys.readouterr().err
    assert main(["plan", str(tmp_path / "c.toml"), "--gpus", "8"]) == 2
    assert "go together" in capsys.readouterr().err
    assert main([*given, "--gpu", "v100"]) == 2
    assert "techniques.precision.compute" in capsys.readouterr().err
    assert main([*given, "--gpu", "h100", "--pin", "tp=2"]) == 2
    assert "states one" in capsys.readouterr().err


@pytest.mark.first
@pytest.mark.parametrize(
    ("count", "pins"), [(37, ()), (38, ("tp=1", "pp=1")), (11, ("pp=3",)), (13, ("cp=16",)), (5, ()), (9, ())]
)
@pytest.mark.parametrize("memory", [85e9, 2.5e9])
def test_the_nearest_counts_are_those_that_a_search_of_each_count_finds(count, pins, memory):
    base, pins = replace(job(8), rows=12), tuple(map(Pin.parse, pins))

    def of(gpus: int):
        cards = machines("h100", gpus, per_node=2)
        return replace(cards, device=replace(cards.device, memory_bytes=memory))

    def searched(gpus: int) -> bool:
        try:
            return bool(search(replace(base, machines=of(gpus)), pins, keep=1).best)
        except ConfigError:
            return False

    works = open_works(base, pins, Techniques(), of, lambda *_: None)
    assert words(count, works) == words(count, searched)


def test_counts_that_rules_refuse_are_passed_over():
    base = replace(job(8), rows=64)

    def legal(count, layout, techniques, rows):
        if count == 32:
            raise ConfigError("no")

    works = open_works(base, (Pin.parse("pp=1"),), Techniques(), lambda n: machines("h100", n, per_node=1), legal)
    assert words(33, works).startswith(("Nearest counts that work: 16 or ", "Nearest count that works: 16 GPU"))


@pytest.mark.first("flags5-tp = 8 is not the world size 24. Nearest count that works: 8 GPUs")
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            ["--gpus", "296", "--pin", "tp=1", "--pin", "cp=1"],
            "no layout fills them .* Nearest counts that work: 288 or 304 GPUs",
        ),
        (["--gpus", "5", "--pin", "tp=8"], r"Nearest count that works: 8 GPUs \(none below, down to 2, does\)"),
        (["--gpus", "3", "--pin", "tp=3"], "No count from 1 to 12 GPUs works"),
        (
            ["--gpus", "24", "--layout.tp=8", "--layout.pp=2", "--batch.microbatch=1"],
            "= 16 does not divide .* 24. Nearest counts that work: 16 or 32 GPUs",
        ),
        (["--gpus", "48", "--layout.tp=8", "--layout.pp=2"], "over 3 data ranks .* that work: 32 or 64 GPUs"),
        (
            ["--gpus", "24", "--layout.tp=8", "--layout.dp_shard=1"],
            "tp = 8 is not the world size 24. Nearest count that works: 8 GPUs",
        ),
    ],
)
def test_gpus_that_no_layout_fills_are_refused_with_the_nearest_that_one_does(tmp_path, capsys, flags, says):
    (tmp_path / "c.toml").write_text(CONFIG)
    assert main(["plan", str(tmp_path / "c.toml"), "--gpu", "h100", *flags]) == 2
    error = capsys.readouterr().err
    assert re.search(says, error), error
    for count in re.findall(r"\d+", error.partition("that work: ")[2]):  # each proposal is accepted
        again = [count if word == flags[1] else word for word in flags]
        assert main(["plan", str(tmp_path / "c.toml"), "--gpu", "h100", *again]) == 0
