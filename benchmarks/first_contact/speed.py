"""Tokens per second, MFU and memory of training steps, beside the memory that the plan estimates."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.models.decoder_config import SIZES, DecoderConfig, MoEConfig, idle_parameters, parameter_count

from .child import Outcome
from .machine import SkippedError, machine, need

PUBLISHED = {"tokens/s": 10_471, "MFU": 0.578, "GB": 80.7, "who": "KempnerForge, one H200"}
"""Published for 8.03 B parameters, bf16 parameters and AdamW state, full recomputation, 8 rows of 4096 tokens. Its MFU
counts 6 FLOPs for each parameter, the embedding's too."""
ROOM = 0.96
"""Share of the card that an estimate may reach: the driver's context and the allocator's cuts take the rest."""
BF16 = {"master": "bfloat16", "compute": "bfloat16", "reduce": "bfloat16"}
MIXED = {"master": "float32", "compute": "bfloat16"}
MIXTURE = DecoderConfig(32_000, 1024, 16, 16, 4, 2816, 4096, moe=MoEConfig(n_experts=16, top_k=2, hidden_dim=1408))
"""1.2 B parameters, a quarter of which a token uses."""


@dataclass(frozen=True)
class Setting:
    """A training step that is measured.

    Attributes:
        rows, microbatch: rows of a step, and of a forward.
        techniques: with dtypes.
        compares: figures of others for the same step.
    """

    config: DecoderConfig
    techniques: dict[str, Any]
    rows: int = 8
    microbatch: int = 1
    seq: int = 4096
    steps: int = 5
    compares: dict[str, Any] = field(default_factory=dict)

    def on(self, is_dry: bool) -> Setting:
        """Return the setting, with tiny sizes in a dry run."""
        if not is_dry:
            return self
        moe = None if self.config.moe is None else replace(self.config.moe, n_experts=4, hidden_dim=32)
        tiny = DecoderConfig(97, 32, 2, 4, 2, 48, 64, moe=moe)
        compiled = {"compile_backend": "aot_eager"} if self.techniques.get("compile") else {}
        return replace(self, config=tiny, seq=16, steps=2, techniques={**self.techniques, **compiled})


FULL = {"activation_checkpointing": "full"}
EIGHT = SIZES["8B"]
SETTINGS: dict[str, Setting] = {
    "8B published recipe": Setting(EIGHT, {"precision": BF16, **FULL}, microbatch=2, compares=PUBLISHED),
    "8B published recipe compiled": Setting(
        EIGHT, {"precision": BF16, **FULL, "compile": True}, microbatch=2, compares=PUBLISHED
    ),
    "8B best for 80 GB": Setting(
        EIGHT, {"precision": BF16, **FULL, "compile": True, "loss_chunks": 8}, compares=PUBLISHED
    ),
    "8B selective_op compiled": Setting(
        EIGHT,
        {"precision": BF16, "activation_checkpointing": "selective_op", "compile": True, "loss_chunks": 8},
        compares=PUBLISHED,
    ),
    "8B best for 141 GB": Setting(EIGHT, {"precision": BF16, "compile": True, "loss_chunks": 8}, compares=PUBLISHED),
    "8B float8": Setting(EIGHT, {"precision": BF16, **FULL, "compile": True, "loss_chunks": 8, "float8": "tensorwise"}),
    "1B mixed": Setting(SIZES["1B"], {"precision": MIXED, "loss_chunks": 8}, microbatch=2),
    "1B mixed compiled": Setting(SIZES["1B"], {"precision": MIXED, "compile": True, "loss_chunks": 8}, microbatch=2),
    "1B float8 compiled": Setting(
        SIZES["1B"], {"precision": MIXED, "compile": True, "loss_chunks": 8, "float8": "tensorwise"}, microbatch=2
    ),
    "mixture 1.2B": Setting(MIXTURE, {"precision": MIXED, **FULL, "loss_chunks": 4}, microbatch=2),
}
"""In the order of what is most wanted."""


def batch_of(config: DecoderConfig, rows: int, seq: int, device: Any) -> dict[str, Any]:
    import torch

    tokens = torch.randint(0, config.vocab_size, (rows, seq + 1), generator=torch.Generator().manual_seed(0)).to(device)
    return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def foreseen(setting: Setting) -> tuple[int, str]:
    """Return the plan's estimate of a step's peak, in bytes, and what it leaves out."""
    from meshwright import Layout, plan
    from meshwright.distributed.memory.dry_run import estimate_memory
    from meshwright.introspection.cluster import Cluster
    from meshwright.introspection.facts import model_facts
    from meshwright.introspection.source import as_module
    from meshwright.planning.build import as_techniques
    from meshwright.planning.memory import plan_memory
    from meshwright.planning.values import Batch

    facts, cluster = model_facts(as_module(setting.config)), Cluster(1, 0, machine().device)
    made = plan(facts, Layout(), cluster=cluster, techniques=as_techniques(setting.techniques))
    eager = plan(facts, Layout(), cluster=cluster, techniques=as_techniques({**setting.techniques, "compile": False}))
    microbatches = setting.rows // setting.microbatch
    kept = estimate_memory(facts, eager, Batch(setting.rows, setting.seq, setting.microbatch))
    note = kept.why_not or ("activations as if not compiled" if made.compiled else "")
    return plan_memory(made, microbatches=microbatches).at_peak + kept.of().total, note


