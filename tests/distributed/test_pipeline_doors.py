"""torch's pipeline objects around our stage modules: the published names, and gradients of one process."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from meshwright import ConfigError, Layout, distributed
from meshwright.comparison.equality import relative_errors
from meshwright.distributed import (
    PipelineStageModule,
    build_pipeline_schedule,
    build_pipeline_stage,
    build_stage_module,
    compute_layer_assignment,
    get_pp_mesh,
    get_pp_rank,
    get_pp_size,
    init_distributed,
)
from meshwright.distributed.weights.constructed import materialise
from meshwright.models.decoder import Decoder
from meshwright.models.decoder_config import DecoderConfig
from meshwright.planning.pipeline.orders import KINDS

CONFIG = DecoderConfig(64, 16, 4, n_heads=4, n_kv_heads=2, hidden_dim=24, max_seq_len=20)
ROWS, SEQ = 8, 9
SIGNATURES = {
    "compute_layer_assignment": "(n_layers, pp_size)",
    "build_stage_module": "(config, pp_rank, pp_size)",
    "build_pipeline_stage": "(stage_module, device_mesh, device, batch_size, seq_len, param_dtype=torch.bfloat16)",
    "build_pipeline_schedule": "(stage, n_microbatches, loss_fn, schedule='1f1b', scale_grads=True)",
    "PipelineStageModule": "(config, stage_id, num_stages, layer_range)",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_signature_is_the_published_one(name):
    """Further arguments may come, by keyword and with a default."""
    parameters = inspect.signature(getattr(distributed, name)).parameters.values()
    assert all(p.default is not p.empty for p in parameters if p.kind is p.KEYWORD_ONLY)
    parameters = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
    said = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters]
    assert f"({', '.join(said)})" == SIGNATURES[name]


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="stage 2 of 2 with the layers 0 to 1 is not in a model of 4 layers"):
        PipelineStageModule(CONFIG, 2, 2, (0, 2))
    with pytest.raises(
        ConfigError, match="tied_embeddings: stages of their own hold two tables that nobody keeps equal"
    ):
        build_stage_module(replace(CONFIG, tied_embeddings=True), 0, 2)
    with pytest.raises(ValueError, match="4 layers cannot be cut into 5 stages"):
        build_stage_module(CONFIG, 0, 5)


def given_weights(module: Any) -> Any:
    if isinstance(module, PipelineStageModule):
        module.to_empty(device="cpu")
        module.init_weights_and_freqs(3)
    else:
        materialise(module, torch.device("cpu"), 3, {})
    return module


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 64, (ROWS, SEQ + 1), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1], ids[:, 1:]


def mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def by_one_process() -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = Decoder(CONFIG)
    given_weights(model)
    tokens, labels = batch()
    mean_loss(model(tokens), labels).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def by_torch(schedule: str, microbatches: int) -> dict[str, torch.Tensor]:
    mesh = init_distributed(Layout(pp=2, dp_shard=1))
    assert mesh is not None
    rank, ranks = get_pp_rank(mesh), get_pp_size(mesh)
    assert get_pp_mesh(mesh) is not None
    kind = KINDS[schedule]
    numbers = [stage for stage, home in enumerate(kind.rank_of(ranks, kind.per_rank(4, ranks))) if home == rank]
    stages = ranks * len(numbers)
    layers = compute_layer_assignment(CONFIG.n_layers, stages)
    modules, made = [], []
    for number in numbers:
        with torch.device("meta"):
            module = PipelineStageModule(CONFIG, number, stages, layers[number])
        modules.append(given_weights(module))
        made.append(
            build_pipeline_stage(modules[-1], mesh, "cpu", ROWS // microbatches, SEQ, param_dtype=torch.float32)
        )
    if len(made) > 1:
        with pytest.raises(ConfigError, match=r"several stages on each rank: give the list.* \[build_pipeline_stage\("):
            build_pipeline_schedule(made[0], microbatches, mean_loss, schedule)
        with pytest.raises(ConfigError, match="has one stage on each rank, and 2 were given: use interleaved_1f1b"):
            build_pipeline_schedule(made, microbatches, mean_loss, "1f1b")
    run = build_pipeline_schedule(made[0] if len(made) == 1 else made, microbatches, mean_loss, schedule)
    tokens, labels = batch()
    losses: list[torch.Tensor] = []
    firsts = [tokens] if any(m.is_first for m in modules) else []
    run.step(*firsts, **({"target": labels, "losses": losses} if any(m.is_last for m in modules) else {}))
    return {name: p.grad for module in modules for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.follows("build_pipeline_stage()")
@pytest.mark.first("1f1b")
@pytest.mark.parametrize("schedule", KINDS)
def test_every_schedule_of_torch_gives_the_gradients_of_one_process(spmd, schedule):
    expected = spmd(1, by_one_process)[0]
    found: dict[str, torch.Tensor] = {}
    for gradients in spmd(2, by_torch, schedule, 4):
        found |= gradients
    assert found.keys() == expected.keys()
    assert max(relative_errors(found, expected).values()) <= 1e-5  # in float32
