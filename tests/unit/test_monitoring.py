"""Figures that a run shows and keeps: counted as stated, valid JSON, honest after a resume, and readable on any
terminal.
"""

from __future__ import annotations

import io
import json
import math
import mmap
import re
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from meshwright.cli.arguments import read_config
from meshwright.core.errors import ConfigError, IntegrityError
from meshwright.models.decoder_config import SIZES
from meshwright.planning.build import plan
from meshwright.planning.layout import Layout
from meshwright.training.config import Config
from meshwright.training.memory import read_memory
from meshwright.training.metrics import MetricsWriter, read_metrics
from meshwright.training.throughput import (
    StartupTimeline,
    Throughput,
    mfu,
    peak_flops,
    training_flops_per_token,
)
from meshwright.training.views.live import LiveProgress, LossCurve
from meshwright.training.views.progress import PlainProgress, Progress, StepReport
from meshwright.training.views.telling import ClosingReport, build_progress, next_steps

REPORT = StepReport(
    step=7,
    total_steps=100,
    loss=2.34567,
    grad_norm=0.87,
    learning_rate=3e-4,
    tokens_per_second=12_345.0,
    memory_bytes=512 * 2**20,
    memory_label="RSS peak",
    eta_seconds=181.2,
)
HEADER = ["meshwright · tiny", "model: decoder, 0.8M parameters", "folder: runs/tiny"]


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


# FLOPs


def test_flops_per_token_are_three_times_the_forward_that_torch_counts():
    from torch.utils.flop_counter import FlopCounterMode

    batch, seq, heads, head_dim, hidden, vocab = 2, 16, 4, 8, 48, 64
    width = heads * head_dim
    weights = [
        torch.randn(width, 3 * width),
        torch.randn(width, width),
        torch.randn(width, hidden),
        torch.randn(hidden, width),
    ]
    head = torch.randn(width, vocab)
    x = torch.randn(batch * seq, width)
    with FlopCounterMode(display=False) as counter:
        # (batch, heads, seq, head_dim)
        q, k, v = ((x @ weights[0]).view(batch, seq, 3, heads, head_dim).permute(2, 0, 3, 1, 4)).unbind(0)
        mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        x = mixed.transpose(1, 2).reshape(batch * seq, width) @ weights[1]
        _ = ((x @ weights[2]) @ weights[3]) @ head
    count = sum(w.numel() for w in weights) + head.numel()
    ours = training_flops_per_token(count, n_layers=1, dim_attention=width, seq_len=seq)
    assert ours * batch * seq == 3 * counter.get_total_flops()


def test_frozen_parameters_have_no_gradient_to_compute():
    settings_ = {"n_layers": 0, "dim_attention": 1, "seq_len": 1}
    assert training_flops_per_token(10, frozen_matmul_parameters=100, **settings_) == 6 * 10 + 4 * 100


@pytest.mark.parametrize(
    ("name", "dtype", "flops"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA H100 NVL", "bfloat16", 835.5e12),
        ("NVIDIA H200", "float16", 989e12),
        ("NVIDIA GH200 480GB", "bfloat16", 989e12),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("NVIDIA B200", "bfloat16", 2.25e15),
        ("NVIDIA L40S", "bfloat16", 362e12),
        ("NVIDIA L4", "bfloat16", 121e12),
        ("Tesla V100-SXM2-32GB", "float16", 125e12),
        ("Tesla V100-SXM2-32GB", "bfloat16", None),
        ("AMD Instinct MI300X", "bfloat16", 1307e12),
        ("NVIDIA H100 80GB HBM3", "float32", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "bfloat16", None),
        ("NVIDIA A10G", "bfloat16", 70e12),
        ("NVIDIA A10", "bfloat16", 125e12),
        ("NVIDIA H200 NVL", "bfloat16", 835.5e12),
        ("Tesla V100-PCIE-16GB", "float16", 112e12),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16", None),
        ("AMD EPYC 7763 64-Core Processor", "bfloat16", None),
    ],
)
def test_peaks_are_of_that_very_device_or_unknown(name, dtype, flops):
    assert peak_flops(name, dtype) == flops


def test_mfu_is_the_share_of_all_devices_peak_and_unknown_without_one():
    assert mfu(1e6, 6e9, peak=1e15, world=12) == pytest.approx(0.5)
    assert mfu(1e6, 6e9, peak=None, world=12) is None
    with pytest.raises(ConfigError, match="1 device or more"):
        mfu(1e6, 6e9, peak=1e15, world=0)


# Memory, start-up, speed


