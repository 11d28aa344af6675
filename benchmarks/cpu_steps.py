"""Compare forecasts of steps on this machine with the seconds that real steps take over gloo, layout by layout.

    python benchmarks/cpu_steps.py [--layouts 36] [--seed 0] [--only NUMBER] [--rows] [--json FILE]

Before the first layout, and again after each ``AGAIN`` ones, this machine is measured with 2 and with 4 ranks, as
``meshwright measure`` does, and what steps add: virtual machines become
faster and slower by a tenth within minutes. Layouts are drawn from models, axis sizes and techniques, kept if the rules
allow them, forecast from their recorded operators, and run. A run's figure is the median of its steps behind the first
ones, on the slowest rank. Routers choose experts in turn, as the recording assumes. Exit status 1: a median error above
10 %, or Kendall's tau below 0.8. Other programs on the machine make steps longer: each line says how many cores they
took.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import torch
from drawn import Drawn, draw
from steps.forecast import forecast_step
from steps.operators import StepOfRank
from steps.profile import StepProfile, measure_here
from steps.record import record_steps

from meshwright.distributed.process.workers import WorkerPool
from meshwright.introspection.facts import ModelFacts, model_facts
from meshwright.models.decoder_config import DecoderConfig, MoEConfig

MEDIAN, TAU = 0.10, 0.8
SEQ, WARM, STEPS, MOST_S = 128, 2, 9, 6.0
"""Tokens of a row; steps that warm up; steps that count, fewer where they take longer than so many seconds together."""
AGAIN = 12
"""Layouts after which the machine is measured again."""
CLIP = 1e-6
KEYS = ("tokens", "labels")
SMALL = DecoderConfig(1003, 128, 4, n_heads=4, n_kv_heads=2, hidden_dim=384, max_seq_len=SEQ)
MODELS = {
    "small": SMALL,
    "wide": replace(SMALL, vocab_size=4003, dim=512, n_heads=8, n_kv_heads=4, hidden_dim=1536),
    "deep": replace(SMALL, dim=192, n_layers=8, hidden_dim=512),
    "vocabulary": replace(SMALL, vocab_size=16_003, dim=256, n_layers=2, hidden_dim=704, tied_embeddings=True),
    "mixture": replace(SMALL, dim=256, moe=MoEConfig(n_experts=4, hidden_dim=256)),
}
SWITCHES: dict[str, list[dict[str, Any]]] = {
    "recompute": [{}, {}, {"activation_checkpointing": "full"}, {"activation_checkpointing": "selective"}],
    "loss": [{}, {}, {"loss_chunks": 4}],
    "shards": [{}, {}, {"reshard_after_forward": False}, {"zero_stage": 1}],
    "schedule": [{"pipeline_schedule": kind} for kind in ("1f1b", "gpipe", "interleaved_1f1b")],
    "sequence": [{}, {"sequence_parallel": False}],
    "method": [{"context_parallel_method": kind} for kind in ("all_gather", "ring", "ulysses")],
}


# --- one layout


def facts_of(drawn: Drawn) -> ModelFacts:
    """Return the facts of a layout's model."""
    from meshwright.introspection.source import as_module

    return model_facts(as_module(MODELS[drawn.model]))


def recorded(drawn: Drawn) -> tuple[StepOfRank, ...]:
    """Record the operators and messages of a step."""
    from meshwright.planning.build import plan

    facts = facts_of(drawn)
    planned = plan(facts, drawn.layout, techniques=drawn.techniques, batch=drawn.batch)
    return record_steps(facts, planned, drawn.batch, max_norm=CLIP, keys=KEYS)


@dataclass(frozen=True)
class Ran:
    """The steps of a rank.

    Attributes:
        seconds: seconds of each step behind those that warm up.
        computed: seconds of a step that the rank's own thread computed.
        ours: cores that this process occupied.
        all: cores that all programs of the machine occupied.
    """

    seconds: list[float]
    computed: float
    ours: float
    all: float


