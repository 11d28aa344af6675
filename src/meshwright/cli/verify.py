"""``meshwright verify [CONFIG.toml | RUN] [--layout "dp_shard=2,dp_replicate=2"] [--key=value …]``: prove that a layout
equals one process, on this machine.

The model of the config is trained for a few steps by one process with plain torch, and by each layout over local
processes, from the same weights and the same global batches; losses, norms, activations, gradients and parameters are
compared in fp64 and fp32. Exit status 0: all equal within rounding; 1: a layout differs, and the first place where it
does is named.

  --layout "axis=size,…"   a layout to verify; may be given several times (default: the config's own)
  --all [--max-world N]    every layout of the data axes on up to N ranks (default 8)
  --model MODULE:FACTORY   your own model instead of the config's
  --steps N                optimizer steps (default 3)
  --dtypes fp64,fp32,bf16  of the computation (default: fp64 and fp32, and bf16 where the config computes in it; with
                           float8 that or fp32)
  --shrink                 a small model of the same structure: head ratios, ties and norms stay
  --json                   everything, for programs
  --trust                  run code that the config names
  --write-trace FILE       verify nothing: write the first steps of the config on its own data, as one process computes
                           them, for 'meshwright train CONFIG --check-trace FILE' to compare a real run with; --steps is
                           then the config's
  --trace-steps N          steps of the trace (default 3)

Any key of meshwright train may follow, such as --techniques.activation_checkpointing=full.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from meshwright.core.dtypes import canonical_dtype
from meshwright.core.errors import ConfigError, MeshwrightError
from meshwright.planning.layout import Layout, data_layouts
from meshwright.training.config import Config

from .arguments import read_config, take_option

EXACT = ("float64", "float32")
LEGAL = (*EXACT, "bfloat16", "float16")
TRACE_STEPS = 3


def run(argv: list[str]) -> int:
    """Verify and print reports; return 0 if all are equal, 1 if one differs, 3 if one is refused and none differs."""
    wanted, argv = _take_all(argv, "--layout")
    max_world, argv = take_option(argv, "--max-world", int)
    trace, argv = take_option(argv, "--write-trace", str)
    trace_steps, argv = take_option(argv, "--trace-steps", int)
    steps, argv = take_option(argv, "--steps", int) if trace is None else (None, argv)
    named, argv = take_option(argv, "--dtypes", str)
    factory, argv = take_option(argv, "--model", str)
    flags = {name: name in argv for name in ("--all", "--shrink", "--json")}
    argv = [word for word in argv if word not in flags]
    config = read_config(argv, prog="meshwright verify", description=__doc__ or "")
    if steps is not None and steps < 1:
        raise ConfigError(f"--steps = {steps}: at least 1 is compared")
    if max_world is not None and not flags["--all"]:
        raise ConfigError("--max-world says how far --all goes: add --all, or leave it out")
    if trace is not None:
        others = {"--layout": wanted, "--model": factory, "--dtypes": named, **flags}
        return _write_trace(config, trace, trace_steps, [name for name, value in others.items() if value])
    if trace_steps is not None:
        raise ConfigError("--trace-steps says how long a trace is: add --write-trace FILE, or leave it out")
    layouts = [_closed(text) for text in wanted]
    layouts += list(data_layouts(max_world or 8)) if flags["--all"] else []
    dtypes = _dtypes(named, config)
    return _verify(
        config,
        factory,
        layouts or [_own(config)],
        steps or 3,
        dtypes,
        shrink=flags["--shrink"],
        as_json=flags["--json"],
    )


def _closed(text: str) -> Layout:
    """Parse a layout; an axis that the text does not name is 1."""
    return Layout.parse(text if "dp_shard" in text else f"{text},dp_shard=1")


def _own(config: Config) -> Layout:
    if not config.layout.is_resolved:
        raise ConfigError(
            'no layout to verify: name one, like --layout "dp_shard=2,dp_replicate=2", or --all; the config leaves'
            " its own open"
        )
    return config.layout


def _write_trace(config: Config, path: str, steps: int | None, others: list[str]) -> int:
    steps = TRACE_STEPS if steps is None else steps
    if steps < 1:
        raise ConfigError(f"--trace-steps = {steps}: at least 1 is written")
    if others:
        raise ConfigError(
            f"{others[0]} and --write-trace are both given: a trace is of what one process makes of the config as it is"
        )
    from meshwright.training.views.progress import build_progress
    from meshwright.verification.trace_writer import summary, write_trace

    file = Path(path).expanduser()
    if not file.parent.is_dir():
        raise ConfigError(f"--write-trace = {path}: there is no folder {file.parent}")
    with build_progress(is_main=True) as progress:
        trace = write_trace(config, file, steps, progress)
    print(summary(trace, file))
    return 0


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


def _verify(
    config: Config,
    factory: str | None,
    layouts: list[Layout],
    steps: int,
    dtypes: tuple[str, ...],
    *,
    shrink: bool,
    as_json: bool,
) -> int:
    from meshwright.distributed.process.workers import WorkerPool
    from meshwright.verification.subject import subject_of
    from meshwright.verification.verify import verify

    subject = subject_of(config, factory, max(layout.world for layout in layouts), shrink=shrink)
    reports, refused = [], []
    pool = WorkerPool(max(layout.world for layout in layouts))
    try:
        for layout in layouts:
            try:
                report = verify(
                    subject.model,
                    layout,
                    subject.batches_for(layout.world),
                    steps=steps,
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
            if not as_json:
                print(report, flush=True)
    finally:
        pool.close()
    if as_json:
        print(json.dumps([json.loads(report.to_json()) for report in reports], indent=1))
    if not all(reports):
        return 1
    return refused[0][1].exit_status if refused else 0


def _take_all(argv: list[str], name: str) -> tuple[list[str], list[str]]:
    """Split off every value of ``--name value`` or ``--name=value``; return the values and the other words."""
    found, rest = [], []
    words = iter(argv)
    for word in words:
        if word == name:
            found.append(next(words, ""))
        elif word.startswith(f"{name}="):
            found.append(word[len(name) + 1 :])
        else:
            rest.append(word)
    if "" in found:
        raise ConfigError(f'{name} needs a value, like {name} "dp_shard=2"')
    return found, rest