def test_cpu_memory_is_this_processs_resident_set_and_its_peak_stays():
    rss = psutil.Process().memory_info().rss
    block = mmap.mmap(-1, 24 * 2**20)  # new pages: an allocator may give again what the process already holds
    block.write(bytes([1]) * len(block))
    high = read_memory(torch.device("cpu"))
    assert high.current > rss + 12 * 2**20 and high.peak >= high.current
    block.close()
    assert read_memory(torch.device("cpu")).peak > high.peak - 2**20  # the kernel counts in batches
    assert high.label in ("RSS peak", "RSS")


def test_timeline_is_one_line_in_order_and_keeps_a_phase_that_raised():
    timeline = StartupTimeline()
    timeline.record("imports", 1.9)
    with pytest.raises(ValueError), timeline.phase("data"):
        time.sleep(0.01)
        raise ValueError
    timeline.record("imports", 0.1)
    assert list(timeline.seconds) == ["imports", "data"] and timeline.seconds["data"] >= 0.01
    assert timeline.line().startswith("imports 2 s · data 1")


def test_throughput_forgets_the_first_step_and_whatever_left_the_window():
    meter = Throughput(window=2)
    assert (meter.tokens_per_second, meter.row_length, meter.eta_seconds(5)) == (0.0, 0.0, None)
    meter.add([100], 10.0)  # compilation
    assert meter.tokens_per_second == 10.0
    meter.add([100], 1.0)
    assert meter.tokens_per_second == 100.0
    meter.add([100], 3.0)
    assert (meter.tokens_per_second, meter.seconds_per_step, meter.eta_seconds(5)) == (50.0, 2.0, 10.0)
    meter.add([100, 200], 1.0)
    assert meter.tokens_per_second == 100.0
    assert meter.row_length == (100 * 100 + 100 * 100 + 200 * 200) / 400  # a long row has more tokens that stand in it


# Metrics on disk


def lines_of(path: Path) -> list[dict]:
    return [
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
        for line in path.read_text().splitlines()
    ]


def test_every_line_is_json_on_disk_at_once_and_non_finite_numbers_survive(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.event("startup", {"imports": 1.5})
        writer.log(1, {"loss": 2.5, "tokens": np.int64(7), "host": "a", "val": None, "done": True})
        writer.log(2, {"loss": math.nan, "up": math.inf, "down": np.float32(-math.inf)})
        startup, first, second = lines_of(writer.path)  # before close
    assert (startup["event"], startup["imports"]) == ("startup", 1.5) and "step" not in startup
    assert {key: first[key] for key in ("step", "loss", "tokens", "host", "val", "done")} == {
        "step": 1, "loss": 2.5, "tokens": 7, "host": "a", "val": None, "done": True,
    }  # fmt: skip
    assert abs(first["time"] - time.time()) < 60
    assert second["loss"] is None and second["nonfinite"] == {"loss": "nan", "up": "inf", "down": "-inf"}
    back = read_metrics(writer.path)[2]
    assert math.isnan(back["loss"]) and (back["up"], back["down"]) == (math.inf, -math.inf) and "nonfinite" not in back


@settings(max_examples=50)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.data())
def test_after_any_resumes_each_step_is_read_once_and_from_the_last_attempt(tmp_path_factory, runs, data):
    folder = tmp_path_factory.mktemp("run")
    at = 0
    for attempt, length in enumerate(runs):
        with MetricsWriter(folder) as writer:
            if attempt:
                at = data.draw(st.integers(0, at))
                writer.resumed(at)
            for _ in range(length):
                at += 1
                writer.log(at, {"attempt": attempt})
    kept = [line for line in read_metrics(folder / "metrics.jsonl") if "event" not in line]
    assert [line["step"] for line in kept] == list(range(1, at + 1))
    assert [line["attempt"] for line in kept] == sorted(line["attempt"] for line in kept)
    assert sum(line["attempt"] == len(runs) - 1 for line in kept) == runs[-1]


def test_a_line_torn_by_a_crash_does_not_swallow_the_next(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.log(1, {"loss": 1.0})
    with writer.path.open("a") as file:
        file.write('{"step": 2, "lo')
    assert [line["step"] for line in read_metrics(writer.path)] == [1]
    with MetricsWriter(tmp_path) as writer:
        writer.log(2, {"loss": 2.0})
    assert [line["loss"] for line in lines_of(writer.path)] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("hello", "not JSON .*hello"),
        ("[1]", "a list, where every line is one JSON object"),
        ("[" * 100_000, "not JSON"),
        ('{"step": "2"}', '"step" is .2., where it is a whole number'),
        ('{"event": "resume"}', '"step" is .None., where it is a whole number'),
        ('{"step": 2, "nonfinite": {"loss": "big"}}', ".*nan, inf or -inf"),
        ('{"step": 2, "nonfinite": [1]}', ".*nan, inf or -inf"),
    ],
)
def test_a_foreign_line_is_named(tmp_path, line, said):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n')
    with pytest.raises(IntegrityError, match=f"metrics.jsonl, line 2: {said}"):
        read_metrics(path)


