"""Read and restore the states of torch's random streams."""

from __future__ import annotations

import torch


def streams() -> dict[str, torch.Tensor]:
    """Return the states of the CPU's stream and, once CUDA is initialized, of this GPU's."""
    found = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def restore_streams(states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
