"""``meshwright train``: train a model from a config, or continue a run."""

from __future__ import annotations

from meshwright.cli.arguments import read_config


def run(argv: list[str]) -> int:
    """Train; returns the exit status. ``argv`` is what ``read_config`` takes."""
    config = read_config(argv, prog="meshwright train", description=__doc__ or "")
    from meshwright.training.launch import launch

    return launch(config)
