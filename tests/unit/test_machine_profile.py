"""Profiles of machines: what is measured, written, read back, refused, and what forecasts make of it."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from support.releases import installed

from meshwright.cli import main as cli
from meshwright.core.errors import ConfigError
from meshwright.distributed.measuring import SHORTEST
from meshwright.simulation.measured import (
    COME_ALONG,
    MachineProfile,
    ProductGrid,
    SecondsCurve,
    from_json,
    measured_machines,
    notes,
    profile_of,
    read_profile,
    to_json,
)
from meshwright.training.machine import measure, measure_here

WAYS = ("nt", "nn", "tn")
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send")
GRID = ProductGrid(
    (10, 100),
    tuple(2.0 * math.prod(s) / 1e9 for s in ((a, b, c) for a in (10, 100) for b in (10, 100) for c in (10, 100))),
)


def made_up(ranks: int = 2) -> MachineProfile:
    """A machine of 1 GFLOP/s and 1 GB/s, whose messages take 1 ms and travel at 1 GB/s."""
    return MachineProfile(
        date="2026-01-02",
        torch="2.13.0",
        device="cpu",
        name="slide rule",
        ranks=ranks,
        per_node=ranks,
        threads=1,
        slots=ranks,
        memory_bytes=16e9,
        products={f"{dtype} {way}": GRID for dtype in ("float32", "bfloat16") for way in WAYS},
        attention={
            f"float32 {way} {dim}": ((100.0, 1e-3 * times), (200.0, 4e-3 * times))
            for way, times in (("forward", 1), ("backward", 2.5))
            for dim in (16, 64)
        },
        traffic=dict.fromkeys(("pointwise", "function", "strided"), ((1000.0, 1e-06), (1000000.0, 0.001))),
        host={"elementwise": 2e-6, "view": 1e-6, "empty": 1e-6, "autograd": 3e-6},
        optimizer={"fused": ((100.0, 1e-6),)},
        messages={f"{kind} {ranks}": ((1e3, 1e-3), (1e6, 2e-3)) for kind in KINDS} if ranks > 1 else {},
        crowding=(1.0,) * ranks,
    )


# --- curves


def test_a_curve_goes_through_its_points_and_grows_beyond_them():
    curve = SecondsCurve(((10.0, 1.0), (1000.0, 100.0)))
    assert [curve.seconds(size) for size in (1, 10, 1000, 3000)] == pytest.approx([1.0, 1.0, 100.0, 300.0])
    assert curve.seconds(100) == pytest.approx(10.0)
    assert SecondsCurve(curve.points, power=2.0).seconds(3000) == pytest.approx(900.0)


def test_products_have_the_speed_of_the_shapes_around_them():
    slow, fast = 1e9, 4e9
    seconds = [
        2.0 * a * b * c / (fast if min(a, b, c) == 100 else slow)
        for a in (10, 100)
        for b in (10, 100)
        for c in (10, 100)
    ]
    grid = ProductGrid((10, 100), tuple(seconds))
    assert grid.product_s(100, 100, 100) == pytest.approx(2e6 / fast)
    assert grid.product_s(100, 10, 100) == pytest.approx(2e5 / slow)
    assert grid.product_s(200, 100, 100) == pytest.approx(4e6 / fast), "beyond the grid at the speed of its end"
    middle = math.sqrt(1000)
    assert grid.product_s(middle, 100, 100) == pytest.approx(2 * middle * 1e4 / math.sqrt(slow * fast))
    assert grid.product_s(1, 1, 1) == pytest.approx(2e3 / slow), "never faster than the smallest"
    assert grid.product_s(0, 10, 10) == 0.0


# --- the file


def test_a_profile_is_read_back_equal(tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(to_json(made_up()))
    assert read_profile(path) == made_up()


def damaged(change) -> str:
    values = json.loads(to_json(made_up()))
    change(values)
    return json.dumps(values)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda v: v.pop("traffic"), "'traffic' is missing"),
        (lambda v: v.pop("format"), "it has no format"),
        (lambda v: v.update(format=7), "in format 7, and this meshwright reads format 3"),
        (lambda v: v.update(ranks="two"), "damaged profile"),
        (lambda v: v["host"].pop("empty"), "'host.empty' is missing"),
        (lambda v: v.update(attention={}), "'attention' is empty"),
        (lambda v: v["host"].update(view=-1.0), "host.view is -1.0"),
        (lambda v: v["host"].update(view=math.nan), "host.view is nan"),
        (lambda v: v["traffic"].update(pointwise=[[1.0, math.inf]]), r"traffic.pointwise\[0\]\[1\] is inf"),
        (lambda v: v["traffic"].update(pointwise=[[2.0, 1.0], [1.0, 1.0]]), "no ascending sizes"),
        (lambda v: v["messages"].update({"send 2": []}), "no ascending sizes"),
        (lambda v: v["products"]["float32 nt"].update(seconds=[1.0]), "not those of all its dims"),
    ],
)
def test_damage_is_refused_in_words(change, words):
    with pytest.raises(ConfigError, match=words):
        from_json(damaged(change), "machine.json")


@installed
def test_files_that_are_no_profile_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no such file. Write one with \S*meshwright measure"):
        read_profile(tmp_path / "none.json")
    (tmp_path / "text").write_text("speeds: high")
    with pytest.raises(ConfigError, match="it is not JSON"):
        read_profile(tmp_path / "text")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_profile(tmp_path / "bytes")


# --- what forecasts make of it


def test_devices_cost_what_was_measured():
    machines = measured_machines(made_up(), 2)
    device = machines.device
    assert device.product_s(100, 100, 100, "float32") == pytest.approx(2e6 / 1e9)
    assert device.traffic_s(5e6) == pytest.approx(5e-3)
    flops = 2.0 * 200 * 200 * 16
    assert device.attention_s(flops, "fused", backward=False, head_dim=16) == pytest.approx(4e-3)
    assert device.attention_s(2.5 * flops, "fused", backward=True, head_dim=16) == pytest.approx(10e-3)
    with pytest.raises(ConfigError, match="no products in float64. Legal are bfloat16, float32"):
        device.product_s(8, 8, 8, "float64")


def test_ranks_that_share_cores_are_slower():
    crowded = replace(made_up(), crowding=(1.0, 0.5))
    assert measured_machines(crowded, 2).device.traffic_s(5e6) == pytest.approx(10e-3)


def test_messages_are_those_measured_and_beyond_them_a_rings():
    profile = measured_machines(made_up(), 2).profile
    assert profile.message_s("all_gather", 1e6, 2) == pytest.approx(2e-3)
    latency, travels = 1e-3, 1e-3
    assert profile.message_s("all_gather", 1e6, 8) == pytest.approx(7 * latency + travels * (7 / 8) / (1 / 2))
    assert profile.message_s("send", 1e6, 2) == pytest.approx(2e-3)
    assert profile.message_s("all_gather", 1e6, 1) == 0.0
    assert "those among more are extrapolated by the law of a ring" in " ".join(notes(made_up(), 8))
    assert "extrapolated" not in " ".join(notes(made_up(), 2))


def test_several_devices_need_messages():
    with pytest.raises(ConfigError, match="measured on 1 rank, without messages"):
        measured_machines(made_up(1), 4)
    assert measured_machines(made_up(1), 1).gpus == 1


@pytest.mark.all
def test_plan_forecasts_with_a_profile(tmp_path, capsys):
    path = tmp_path / "machine.json"
    path.write_text(to_json(made_up()))
    given = ["--gpus", "4", "--profile", str(path), "--json", "--model.size=debug", "--layout.dp_shard=4"]
    seconds = []
    for factor in (1.0, 3.0):
        slower = {
            key: ProductGrid(grid.dims, tuple(factor * s for s in grid.seconds))
            for key, grid in made_up().products.items()
        }
        path.write_text(to_json(replace(made_up(), products=slower)))
        assert cli.main(["plan", *given]) == 0
        answer = json.loads(capsys.readouterr().out)
        seconds.append(answer["chosen"]["step_s"])
    assert seconds[1] > 1.5 * seconds[0]
    assert cli.main(["plan", *[word for word in given if word != "--json"]]) == 0
    said = capsys.readouterr().out
    assert "extrapolated by the law of a ring" in said


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--gpu", "h100"], "leave out --gpu and --link"),
        (["--link", "ib400"], "leave out --gpu and --link"),
        (["--world", "4"], "leave these out"),
    ],
)
def test_flags_about_two_machines_are_refused(tmp_path, capsys, flags, words):
    path = tmp_path / "machine.json"
    path.write_text(to_json(made_up()))
    assert cli.main(["plan", "--gpus", "2", "--profile", str(path), *flags]) == 2
    assert words in capsys.readouterr().err
    assert cli.main(["plan", "--profile", str(path)]) == 2
    assert "go together" in capsys.readouterr().err


# --- the measurement


def check_whole(profile: MachineProfile, ranks: int) -> None:
    assert from_json(to_json(profile)) == profile
    assert set(profile.products) == {f"float32 {way}" for way in WAYS}
    assert {key.split()[0] for key in profile.messages} == (set(KINDS) if ranks > 1 else set())
    assert profile.ranks == ranks and len(profile.crowding) == ranks and profile.memory_bytes > 0
    assert min(profile.crowding) > 0
    figures = [s for grid in profile.products.values() for s in grid.seconds] + list(profile.host.values())
    for curves in (profile.attention, profile.traffic, profile.optimizer, profile.messages):
        figures += [seconds for points in curves.values() for _, seconds in points]
    assert min(figures) > 0


@pytest.mark.all
def test_one_process_measures_everything():
    check_whole(measure(SHORTEST), 1)


@pytest.mark.all
def test_two_ranks_measure_their_messages_too():
    check_whole(measure_here(2, SHORTEST), 2)


def test_more_ranks_than_a_host_starts_are_refused(tmp_path, capsys, monkeypatch):
    file = str(tmp_path / "machine.json")
    assert cli.main(["measure", file, "--ranks", "1000"]) == 2
    assert "legal are 1 to 64" in capsys.readouterr().err
    assert cli.main(["measure", str(tmp_path / "nowhere" / "machine.json")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert cli.main(["measure", str(tmp_path)]) == 2
    assert f"{tmp_path}: cannot write this file (it is a folder)" in capsys.readouterr().err
    assert cli.main(["measure", file, "more"]) == 2
    assert "takes one file" in capsys.readouterr().err
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert cli.main(["measure", file, "--ranks", "2"]) == 2
    assert "a launcher has started 2 ranks already" in capsys.readouterr().err


@pytest.mark.all
def test_the_profile_that_comes_along_forecasts(capsys):
    flags = ["--model.size=debug", "--data.seq_len=32", "--batch.global_batch=8", "--layout.dp_shard=4", "--json"]
    assert cli.main(["plan", "--gpus", "4", "--profile", "xeon-2-cores", *flags]) == 0
    assert 0.001 < json.loads(capsys.readouterr().out)["chosen"]["step_s"] < 10
    assert [profile_of(name).ranks for name in COME_ALONG] == [4]
