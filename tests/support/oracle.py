"""The oracle: one process, plain torch, no code of ours but the model and its initial weights. And the one measure of equality."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def relative_errors(found: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> dict[str, float]:
    """Per tensor: ‖found − reference‖₂ / max(‖reference‖₂, 1e-6 · global norm of the reference)."""
    assert found.keys() == reference.keys(), found.keys() ^ reference.keys()
    whole = torch.stack([r.double().norm() for r in reference.values()]).norm().item()
    return {
        name: ((found[name].double() - r.double()).norm() / max(r.double().norm().item(), 1e-6 * whole)).item()
        for name, r in reference.items()
    }


def oracle_steps(model, microbatches_of_steps, make_optimizer, max_norm):
    """Train a plain module; ``microbatches_of_steps`` holds, per step, all microbatches of all ranks.

    Returns (losses, grad norms, gradients of the first step by name, parameters afterwards by name).
    """
    optimizer = make_optimizer(model.parameters())
    losses, norms, first = [], [], {}
    for pieces in microbatches_of_steps:
        count = sum(int((p["labels"] != -100).sum()) for p in pieces)
        total = 0.0
        for piece in pieces:
            inputs = {key: value for key, value in piece.items() if key != "labels"}
            logits = model(**inputs)
            loss = F.cross_entropy(logits.flatten(0, 1), piece["labels"].flatten(), ignore_index=-100, reduction="sum") / count
            loss.backward()
            total += loss.item()
        losses.append(total)
        if not first:
            first = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        norms.append(norm.item())
        if max_norm and norm > max_norm:
            for g in gradients:
                g.mul_(max_norm / (norm + 1e-6))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return losses, norms, first, {n: p.detach().clone() for n, p in model.named_parameters()}