def run_steps(drawn: Drawn) -> Ran:
    """Run a layout, and return the steps of this rank."""
    from meshwright.distributed.parallelize import parallelize
    from meshwright.models.layers import Router
    from meshwright.planning.build import plan

    facts = facts_of(drawn)
    planned = plan(facts, drawn.layout, techniques=drawn.techniques, batch=drawn.batch)
    laid = parallelize(MODELS[drawn.model], drawn.layout, plan=planned, microbatch_rows=drawn.rows)
    optimizer = torch.optim.AdamW([p for p in laid.parameters() if p.requires_grad], lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    shape = drawn.rows * drawn.microbatches, SEQ
    tokens = torch.randint(MODELS[drawn.model].vocab_size, shape, generator=generator)
    batch, found = {"tokens": tokens, "labels": tokens.roll(-1, 1)}, []

    def step() -> float:
        began = time.perf_counter()
        laid.forward_backward(batch)
        laid.optimizer_step(optimizer, CLIP)
        return time.perf_counter() - began

    with patch.object(Router, "_choose", _in_turn):
        for _ in range(WARM - 1):
            step()
        number = agreed_steps(step())
        busy, own, computing, began = cores_in_use(), time.process_time(), time.thread_time(), time.perf_counter()
        found = [step() for _ in range(number)]
        passed = time.perf_counter() - began
    return Ran(
        found,
        (time.thread_time() - computing) / number,
        (time.process_time() - own) / passed,
        (cores_in_use() - busy) / passed,
    )


def cores_in_use() -> float:
    """Return the seconds that all cores have worked so far."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)


def agreed_steps(seconds: float) -> int:
    """Return how many steps all ranks take."""
    from meshwright.distributed.process import agree

    slowest = agree.largest(int(1e6 * seconds)) / 1e6
    return max(3, min(STEPS, int(MOST_S / max(slowest, 1e-6))))


def _in_turn(router: Any, scores: torch.Tensor) -> torch.Tensor:
    """Choose experts one after the other, so that all have as many tokens."""
    shape, config = (*scores.shape[:-1], router.config.top_k), router.config
    number = torch.arange(scores.shape[0] * scores.shape[1] * config.top_k, device=scores.device)
    return (number % config.n_experts).view(shape)


# --- the table


def kendall(pairs: list[tuple[float, float]]) -> float:
    """Return Kendall's tau-a of pairs."""
    signs = [((a > c) - (a < c)) * ((b > d) - (b < d)) for (a, b), (c, d) in itertools.combinations(pairs, 2)]
    return sum(signs) / len(signs) if signs else 1.0


def profiles() -> dict[int, StepProfile]:
    """Measure this machine with 2 and 4 ranks."""
    found = {}
    for ranks in (2, 4):
        began = time.monotonic()
        found[ranks] = measure_here(ranks)
        print(f"measured {ranks} ranks in {time.monotonic() - began:.0f} s", flush=True)
    return found


def compared(
    drawn: list[Drawn], first: int, machines: dict[int, StepProfile], *, rows: bool
) -> Iterator[dict[str, Any]]:
    """Forecast and run each layout, print a line for it, and yield both figures."""
    with WorkerPool(4, threads=1) as workers:
        for number, one in enumerate(drawn, first):
            steps_of, profile = recorded(one), machines[one.layout.world]
            foreseen = forecast_step(steps_of, profile)
            each = workers.run(run_steps, one, world=one.layout.world, timeout=300)
            steps = max((ran.seconds for ran in each), key=statistics.median)
            others = max(ran.all for ran in each) - sum(ran.ours for ran in each)
            beside = forecast_step(steps_of, profile, max(0.0, others))
            found, error = statistics.median(steps), foreseen.seconds / statistics.median(steps) - 1
            print(
                f"{number:3} {error:+7.1%} foreseen {foreseen.seconds * 1e3:8.1f} ms, measured {found * 1e3:8.1f}"
                f" (least {min(steps) * 1e3:8.1f}, others took {max(0.0, others):.1f} cores: beside"
                f" them {beside.seconds / found - 1:+.1%})  {one}",
                flush=True,
            )
            if rows:
                for rank, spent in foreseen.ranks.items():
                    parts = {str(part): round(s * 1e3, 1) for part, s in spent.parts.items()}
                    waits: dict[str, float] = {}
                    for (kind, _), s in spent.waiting.items():
                        waits[kind] = round(waits.get(kind, 0.0) + s * 1e3, 1)
                    alone = sum(spent.parts.values()) / each[rank].computed - 1
                    print(
                        f"      rank {rank}: {parts} ({alone:+.1%}), sharing {spent.sharing * 1e3:.1f},"
                        f" waiting {waits}, {spent.messages} messages"
                    )
            yield {
                "layout": str(one),
                "world": one.layout.world,
                "foreseen_s": foreseen.seconds,
                "steps_s": steps,
                "others_cores": others,
                "beside_others_s": beside.seconds,
            }


def main() -> int:
    """Read the arguments, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", type=int, default=36)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, default=-1)
    parser.add_argument("--rows", action="store_true", help="print each rank's seconds by what they are spent on")
    parser.add_argument("--json", type=Path, help="file to write all figures to")
    arguments = parser.parse_args()
    drawn = draw(arguments.layouts, arguments.seed, MODELS, SWITCHES, facts_of, seq=SEQ, worlds=(2, 4), rows=(1, 2, 4))
    first = max(0, arguments.only)
    drawn = drawn if arguments.only < 0 else drawn[first : first + 1]
    results = []
    for chunk in range(0, len(drawn), AGAIN):
        machines = profiles()
        results += compared(drawn[chunk : chunk + AGAIN], first + chunk, machines, rows=arguments.rows)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1))
    pairs = [(one["foreseen_s"], statistics.median(one["steps_s"])) for one in results]
    errors = sorted(abs(foreseen / found - 1) for foreseen, found in pairs)
    median, tau = statistics.median(errors), kendall(pairs)
    print(
        f"{len(errors)} layouts: median error {median:.1%} (goal {MEDIAN:.0%}), 90th percentile"
        f" {errors[int(0.9 * (len(errors) - 1))]:.1%}, Kendall's tau {tau:.2f} (goal {TAU})"
    )
    quiet = [one for one in results if one["others_cores"] < 0.1]
    beside = statistics.median(abs(one["beside_others_s"] / statistics.median(one["steps_s"]) - 1) for one in results)
    print(f"{len(quiet)} of them without other programs; beside those, the median error of all is {beside:.1%}")
    return int(median > MEDIAN or tau < TAU)


if __name__ == "__main__":
    sys.exit(main())
