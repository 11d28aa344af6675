"""``meshwright launch CONFIG.toml|RUN [--slurm.nodes=2] [--key=value …]``: submit a training run to
Slurm, which requeues it until it is complete.

    meshwright launch run.toml --slurm.nodes=2 --slurm.gpus_per_node=8 --slurm.time=12:00:00

The keys of the job may also stand in the config file, under [slurm]; its setup and extra run code, as other keys may,
and need --trust.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.core.config import take_flags
from meshwright.training.slurm import batch_script, folder_of, submit

from .arguments import read_launch


@dataclass(frozen=True)
class LaunchOptions:
    dry_run: bool = False
    """Print the batch script and submit nothing."""
    trust: bool = False
    """Run code that the config names."""


def run(argv: list[str]) -> int:
    """Submit, and print the job and run folder; ``argv`` is what ``read_launch`` takes, and the verb's own flags."""
    options, argv = take_flags(LaunchOptions, argv)
    config = read_launch(argv, trusted=options.trust)
    folder = folder_of(config)
    script = batch_script(config, folder)
    # refuse now, and not after hours in the queue, what cannot be trained on the requested nodes
    from meshwright.introspection.cluster import Cluster
    from meshwright.training.build import batch_of, facts_of, plan_run
    from meshwright.training.model_source import model_source, planned_tokenizer

    slurm, tokenizer = config.slurm, planned_tokenizer(config)
    cluster = Cluster(slurm.nodes * slurm.tasks, slurm.tasks, slurm.device)
    plan_run(config, facts_of(model_source(config, tokenizer)), cluster, batch_of(config, tokenizer))
    if options.dry_run:
        print(script)
        return 0
    job = submit(config, folder)
    nodes = f"{slurm.nodes} node{'s' * (slurm.nodes > 1)}"
    print(f"submitted job {job}: {nodes} of {slurm.tasks}, {slurm.nodes * slurm.tasks} processes in all")
    print(f"  run folder   {folder}")
    print(f"  logs         {folder}/slurm/{job}_<rank>_log.out")
    print(f"\nend it, saved, with: scancel {job}")
    return 0
