"""``meshwright train``: train a model from a config, or continue a run.

``--profile 10:13`` is short for --logging.profile, and ``--max-restarts N`` for --process.max-restarts.
Values of the config that run code (a model's own, a function by its name) need ``--trust``, with each command anew.
"""

from __future__ import annotations

from .arguments import read_config, take_option


def run(argv: list[str]) -> int:
    """Train, and return the exit status; ``argv`` is what ``read_config`` takes, and the short flags."""
    restarts, argv = take_option(argv, "--max-restarts", int)
    if restarts is not None:
        argv = [*argv, f"--process.max-restarts={restarts}"]
    steps, argv = take_option(argv, "--profile", str)
    if steps is not None:
        argv = [*argv, f"--logging.profile={steps}"]
    config = read_config(argv, prog="meshwright train", description=__doc__ or "")
    from meshwright.distributed.process.world import check_nodes_in_use
    from meshwright.training.launch import launch

    check_nodes_in_use()
    return launch(config)
