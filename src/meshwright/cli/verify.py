"""``meshwright verify [CONFIG.toml | RUN] [--layout "dp_shard=2,dp_replicate=2"] [--key=value …]``: prove that a layout
equals one process, on this machine.

The model of the config is trained for a few steps by one process with plain torch, and by each layout over local
processes, from the same weights and the same global batches; losses, norms, activations, gradients and parameters are
compared in fp64 and fp32. Exit status 0: all equal within rounding; 1: a layout differs, and the first place where it
does is named.

Any key of meshwright train may follow, such as --techniques.activation_checkpointing=full.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from meshwright.core.config import take_flags
from meshwright.core.config.ranges import FROM_1
from meshwright.core.dtypes import canonical_dtype
from meshwright.core.errors import ConfigError, MeshwrightError
from meshwright.planning.layout import Layout, data_layouts
from meshwright.training.config import Config

from .arguments import read_config

EXACT = ("float64", "float32")
LEGAL = (*EXACT, "bfloat16", "float16")
TRACE_STEPS = 3


@dataclass(frozen=True)
class VerifyOptions:
    layout: tuple[str, ...] = ()
    """A layout to verify, such as dp_shard=2,tp=2; may be given again (default: the config's own)."""
    all: bool = False
    """Verify every layout of the data axes."""
    max_world: Annotated[int | None, FROM_1] = None
    """Of --all: the most ranks (default: 8)."""
    model: str | None = None
    """Your own model instead of the config's: module:factory."""
    steps: Annotated[int | None, FROM_1] = None
    """Optimizer steps (default: 3)."""
    dtypes: str | None = None
    """Of the computation, such as fp64,fp32,bf16 (default: fp64 and fp32, and bf16 where the config computes in it;
    with float8 that or fp32)."""
    shrink: bool = False
    """A small model of the same structure: head ratios, ties and norms stay."""
    write_trace: Path | None = None
    """Verify nothing: write the first steps of the config on its own data, as one process computes them, for
    'meshwright train CONFIG --check-trace FILE' to compare a real run with; --steps is then the config's."""
    trace_steps: Annotated[int | None, FROM_1] = None
    """Steps of the trace (default: 3)."""
    json: bool = False
    """Everything, for programs."""
    trust: bool = False
    """Run code that the config names."""


def run(argv: list[str]) -> int:
    """Verify and print reports; return 0 if all are equal, 1 if one differs, 3 if one is refused and none differs."""
    options, argv = take_flags(VerifyOptions, argv)
    if options.write_trace is not None and options.steps is not None:
        argv = [*argv, f"--steps={options.steps}"]
    config = read_config(argv, prog="meshwright verify", trusted=options.trust)
    if options.max_world is not None and not options.all:
        raise ConfigError("--max-world says how far --all goes: add --all, or leave it out")
    if options.write_trace is not None:
        for name in ("layout", "model", "dtypes", "all", "shrink", "json"):
            if getattr(options, name):
                raise ConfigError(
                    f"--{name} and --write-trace are both given: a trace is of what one process makes of the config as"
                    f" it is"
                )
        from meshwright.training.views.telling import build_progress
        from meshwright.verification.of_config import summary, write_trace

        file = options.write_trace.expanduser()
        if not file.parent.is_dir():
            raise ConfigError(f"--write-trace = {options.write_trace}: there is no folder {file.parent}")
        with build_progress(is_main=True) as progress:
            trace = write_trace(config, file, options.trace_steps or TRACE_STEPS, progress)
        print(summary(trace, file))
        return 0
    if options.trace_steps is not None:
        raise ConfigError("--trace-steps says how long a trace is: add --write-trace FILE, or leave it out")
    # an axis that a layout's text does not name is 1
    layouts = [Layout.parse(text if "dp_shard" in text else f"{text},dp_shard=1") for text in options.layout]
    layouts += list(data_layouts(options.max_world or 8)) if options.all else []
    if not layouts and not config.layout.is_resolved:
        raise ConfigError(
            'no layout to verify: name one, like --layout "dp_shard=2,dp_replicate=2", or --all; the config leaves its'
            " own open"
        )
    return _verify(config, layouts or [config.layout], _dtypes(options.dtypes, config), options)


def _dtypes(named: str | None, config: Config) -> tuple[str, ...]:
    """Choose the dtypes to compute in; float64 first, since a fault stands out most there."""
    if named is None:
        request = config.techniques.precision.compute
        compute = request if request == "auto" else canonical_dtype(request, where="techniques.precision.compute")
        if config.techniques.float8 != "none":
            return (compute if compute in LEGAL else "float32",)
        return (*EXACT, compute) if compute in LEGAL and compute not in EXACT else EXACT
    found = [canonical_dtype(name.strip(), where="--dtypes") for name in named.split(",")]
    for name in found:
        if name not in LEGAL:
            raise ConfigError(f"--dtypes = {named}: {name} cannot be verified. Legal: {', '.join(LEGAL)}")
    return tuple(name for name in LEGAL if name in found)


def _verify(config: Config, layouts: list[Layout], dtypes: tuple[str, ...], options: VerifyOptions) -> int:
    from meshwright.distributed.process.workers import WorkerPool
    from meshwright.verification.of_config import subject_of
    from meshwright.verification.verify import verify

    subject = subject_of(config, options.model, max(each.world for each in layouts), shrink=options.shrink)
    reports, refused = [], []
    pool = WorkerPool(max(layout.world for layout in layouts))
    try:
        for layout in layouts:
            rows = layout.world * -(-subject.batches.rows // layout.world)
            try:
                report = verify(
                    subject.model,
                    layout,
                    replace(subject.batches, rows=rows),
                    steps=options.steps or 3,
                    dtypes=dtypes,
                    techniques=subject.techniques,
                    seed=config.seed,
                    max_norm=config.optimizer.max_norm or None,
                    microbatch_rows=config.batch.microbatch,
                    pool=pool,
                )
            except MeshwrightError as error:
                if len(layouts) == 1:
                    raise
                refused.append((layout, error))
                print(f"{layout}: refused: {error}", file=sys.stderr, flush=True)
                continue
            reports.append(report)
            if not options.json:
                print(report, flush=True)
    finally:
        pool.close()
    if options.json:
        print(json.dumps([json.loads(report.to_json()) for report in reports], indent=1))
    if not all(reports):
        return 1
    return refused[0][1].exit_status if refused else 0