def measure(name: str) -> Outcome:
    """Measure one setting.

    Raises:
        SkippedError: the card is too small for it.
    """
    import torch

    here = machine()
    setting = SETTINGS[name].on(here.is_dry)
    if setting.techniques.get("float8"):
        need("torchao", "float8")
    estimate, leaves_out = foreseen(setting)
    if estimate > ROOM * here.memory:
        raise SkippedError(f"needs {estimate / 1e9:.1f} GB, and the card has {here.memory / 1e9:.1f} GB")
    try:
        figures = _measured(setting)
    except torch.OutOfMemoryError as error:
        raise SkippedError(
            f"ran out of memory: foreseen {estimate / 1e9:.1f} GB ({leaves_out or 'all counted'}), the card has"
            f" {here.memory / 1e9:.1f} GB, {here.module.max_memory_allocated() / 1e9:.1f} GB were allocated"
        ) from error
    figures |= {
        "bytes foreseen": estimate,
        "not foreseen": leaves_out,
        "setting": _words(setting),
        "published": setting.compares,
    }
    return figures, [_line(figures)]


def _measured(setting: Setting) -> dict[str, Any]:
    from meshwright import Layout, parallelize
    from meshwright.training.memory import read_memory, reset_peak
    from meshwright.training.optimizer import make_optimizer

    here = machine()
    model = parallelize(setting.config, Layout(), techniques=setting.techniques, microbatch_rows=setting.microbatch)
    plan = model.plan.optimizer
    optimizer = make_optimizer(
        model.make_parameter_groups(), lr=1e-4, plan=plan, named_parameters=list(model.named_parameters())
    ).optimizer
    batch = batch_of(setting.config, setting.rows, setting.seq, model.device)

    def step() -> tuple[float, float]:
        here.finish()
        begun = time.perf_counter()
        loss = model.forward_backward(batch)
        model.optimizer_step(optimizer, max_norm=1.0)
        here.finish()
        return time.perf_counter() - begun, float(loss)

    first = step()
    step()
    reset_peak(model.device)
    timed = [step() for _ in range(setting.steps)]
    losses = [first[1], timed[-1][1]]
    assert losses[1] < losses[0], f"the loss did not fall: {losses}"
    seconds = statistics.median(pair[0] for pair in timed)
    return {
        **_rates(setting, setting.rows * setting.seq / seconds),
        "seconds": seconds,
        "first step": first[0],
        "loss": losses,
        "bytes": read_memory(model.device).peak,
        "bytes reserved": here.module.max_memory_reserved(),
    }


def _rates(setting: Setting, speed: float) -> dict[str, Any]:
    """Return tokens/s, and MFU of matrix parameters and as those count who take all parameters."""
    from meshwright.training.throughput import mfu, peak_flops, training_flops_per_token

    config = setting.config
    active = parameter_count(config) - idle_parameters(config)
    embedding = 0 if config.tied_embeddings else config.vocab_size * config.dim
    sizes = {"n_layers": config.n_layers, "dim_attention": config.n_heads * config.head_dim, "seq_len": setting.seq}
    peak = peak_flops(machine().name, "bfloat16")
    return {
        "tokens/s": speed,
        "MFU": mfu(speed, training_flops_per_token(active - embedding, **sizes), peak, 1),
        "MFU of all parameters": mfu(speed, training_flops_per_token(active, **sizes), peak, 1),
        "parameters": parameter_count(config),
        "active parameters": active,
    }


def _words(setting: Setting) -> str:
    parts = [f"{setting.rows} rows of {setting.seq}, {setting.microbatch} per forward"]
    for key, value in setting.techniques.items():
        parts.append(f"{value['master']} weights, {value['compute']}" if key == "precision" else f"{key} {value}")
    return "; ".join(parts)


def percent(value: float | None) -> str:
    return "unknown" if value is None else f"{100 * value:.1f} %"


def _line(figures: dict[str, Any]) -> str:
    return (
        f"{figures['tokens/s']:,.0f} tokens/s, MFU {percent(figures['MFU'])} (of all parameters"
        f" {percent(figures['MFU of all parameters'])}); {figures['bytes'] / 1e9:.1f} GB, foreseen"
        f" {figures['bytes foreseen'] / 1e9:.1f} GB"
        + (f" ({figures['not foreseen']})" if figures["not foreseen"] else "")
    )
