"""Seconds that looking at a model takes before its first layout: what its forward does, and its cuts tried out on a
small copy.

    OMP_NUM_THREADS=1 python benchmarks/rehearsal.py

Models of a billion parameters and more, on meta, each looked at for the first time. Ours and those of transformers
are made small by their config; a module that is not built from one is copied itself, up to a size.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import date

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from torch import nn
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from meshwright import Layout, plan
from meshwright.distributed.pipeline import split as stages
from meshwright.distributed.tensor import parallel as cuts
from meshwright.introspection.facts import model_facts
from meshwright.models.decoder import Decoder
from meshwright.models.decoder_config import SIZES

MODELS: dict[str, Callable[[], nn.Module]] = {
    "our decoder": lambda: Decoder(SIZES["1B"]),
    "our decoder, 8B": lambda: Decoder(SIZES["8B"]),
    "Llama": lambda: LlamaForCausalLM(LlamaConfig(hidden_size=2048, intermediate_size=5632, num_hidden_layers=22)),
    "Qwen3-MoE": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(num_hidden_layers=12, num_experts=32)),
    "gpt-oss": lambda: GptOssForCausalLM(GptOssConfig()),
}


def seconds(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def cut(model: nn.Module) -> None:
    facts = model_facts(model)
    tensor = plan(facts, Layout(dp_shard=1, tp=2)).tensor
    assert tensor is not None
    cuts.prove(facts, tensor)


def staged(model: nn.Module) -> None:
    facts = model_facts(model)
    pipeline = plan(facts, Layout(dp_shard=1, pp=2)).pipeline
    assert pipeline is not None
    stages.prove(facts, pipeline, 1)


def main() -> None:
    print(
        f"{date.today().isoformat()}, torch {torch.__version__}, transformers {transformers.__version__},"
        f" {torch.get_num_threads()} threads"
    )
    for name, build in MODELS.items():
        with torch.device("meta"):
            models = [build() for _ in range(3)]
        facts = model_facts(models[0])
        premises = seconds(lambda: facts.measurements.premises())  # noqa: B023  (called at once)
        tensor, pipeline = seconds(lambda: cut(models[1])), seconds(lambda: staged(models[2]))  # noqa: B023
        sizes = f"{name:16} {facts.numel / 1e9:6.2f} B"
        print(
            f"{sizes}   its forward {premises:5.2f} s   with tp = 2 {tensor:5.2f} s   with pp = 2 {pipeline:5.2f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
