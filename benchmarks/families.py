"""Tensor and sequence parallelism of tiny random models of many families, each layout verified against one process in fp64.

    OMP_NUM_THREADS=1 python benchmarks/families.py [--families llama gpt2] [--layouts tp=2,dp_shard=1] [--bf16]

Needs the extra hf. The exit status is 1 where one differs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi", "phi3", "olmo2", "gpt_neox", "gpt2", "opt", "bloom", "falcon"),
    *("falcon_grouped", "falcon_alibi", "stablelm", "cohere", "starcoder2", "granite"),
)
LAYOUTS = ("tp=2,dp_shard=1", "tp=4,dp_shard=1", "tp=2,dp_shard=2", "tp=2,dp_shard=2,dp_replicate=2")


def __getattr__(name: str) -> Callable[[], Any]:
    """``families:NAME`` is a factory of that family's model."""
    if name.startswith("__"):
        raise AttributeError(name)
    from support.families import config_of, on_cpu

    return lambda: on_cpu(config_of(name))


def main() -> int:
    from meshwright.core.errors import MeshwrightError
    from meshwright.distributed.local import WorkerPool
    from meshwright.planning.layout import Layout
    from meshwright.verification.verify import verify

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=FAMILIES)
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS)
    parser.add_argument("--bf16", action="store_true")
    asked = parser.parse_args()
    layouts = [Layout.parse(text) for text in asked.layouts]
    differs = 0
    with WorkerPool(max(layout.world for layout in layouts), threads=1) as pool:
        for family in asked.families:
            for layout in layouts:
                dtypes = ("bfloat16",) if asked.bf16 else ("float64",)
                try:
                    report = verify(f"families:{family}", layout, steps=2, dtypes=dtypes, pool=pool)
                except MeshwrightError as error:
                    print(f"{family:16} {layout!s:34} refused: {str(error).splitlines()[0]}", flush=True)
                    continue
                worst = max(d.error for c in report.comparisons for d in c.of("gradient"))
                differs += not report
                print(f"{family:16} {layout!s:34} {'equal' if report else 'DIFFERS'}  gradients within {worst:.1e}", flush=True)
    return int(differs > 0)


if __name__ == "__main__":
    raise SystemExit(main())
