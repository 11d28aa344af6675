"""Define the settings of a run's Slurm job, and refuse contradictory ones. Torch-free."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields

from meshwright.core.devices import CPU, CUDA
from meshwright.core.errors import ConfigError
from meshwright.training.config import Config
from meshwright.training.ranges import Range, check_ranges

OWN_FLAGS = {
    "nodes": "slurm.nodes",
    "ntasks": "slurm.nodes and slurm.tasks_per_node",
    "ntasks-per-node": "slurm.tasks_per_node",
    "gpus-per-node": "slurm.gpus_per_node",
    "cpus-per-task": "slurm.cpus_per_task",
    "partition": "slurm.partition",
    "account": "slurm.account",
    "qos": "slurm.qos",
    "time": "slurm.time",
    "signal": "slurm.signal_sec",
    "requeue": "slurm.requeue",
    "no-requeue": "slurm.requeue",
    "job-name": "name",
    "output": "run (logs lie in its folder)",
    "error": "run (logs lie in its folder)",
    "array": "one 'meshwright launch' for each run",
}
"""Flags of sbatch that slurm.extra may not set, and the keys that set them."""


@dataclass(frozen=True)
class SlurmConfig:
    """The job that ``meshwright launch`` submits; the other verbs pass it over."""

    nodes: int = 1
    """Nodes of the job."""
    tasks_per_node: int = 0
    """Processes on each node; 0: one per GPU, or a single one where no GPUs are asked for."""
    gpus_per_node: int = 0
    """GPUs of each node; 0: train on the CPUs."""
    cpus_per_task: int = 0
    """CPU cores of each process; 0: what the cluster gives."""
    partition: str = ""
    """Partition; empty: the cluster's default, as for account and qos."""
    account: str = ""
    """Account that the job is charged to."""
    qos: str = ""
    """Quality of service."""
    time: str = ""
    """Time limit in sbatch's words, like "90" (minutes), "12:00:00" or "2-12"; empty: the partition's."""
    signal_sec: int = 120
    """Seconds before the time limit at which all ranks save and stop; Slurm may send the signal up to a minute
    earlier."""
    requeue: bool = True
    """After a stop for the time limit or a preemption the job goes back into the queue, until the run is complete."""
    setup: tuple[str, ...] = ()
    """Lines of shell before the run, like "module load cuda"."""
    extra: tuple[str, ...] = ()
    """More flags of sbatch without their dashes, like "mem=64G" or "exclusive"."""

    @property
    def tasks(self) -> int:
        """Processes on each node."""
        return self.tasks_per_node or self.gpus_per_node or 1

    @property
    def device(self) -> str:
        asks = ("gpus", "gres=gpu")
        return CUDA if self.gpus_per_node or any(flag.startswith(asks) for flag in self.extra) else CPU


@dataclass(frozen=True)
class LaunchConfig(Config):
    """A training run and the job that trains it."""

    slurm: SlurmConfig = field(default_factory=SlurmConfig)

    def without_job(self) -> Config:
        return Config(**{f.name: getattr(self, f.name) for f in fields(Config)})


_WORD: Range = ("letters, digits, '.', '_', ',' and '-'", lambda value: re.fullmatch(r"[\w.,-]*", value) is not None)
_TIME = re.compile(
    r"(?:(?P<d>\d+)-(?P<h>\d+)(?::(?P<m>\d+)(?::(?P<s>\d+))?)?)|(?:(?:(?P<h2>\d+):)?(?P<m2>\d+):(?P<s2>\d+))|(?P<m3>\d+)"
)
SLURM_RANGES: dict[str, Range] = {
    "slurm.nodes": ("1 or more", lambda value: value >= 1),
    "slurm.tasks_per_node": ("0 or more", lambda value: value >= 0),
    "slurm.gpus_per_node": ("0 or more", lambda value: value >= 0),
    "slurm.cpus_per_task": ("0 or more", lambda value: value >= 0),
    "slurm.signal_sec": ("from 1 to 65535", lambda value: 1 <= value <= 65_535),
    "slurm.partition": _WORD,
    "slurm.account": _WORD,
    "slurm.qos": _WORD,
    "slurm.time": (
        "minutes, minutes:seconds, hours:minutes:seconds, or days-hours[:minutes[:seconds]]",
        lambda value: not value or _TIME.fullmatch(value) is not None,
    ),
    "slurm.setup[]": ("one line", lambda value: "\n" not in value),
    "slurm.extra[]": (
        "a flag of sbatch without its dashes, like mem=64G or exclusive",
        lambda value: re.fullmatch(r"[a-z][a-z0-9-]+(=[^\n]+)?", value) is not None,
    ),
}


def check_job(config: LaunchConfig) -> None:
    """Refuse a job that could not run.

    Raises:
        ConfigError: a value out of its range, or values that contradict each other.
    """
    check_ranges(config, SLURM_RANGES)
    job = config.slurm
    if job.gpus_per_node and job.tasks != job.gpus_per_node:
        raise ConfigError(
            f"slurm.tasks_per_node = {job.tasks_per_node} with slurm.gpus_per_node = {job.gpus_per_node}: each"
            f" process drives one GPU. Set"
            f" slurm.tasks_per_node = {job.gpus_per_node} (or 0), or slurm.gpus_per_node = {job.tasks_per_node}."
        )
    if job.time and seconds_of(job.time) <= job.signal_sec:
        raise ConfigError(
            f"slurm.time = {job.time!r} is {seconds_of(job.time)} s, and slurm.signal_sec = {job.signal_sec}: the job"
            f" would be told to stop as it starts. Raise slurm.time, or lower slurm.signal_sec."
        )
    for flag in job.extra:
        name = flag.partition("=")[0]
        if name in OWN_FLAGS:
            raise ConfigError(f"slurm.extra: '{name}' has a place of its own: {OWN_FLAGS[name]}.")


def seconds_of(time: str) -> int:
    """Convert a time limit in sbatch's format to seconds."""
    found = _TIME.fullmatch(time)
    parts = {key: int(value) for key, value in (found.groupdict() if found else {}).items() if value}
    days, hours = parts.get("d", 0), parts.get("h", 0) + parts.get("h2", 0)
    minutes = parts.get("m", 0) + parts.get("m2", 0) + parts.get("m3", 0)
    return ((days * 24 + hours) * 60 + minutes) * 60 + parts.get("s", 0) + parts.get("s2", 0)
