"""``meshwright inspect RUN|MODEL``: what a run folder holds, or what a model is made of.

MODEL is the name of a built-in size, or "package.module:factory" for a function or class that returns your own nn.Module.
"""

from __future__ import annotations

from pathlib import Path

from meshwright.cli.arguments import open_run, refuse_rest
from meshwright.core.errors import ConfigError, nearest
from meshwright.core.imports import import_object
from meshwright.models.decoder_config import SIZES


def run(argv: list[str]) -> int:
    """Print it."""
    if not argv or "--help" in argv or "-h" in argv:
        print(f"{__doc__}\n\nSizes: {', '.join(SIZES)}")
        return 0 if argv else 2
    name = argv[0]
    refuse_rest(argv[1:], "meshwright inspect", "none")
    if Path(name).is_dir():
        from meshwright.training.inspection import describe_run

        print(describe_run(*open_run(name)))
        return 0
    if name not in SIZES and ":" not in name:
        raise ConfigError(
            f"'{name}' is neither the folder of a run nor a model size.{nearest(name, SIZES)} Sizes: {', '.join(SIZES)};"
            f" a model of your own is package.module:factory."
        )
    from meshwright.introspection.explain import describe_model
    from meshwright.introspection.facts import model_facts
    from meshwright.introspection.source import as_module

    print(describe_model(model_facts(as_module(import_object(name) if ":" in name else SIZES[name]))))
    return 0
