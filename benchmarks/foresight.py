"""How far are forecasts from measurements that other people published?

    python benchmarks/foresight.py [FILE…] [--json OUT] [--rows] [--fit] [--hold-out]

A FILE has the columns of ``published/published.csv``; the default are this one, which constants of time were fitted to,
``published/states.csv``, whose rows were read for what systems hold in memory, and ``published/unseen.csv``, to which
nothing was fitted. Each row becomes a job of ``meshwright.simulation``, or is excluded by a rule that does not look at
its forecast (``published/rows.py``). The median and 90th percentile of the absolute error are printed by source and by
class, with Kendall's tau within a source, model and number of GPUs, and the errors of memory. ``--rows`` lists every
row; ``--json`` writes what is foreseen of each, ``mem_per_gpu`` in the row's own unit; ``--fit`` prints for each card
and dtype the efficiency of products that would make the median error zero; ``--hold-out`` fits these to all sources,
releases or models but one, and prints the errors of the one left out.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path

from published.fit import Measured, fitted, held_out
from published.rows import HERE, Excluded, Row, job_of, memory_of, number, read_rows, same_quantity

from meshwright.simulation.job import Job
from meshwright.simulation.step_memory import StepMemory, step_memory
from meshwright.simulation.step_time import StepTime, step_time

GB = 1e9
MEASURED = ("id", "where", "note", "address", "shape_from", "tok_s_gpu", "tok_s_total", "tflops_gpu", "tflops_kind")
MEASURED += ("mfu_pct", "hfu_pct", "step_s", "mem_per_gpu", "mem_unit")
"""Columns in which rows of the same run may differ."""
FEW, NOISE = 3, 0.02
"""Pairs of rows of the same run from which a source's noise is known, and what is taken for it elsewhere."""


@dataclass(frozen=True)
class Foreseen:
    """A row with its forecast.

    Attributes:
        measured_s: seconds of a step by the row; 0 if it prints none.
    """

    row: Row
    job: Job
    time: StepTime
    memory: StepMemory
    measured_s: float

    @property
    def error(self) -> float:
        return self.time.seconds / self.measured_s - 1

    @property
    def memory_error(self) -> float:
        found, measured = same_quantity(self.row, self.stated)
        return found / measured - 1

    @cached_property
    def stated(self) -> StepMemory:
        """The memory of the rank that the row is about."""
        return memory_of(self.row, self.job)

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.job.machines.device.memory_bytes

    @property
    def kind(self) -> str:
        if any(block.experts for block in self.job.architecture.blocks):
            return "mixture"
        gpus = self.job.layout.world
        return "dense, one GPU" if gpus == 1 else "dense, one node" if gpus <= 8 else "dense, many nodes"

    def to_json(self) -> dict:
        tokens = self.job.rows * self.job.seq_len / self.job.layout.world
        size, measured = same_quantity(self.row, self.stated)
        return {
            "id": self.row["id"],
            "step_s": self.time.seconds,
            "tok_s_gpu": tokens / self.time.seconds,
            "tflops_gpu": _flops_per_token(self) * tokens / self.time.seconds / 1e12,
            "mem_gb": size / GB,
            "mem_per_gpu": number(self.row["mem_per_gpu"]) * size / measured if measured else size / GB,
            "fits": self.fits,
        }


def foresee(row: Row) -> Foreseen | Excluded:
    """Forecast a row."""
    try:
        job = job_of(row)
        if isinstance(job, Excluded):
            return job
        time, memory = step_time(job), step_memory(job)
    except (ValueError, ZeroDivisionError) as error:
        return Excluded(f"what it states cannot be ({error})")
    measured = number(row["step_s"])
    if not measured and number(row["tok_s_gpu"]):
        measured = job.rows * job.seq_len / job.layout.world / number(row["tok_s_gpu"])
    found = Foreseen(row, job, time, memory, measured)
    if not measured and number(row["tflops_gpu"]) and row["fits"] == "yes":
        tokens = job.rows * job.seq_len / job.layout.world
        found = replace(found, measured_s=_flops_per_token(found) * tokens / number(row["tflops_gpu"]) / 1e12)
    return found


