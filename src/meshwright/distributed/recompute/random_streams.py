"""Read and restore the states of torch's random streams."""

from __future__ import annotations

import torch

from meshwright.core.devices import CPU, device_in_use, is_accelerator
from meshwright.core.torch_private import by_values


@by_values
def drawn_number() -> int:
    """Draw a number below 2^62 from the CPU's stream."""
    return int(torch.randint(2**62, (1,)))


@by_values
def streams() -> dict[str, torch.Tensor]:
    """Return the states of the CPU's stream and, once this process has used its accelerator, of that one's."""
    found = {CPU: torch.get_rng_state()}
    if is_accelerator(device := device_in_use()):
        found[device] = torch.get_device_module(device).get_rng_state()
    return found


@by_values
def restore_streams(states: dict[str, torch.Tensor]) -> None:
    for device, state in states.items():
        (torch.get_device_module(device) if is_accelerator(device) else torch).set_rng_state(state)
