"""Each technique that one GPU carries, against plain torch on the same device."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from .child import Outcome as Said
from .machine import machine, need
from .problem import (
    DRAW_ON,
    LR,
    SEED,
    Outcome,
    Problem,
    errors_of,
    laid_out,
    limits,
    loss_sum,
    plain_model,
    tensor_errors,
)

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "fully_shard": {"techniques": {"data_parallel": "fully_shard"}},
    "microbatches": {"microbatch_rows": 2},
    "recompute full": {"techniques": {"activation_checkpointing": "full"}},
    "recompute every_n": {"techniques": {"activation_checkpointing": "every_n"}},
    "recompute selective": {"techniques": {"activation_checkpointing": "selective"}},
    "recompute selective_op": {"techniques": {"activation_checkpointing": "selective_op"}},
    "recompute modules": {
        "techniques": {"activation_checkpointing": "modules", "checkpoint_modules": ["layers.*.feed_forward"]}
    },
    "activations offload": {"techniques": {"activation_checkpointing": "offload"}},
    "host weights": {"techniques": {"cpu_offload": True}},
    "host optimizer": {"techniques": {"cpu_offload": "optimizer"}},
    "loss chunks": {"techniques": {"loss_chunks": 4}},
    "frozen": {"techniques": {"freeze": ["embedding"]}},
    "experts": {"experts": True},
    "experts recomputed": {"experts": True, "techniques": {"activation_checkpointing": "full"}},
    "float32": {"dtype": "float32"},
    "compile": {"dtype": "float32", "techniques": {"compile": True}},
    "memory_budget": {"dtype": "float32", "techniques": {"compile": True, "activation_checkpointing": "memory_budget"}},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16 compile": {"dtype": "bfloat16", "techniques": {"compile": True}},
    "float16": {"dtype": "float16"},
    "float8": {"dtype": "float8", "techniques": {"float8": "tensorwise"}},
}
COMPILED_ON_CUDA = "the compiler (inductor) has no code for the pretend device"


def case(name: str) -> Said:
    """Compare one technique with plain torch."""
    from meshwright import Layout

    here = machine()
    problem = Problem(**CASES[name])
    if problem.techniques.get("compile"):
        if problem.techniques.get("activation_checkpointing") == "memory_budget":
            here.needs_cuda(COMPILED_ON_CUDA)
        if here.is_dry:
            problem.techniques["compile_backend"] = "aot_eager"
    if problem.dtype == "float8":
        need("torchao", "float8")
    reference, bounds = limits(problem)
    return judge(laid_out(problem, Layout()), _trained(reference, problem), bounds)


def _trained(reference: Outcome, problem: Problem) -> Outcome:
    if problem.techniques.get("freeze"):
        return frozen_oracle(problem)
    return reference


def frozen_oracle(problem: Problem) -> Outcome:
    """Train in one process without the embedding's gradient."""
    model, outcome = plain_model(problem), Outcome()
    model.embedding.weight.requires_grad_(False)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = problem.optimizer(trained.values())
    for step in range(problem.steps):
        batch = {key: value.to(machine().device) for key, value in problem.batch(step).items()}
        loss = loss_sum(model, batch["tokens"], batch["labels"]) / (batch["labels"] != -100).sum()
        loss.backward()
        outcome.losses.append(loss.item())
        outcome.gradients = outcome.gradients or {name: p.grad.cpu() for name, p in trained.items()}
        outcome.norms.append(float(torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    outcome.parameters = {name: p.detach().cpu() for name, p in model.named_parameters()}
    return outcome


def judge(found: Outcome, reference: Outcome, bounds: dict[str, float]) -> Said:
    """Say how far an outcome is from the oracle's.

    Raises:
        AssertionError: beyond a bound; the message names the worst figures.
    """
    errors = errors_of(found, reference)
    beyond = sorted(((e / bounds[key], key, e) for key, e in errors.items() if not e <= bounds[key]), reverse=True)
    assert not beyond, "; ".join(f"{key}: {e:.2e} > {bounds[key]:.1e}" for _, key, e in beyond[:4])
    worst = max(errors, key=lambda key: errors[key] / bounds[key])
    figures = {"worst": worst, "error": errors[worst], "bound": bounds[worst], "loss": reference.losses[-1]}
    return figures, [f"worst: {worst}, {errors[worst]:.1e} of {bounds[worst]:.1e}"]


def dropout() -> Said:
    """Random draws are those of one process with the same seed, and recomputation draws them again."""
    from meshwright import Layout, parallelize

    def gradients(techniques: dict[str, Any]) -> dict[str, torch.Tensor]:
        model = parallelize(dropping, Layout(), techniques={**techniques, **precision}, seed=SEED)
        torch.manual_seed(5)
        model.forward_backward(batch)
        return {name: p.grad.detach().cpu() for name, p in model.named_parameters()}

    precision = {"precision": {"master": "float64", "compute": "float64"}}
    batch = Problem().batch(0)
    reference = gradients({})
    found = {}
    for mode in ("full", "selective_op", "offload"):
        errors = tensor_errors(gradients({"activation_checkpointing": mode}), reference)
        found[mode] = max(errors.values())
    assert max(found.values()) <= 1e-10, found
    other = parallelize(dropping, Layout(), techniques=precision, seed=SEED)
    torch.manual_seed(6)
    other.forward_backward(batch)
    moved = max(tensor_errors({n: p.grad.cpu() for n, p in other.named_parameters()}, reference).values())
    assert moved > 1e-3, "another seed changes nothing: nothing was dropped"
    return found, [f"recomputed with the same draws: {max(found.values()):.1e}"]


class Dropping(torch.nn.Module):
    """An embedding, blocks that drop, and a head."""

    def __init__(self, vocab: int, dim: int):
        super().__init__()
        self.embedding = torch.nn.Embedding(vocab, dim)
        self.layers = torch.nn.ModuleList(DroppingBlock(dim) for _ in range(2))
        self.head = torch.nn.Linear(dim, vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class DroppingBlock(torch.nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.norm, self.up, self.down = (
            torch.nn.LayerNorm(dim),
            torch.nn.Linear(dim, 2 * dim),
            torch.nn.Linear(2 * dim, dim),
        )
        self.drop = torch.nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


def dropping() -> torch.nn.Module:
    return Dropping(Problem().config.vocab_size, 32)


def low_bit(state: str) -> Said:
    """Train with AdamW's moments in few bits, ours against torchao's own optimizer on a plain module."""
    from meshwright import Layout, parallelize
    from meshwright.training.optimizer import make_optimizer

    need("torchao", "low-bit optimizer state")
    machine().needs_cuda("torchao compiles its optimizers, and the compiler has no code for the pretend device")
    import torchao.optim

    problem = Problem(dtype="float32", techniques={"optimizer_state": state})
    model = parallelize(problem.config, Layout(), techniques=problem.requested, seed=SEED, draw_on=DRAW_ON)
    groups = [{"params": list(model.parameters())}]
    named = list(model.named_parameters())
    ours = make_optimizer(groups, lr=LR, plan=model.plan.optimizer, named_parameters=named, weight_decay=0.01).optimizer
    one = plain_model(problem)
    kind = {"8bit": torchao.optim.AdamW8bit, "4bit": torchao.optim.AdamW4bit}[state]
    theirs = kind(one.parameters(), lr=LR, betas=tuple(ours.param_groups[0]["betas"]), weight_decay=0.01)
    losses = []
    for step in range(problem.steps):
        batch = problem.batch(step)
        mine = float(model.forward_backward(batch))
        model.optimizer_step(ours)
        moved = {key: value.to(machine().device) for key, value in batch.items()}
        loss = loss_sum(one, moved["tokens"], moved["labels"]) / (moved["labels"] != -100).sum()
        loss.backward()
        theirs.step()
        theirs.zero_grad()
        losses.append((mine, loss.item()))
    apart = max(abs(a - b) / abs(b) for a, b in losses)
    assert apart < 1e-3, losses
    return {"losses apart": apart}, [f"losses of ours and torchao's: {apart:.1e} apart"]


def checkpoint() -> Said:
    """A checkpoint comes back bit by bit: the next step, generation and evaluation are the same.

    Attention is computed by plain products, since CUDA's fused backwards add up in no fixed order.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from meshwright import Layout, load, parallelize, save

    need("safetensors", "a checkpoint")
    problem, results = Problem(dtype="bfloat16"), []
    with tempfile.TemporaryDirectory() as folder, sdpa_kernel(SDPBackend.MATH):
        for seed in (SEED, SEED + 4):
            model = parallelize(problem.config, Layout(), techniques=problem.requested, seed=seed)
            optimizer = torch.optim.AdamW(model.make_parameter_groups(), lr=LR, fused=not machine().is_dry)
            if seed == SEED:
                model.forward_backward(problem.batch(0))
                model.optimizer_step(optimizer, max_norm=1.0)
                save(model, str(Path(folder) / "step"), optimizer=optimizer)
            else:
                load(model, str(Path(folder) / "step"), optimizer=optimizer)
            after = float(model.forward_backward(problem.batch(1))), model.optimizer_step(optimizer).grad_norm
            said = model.generate([1, 2, 3], 8, temperature=0)
            results.append((after, float(model.evaluate(problem.batch(2))), said))
    assert results[0] == results[1], results
    return {"loss": results[0][1]}, []


def generation() -> Said:
    """Greedy generation and evaluation are those of plain torch."""
    from meshwright import Layout, parallelize

    problem = Problem()
    model = parallelize(problem.config, Layout(), techniques=problem.requested, seed=SEED, draw_on=DRAW_ON)
    one, device = plain_model(problem).eval(), machine().device
    said = [1, 2, 3]
    with torch.no_grad():
        for _ in range(8):
            said.append(int(one(torch.tensor([said], device=device))[0, -1].argmax()))
        batch = {key: value.to(device) for key, value in problem.batch(0).items()}
        expected = float(loss_sum(one, batch["tokens"], batch["labels"]) / (batch["labels"] != -100).sum())
    found, loss = model.generate([1, 2, 3], 8, temperature=0), float(model.evaluate(problem.batch(0)))
    assert found[-8:] == said[-8:], (found, said)
    assert abs(loss - expected) <= 1e-10 * expected, (loss, expected)
    return {"loss": loss}, []