def _flops_per_token(found: Foreseen) -> float:
    """Return the FLOPs of a token by the row's own formula."""
    model, kind, length = found.job.architecture, found.row["tflops_kind"], found.job.seq_len
    if "vendor" in kind:  # causal attention counts half
        attended = model.model_flops_per_token(length) - model.model_flops_per_token(0)
        return model.model_flops_per_token(length) - attended / 2
    if "recomputation" in kind or "hardware" in kind:
        return model.model_flops_per_token(length) * 4 / 3
    attended = model.model_flops_per_token(length) - model.model_flops_per_token(0)
    return 6 * (number(found.row["params"]) or model.elements) + attended


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "files", nargs="*", type=Path, default=[HERE / f"{name}.csv" for name in ("published", "states", "unseen")]
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rows", action="store_true")
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--hold-out", action="store_true")
    asked = parser.parse_args()
    rows = [row for file in asked.files for row in read_rows(file)]
    found = [foresee(row) for row in rows]
    if asked.json:
        asked.json.write_text(json.dumps([_as_json(row, one) for row, one in zip(rows, found, strict=True)], indent=1))
    whole = [one for one in found if isinstance(one, Foreseen)]
    _print_excluded(rows, found)
    timed = [one for one in whole if one.measured_s]
    _print_errors("source", timed, lambda one: f"{one.row['source']}, {one.kind}")
    _print_errors("class", timed, lambda one: one.kind)
    _print_ranking(timed)
    _print_errors(
        "source, memory",
        [one for one in whole if number(one.row["mem_per_gpu"])],
        lambda one: one.row["source"],
        "memory_error",
    )
    _print_memory(whole)
    if asked.rows:
        for one in whole:
            if number(one.row["mem_per_gpu"]):
                found, measured = same_quantity(one.row, one.stated)
                parts = ", ".join(f"{name} {size / GB:.1f}" for name, size in one.stated.parts().items())
                print(
                    f"{one.row['id']} {one.row['source'][:20]:20} {one.row['model']:<16} {measured / GB:6.1f} GB"
                    f" {found / GB:6.1f} GB {one.memory_error:+6.1%}  {one.job.layout}; {parts}"
                )
    if asked.rows:
        for one in timed:
            bound = ", ".join(f"{cost} {share:.0%}" for cost, share in one.time.bound_by()[:4])
            print(
                f"{one.row['id']} {one.row['model']:<24} {one.measured_s:9.3f} s {one.time.seconds:9.3f} s"
                f" {one.error:+6.1%}  {one.job.layout}; {bound}"
            )
    steps = [Measured(one.row, one.job, one.measured_s, one.kind) for one in timed]
    if asked.fit:
        _print_fit(steps)
    if asked.hold_out:
        _print_held_out(steps)
    return 0


def _as_json(row: Row, one: Foreseen | Excluded) -> dict:
    return {"id": row["id"], "excluded": one.reason} if isinstance(one, Excluded) else one.to_json()


def _print_excluded(rows: Sequence[Row], found: Sequence[Foreseen | Excluded]) -> None:
    reasons = Counter(one.reason for one in found if isinstance(one, Excluded))
    print(f"{len(rows)} rows, {sum(reasons.values())} excluded:")
    for reason, count in reasons.most_common():
        print(f"  {count:4}  {reason}")


def _print_errors(by: str, rows: Iterable[Foreseen], key, error: str = "error") -> None:
    groups: dict[str, list[float]] = defaultdict(list)
    for one in rows:
        groups[key(one)].append(getattr(one, error))
    print(f"\n{'memory' if error != 'error' else 'step time'}: errors by {by}\n{'':64} rows  median  signed     90%")
    for name, errors in sorted(groups.items()):
        sizes = sorted(map(abs, errors))
        middle, tail = statistics.median(errors), _ninetieth(sizes)
        print(f"{name:64} {len(errors):4} {statistics.median(sizes):7.1%} {middle:+7.1%} {tail:7.1%}")


def kendall(pairs: Sequence[tuple[float, float]], noise: float) -> tuple[float, int]:
    """Return Kendall's tau of (measured, foreseen) pairs, and how many count: those that measurements tell apart.

    Pairs that are foreseen alike are half right: they count nothing, neither for nor against.
    """
    apart = [(a - b, x - y) for (a, x), (b, y) in combinations(pairs, 2) if abs(a / b - 1) > noise]
    score = sum(((a * x > 0) - (a * x < 0)) for a, x in apart)
    return score / len(apart) if apart else 1.0, len(apart)