def test_reserved_names_and_tensors_are_refused(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        with pytest.raises(ConfigError, match="'step'"):
            writer.log(1, {"step": 2})
        with pytest.raises(ConfigError, match=r"'loss' is a Tensor.*\.item\(\)"):
            writer.log(1, {"loss": torch.tensor(1.0)})
        assert writer.path.read_text() == ""


# What is shown


def test_a_reports_line_has_everything_known_and_nothing_else():
    expected = (
        "step   7/100 · loss 2.3457 · lr 3.00e-04 · grad norm 0.870 · tokens/s 12.3K · RSS peak 512 MiB · ETA 3 min 2 s"
    )
    assert REPORT.line() == expected
    full = replace(REPORT, validation_loss=2.5, mfu=0.4123, skipped=2, loss=math.nan)
    assert "loss nan · val loss 2.5000" in full.line() and "MFU 41.2 %" in full.line() and "skipped 2" in full.line()
    assert "ETA" not in replace(REPORT, step=100).line()


def test_plain_lines_come_at_intervals_and_at_every_validation_the_first_and_the_last_step():
    stream, clock = io.StringIO(), Clock()
    with PlainProgress(stream, clock=clock) as progress:
        progress.start(HEADER)
        for step in range(1, 101):
            clock.now += 0.125
            progress.update(replace(REPORT, step=step, validation_loss=2.0 if step in (50, 51) else None))
        shown_before_close = stream.getvalue()
    assert stream.getvalue() == shown_before_close
    header, lines = shown_before_close.splitlines()[:3], shown_before_close.splitlines()[3:]
    assert header == ["meshwright · tiny", "  model   decoder, 0.8M parameters", "  folder  runs/tiny"]
    shown = [int(line.split("/")[0].removeprefix("step")) for line in lines]
    assert shown == [1, 17, 33, 49, 50, 51, 67, 83, 99, 100]


def test_plain_progress_shows_a_held_back_step_on_the_way_out():
    stream = io.StringIO()
    with pytest.raises(RuntimeError), PlainProgress(stream, clock=Clock()) as progress:
        for step in (1, 2, 3):
            progress.update(replace(REPORT, step=step))
        raise RuntimeError
    assert [line.split("/")[0] for line in stream.getvalue().splitlines()] == ["step   1", "step   3"]


def test_a_narrow_encoding_costs_a_character_and_not_the_run():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    PlainProgress(stream).update(REPORT)
    stream.seek(0)
    assert "loss 2.3457 ? lr" in stream.read()


def live(width: int, height: int = 30) -> tuple[LiveProgress, io.StringIO, Clock]:
    stream, clock = io.StringIO(), Clock()
    console = Console(file=stream, force_terminal=True, width=width, height=height, color_system=None)
    return LiveProgress(console, clock=clock), stream, clock


def last_frame(progress: LiveProgress, width: int, height: int = 30) -> list[str]:
    plain = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    with plain.capture() as captured:
        plain.print(progress._frame())
    return captured.get().splitlines()


@pytest.mark.parametrize("width", [24, 60, 100])
@pytest.mark.parametrize("height", [8, 30])
def test_a_live_frame_fits_the_terminal_and_shows_the_loss(width, height):
    progress, _, clock = live(width, height)
    with progress:
        progress.start(HEADER)
        for step in range(29, 41):
            clock.now += 1.0
            progress.update(
                replace(
                    REPORT,
                    step=step,
                    loss=5 - step / 20,
                    mfu=0.4,
                    skipped=1,
                    validation_loss=3.25 if step == 30 else None,
                )
            )
        frame = last_frame(progress, width, height)
    assert max(len(line) for line in frame) <= width
    text = "\n".join(frame)
    # The last validation loss stays. A terminal of 8 lines shows what fits, from the top.
    assert all(value in text for value in ("3.0000", "3.2500", "3.00e-04", "0.870", "12.3K", "40.0 %", "512 MiB"))
    if height == 30:
        # a logged step
        assert len(frame) < height and "█" in text and any(line.lstrip().startswith("38 ") for line in frame)
    if width >= 60:
        assert "3.550 → 3.000" in text and "40 %" in text


@pytest.mark.parametrize("failure", [KeyboardInterrupt, RuntimeError])
def test_the_cursor_comes_back_whatever_ends_the_run(failure):
    progress, stream, _ = live(80)
    stdout = sys.stdout
    with pytest.raises(failure), progress:
        progress.start(HEADER)
        progress.update(REPORT)
        assert stream.getvalue().rfind("\x1b[?25l") > stream.getvalue().rfind("\x1b[?25h")
        raise failure
    assert stream.getvalue().rfind("\x1b[?25h") > stream.getvalue().rfind("\x1b[?25l")
    assert sys.stdout is stdout
    progress.close()


def test_what_is_said_stays_and_brackets_are_not_markup():
    progress, stream, _ = live(80)
    with progress:
        progress.start(HEADER)
        progress.update(REPORT)
        progress.say("saved [bold]12 MiB[/bold]")
    assert "saved [bold]12 MiB[/bold]" in stream.getvalue()


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_the_display_fits_the_place(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(build_progress(is_main=False, stream=Terminal()), Progress)
    assert isinstance(build_progress(is_main=True, stream=Terminal()), LiveProgress)
    assert isinstance(build_progress(is_main=True, stream=io.StringIO()), PlainProgress)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(build_progress(is_main=True, stream=Terminal()), PlainProgress)


def test_silent_progress_says_nothing(capfd):
    with Progress() as progress:
        progress.start(HEADER)
        progress.update(REPORT)
        progress.say("hello")
    assert capfd.readouterr() == ("", "")


@given(st.lists(st.floats(0, 10) | st.just(math.nan), max_size=200), st.integers(1, 30), st.integers(2, 16))
def test_a_curve_is_as_wide_as_asked_and_bounded_in_memory(losses, width, capacity):
    curve = LossCurve(capacity)
    for loss in losses:
        curve.add(loss)
    assert len(curve._points) < capacity
    drawn = curve.draw(width)
    assert len(drawn) <= width and bool(drawn) == bool(losses)
    assert ("×" in drawn) == any(math.isnan(loss) for loss in losses)


def test_a_falling_loss_draws_a_falling_curve():
    curve = LossCurve(16)
    for step in range(1000):
        curve.add(10 - step / 100)
    drawn = curve.draw(8)
    assert (drawn[0], drawn[-1]) == ("█", "▁") and list(drawn) == sorted(drawn, reverse=True)


# The end


def test_the_closing_report_says_what_came_of_it_and_where_everything_is():
    run = Path("runs/tiny")
    report = ClosingReport(
        run_folder=run,
        step=100,
        total_steps=100,
        loss=1.25,
        validation_loss=1.5,
        tokens=1_000_000,
        seconds=62.0,
        checkpoint=run / "checkpoints" / "step-100",
        config=run / "config.toml",
        places=[("metrics", "metrics.jsonl"), ("tensorboard", "not written: why")],
        sample="To be,\nor \x1b[31mnot " + "to be " * 30,
    )
    text = report.text(width=60)
    assert text.splitlines()[0] == "done: 100 steps · 1M tokens · 1 min 2 s · loss 1.2500 · validation loss 1.5000"
    for place in ("runs/tiny", "checkpoints/step-100", "config.toml", "metrics.jsonl", "not written: why"):
        assert any(line.endswith(f"  {place}") for line in text.splitlines())
    sample = text.split("sample\n")[1]
    assert "  To be,\n  or \\x1b[31mnot to be" in sample and max(len(line) for line in sample.splitlines()) <= 60
    assert "\x1b" not in text


@pytest.mark.all
def test_behind_the_demo_stands_what_the_model_wrote_before_and_what_to_try():
    report = ClosingReport(Path("r"), step=1, total_steps=1, loss=1.0, sample="The cow", untrained="The x").text()
    assert report.endswith("\n\nsample before training\n  The x\n\nsample after training\n  The cow")
    demo, four = Config(), plan(SIZES["debug"], Layout(dp_shard=4))
    commands = [
        shlex.split(line) for line in next_steps(Path("my runs/x"), demo, four).splitlines() if "meshwright" in line
    ]
    assert [words[-1] for words in commands] == ["The ", "My sleepy owl", "--layout.tp=2", "--data.seq_len=4096"]
    verb = commands[0].index("generate")  # behind 'meshwright', or 'python -m meshwright'
    for flags in (commands[2][verb + 1 :], commands[3][verb + 5 :]):
        assert read_config(flags, prog="")
    cut = plan(SIZES["debug"], Layout(dp_shard=2, tp=2))
    assert "--layout.pp=2" in next_steps(Path("r"), demo, cut)
    assert "--layout" not in next_steps(Path("r"), demo, plan(SIZES["debug"], Layout(dp_shard=1)))
    other = Config.from_dict({"data": {"source": ["stdlib"]}, "sample": {"prompt": "a\nb"}})
    assert re.fullmatch(
        r"sample again with: (\S*python\S* -m )?\S*meshwright generate r", next_steps(Path("r"), other, four)
    )


def test_a_stopped_run_without_a_checkpoint_says_so():
    text = ClosingReport(
        Path("r"), step=3, total_steps=10, loss=None, skipped=2, places=[("tensorboard", "tensorboard")]
    ).text()
    assert text.startswith("stopped at step 3 of 10 · 2 steps skipped")
    assert "  checkpoint   none was saved\n  tensorboard  tensorboard" in text
