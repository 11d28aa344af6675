"""``meshwright train [CONFIG.toml | RUN] [--key=value …]``: train a model from a config, or continue a run.

Without CONFIG.toml a small demo is trained. A flag changes a key of the file, as --layout.tp=2 does; RUN continues from
its last checkpoint. Values of the config that run code (a model's own, a function by its name) need --trust, with each
command anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.core.config import take_flags
from meshwright.core.errors import ConfigError

from .arguments import read_config

if TYPE_CHECKING:
    from meshwright.training.config import Config


@dataclass(frozen=True)
class TrainOptions:
    profile: str | None = None
    """Short for --logging.profile: 10:13."""
    max_restarts: int | None = None
    """Short for --process.max_restarts."""
    trust: bool = False
    """Run code that the config names."""


def run(argv: list[str]) -> int:
    """Train, and return the exit status; ``argv`` is what ``read_config`` takes, and the verb's own flags."""
    options, argv = take_flags(TrainOptions, argv)
    if options.max_restarts is not None:
        argv = [*argv, f"--process.max-restarts={options.max_restarts}"]
    if options.profile is not None:
        argv = [*argv, f"--logging.profile={options.profile}"]
    config = read_config(argv, prog="meshwright train", trusted=options.trust)
    from meshwright.distributed.process.world import check_nodes_in_use, is_rank_zero
    from meshwright.training.launch import launch

    check_nodes_in_use()
    if is_rank_zero():
        print(first_line(config), flush=True)
        if not config.run:  # what a run keeps may stand in for its model and data
            place = Path(config.model.hf).expanduser()
            if config.model.hf and not place.exists():
                from meshwright.introspection.source import absent_model

                raise ConfigError(absent_model(config.model.hf, place))
            from meshwright.data.scan import list_sources

            for part in config.data.mixture or (config.data,):
                if not part.streaming:
                    list_sources(part.source, part.format)
    return launch(config)


def first_line(config: Config) -> str:
    """Return what is known of a run before torch is imported: version, name, processes and folder.

    Raises:
        ConfigError: the layout does not fit the number of processes.
    """
    from meshwright import __version__
    from meshwright.core.devices import gpu_count
    from meshwright.core.host import physical_cores
    from meshwright.distributed.process.world import get_world_info
    from meshwright.training.launch import process_count

    count = process_count(config)
    processes = f"{count} process{'es' * (count > 1)}"
    if get_world_info()[2] == 1 and not (config.process.count or config.layout.is_resolved or gpu_count()):
        cores = physical_cores()
        processes += f" on {cores} core{'s' * (cores > 1)} (another number: --process.count=N)"
    folder = config.run or f"{Path(config.out) / config.name}-…"
    return f"meshwright {__version__} · {config.name} · {processes} · {folder}"