def noise_of(rows: Iterable[Foreseen]) -> float:
    """Return the median difference of a source's rows that state the same run; NOISE where it has too few of them."""
    runs: dict[tuple, list[float]] = defaultdict(list)
    for one in rows:
        stated = tuple(value for key, value in one.row.items() if key not in MEASURED)
        runs[stated].append(one.measured_s)
    found = [abs(a / b - 1) for alike in runs.values() for a, b in combinations(alike, 2) if a != b]
    return statistics.median(found) if len(found) >= FEW else NOISE


def _print_ranking(timed: Iterable[Foreseen]) -> None:
    groups: dict[tuple, list[Foreseen]] = defaultdict(list)
    sources: dict[str, list[Foreseen]] = defaultdict(list)
    for one in timed:
        row = one.row
        groups[row["source"], row["model"], row["system"], row["gpus"], row["seq"], row["gbs_seqs"]].append(one)
        sources[row["source"]].append(one)
    noises = {source: noise_of(rows) for source, rows in sources.items()}
    taus, losses, counts = [], [], []
    for members in groups.values():
        layouts = {(str(one.job.layout), one.job.microbatch) for one in members}
        if len(layouts) < 4:
            continue
        noise = noises[members[0].row["source"]]
        tau, count = kendall([(one.measured_s, one.time.seconds) for one in members], noise)
        taus.append(tau)
        counts.append((count, math.comb(len(members), 2), tau * count))
        chosen = min(members, key=lambda one: one.time.seconds)
        losses.append(chosen.measured_s / min(one.measured_s for one in members) - 1)
    if taus:
        apart, pairs, score = map(sum, zip(*counts, strict=True))
        print(
            f"\nranking: {len(taus)} groups (source, model, GPUs and batch) of four layouts or more: Kendall's tau"
            f" {statistics.median(taus):.2f} (median), {min(taus):.2f} (least); the layout foreseen as best is"
            f" {statistics.median(losses):.1%} (median), {max(losses):.1%} (most) behind the best measured. Of"
            f" {pairs} pairs {apart} differ by more than their source's noise: tau {score / apart:.2f} over these,"
            f" {score / pairs:.2f} where the others count half"
        )


def _print_memory(whole: Iterable[Foreseen]) -> None:
    measured = [one for one in whole if number(one.row["mem_per_gpu"])]
    errors = [one.memory_error for one in measured]
    if errors:
        sizes = sorted(map(abs, errors))
        print(
            f"\nmemory: {len(errors)} rows, median {statistics.median(sizes):.1%} (signed"
            f" {statistics.median(errors):+.1%}), most {sizes[-1]:.1%}"
        )
    oom = [one for one in whole if one.row["fits"] != "yes"]
    ran = [one for one in whole if one.row["fits"] == "yes"]
    print(
        f"{sum(one.fits for one in oom)} of {len(oom)} that ran out of memory are called fitting;"
        f" {sum(not one.fits for one in ran)} of {len(ran)} that ran are not"
    )


def _print_fit(rows: Sequence[Measured]) -> None:
    counts = Counter(row.unit for row in rows if row.fits)
    now = {row.unit: row.job.machines.device.efficiency[row.job.execution.products] for row in rows}
    print("\nefficiency of products that makes the median signed error zero")
    for unit, efficiency in fitted(rows).items():
        card, dtype = unit
        print(f"  {card:10} {dtype:9} {efficiency:.3f}  (now {now[unit]}, {counts[unit]} rows)")


def _print_held_out(rows: Sequence[Measured]) -> None:
    for by in ("source", "release", "model"):
        print(f"\nerrors of each {by}'s rows, with efficiencies fitted to the others'\n{'':24} rows  median     90%")
        for kind, errors in sorted(held_out(rows, by).items()):
            sizes = sorted(map(abs, errors))
            print(f"{kind:24} {len(sizes):4} {statistics.median(sizes):7.1%} {_ninetieth(sizes):7.1%}")


def _ninetieth(sizes: Sequence[float]) -> float:
    """Return the 90th percentile of rising sizes."""
    return sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]


if __name__ == "__main__":
    raise SystemExit(main())
