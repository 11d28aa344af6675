"""Constructors that copy whole layers, and random numbers of chosen tensors alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from meshwright.core.torch_private import fake_mode
from meshwright.introspection.constructor import Values, built, pass_over, record, seeded


class WithCopies(nn.Module):
    """Layers copied as a whole, behind a tensor with a value, as many constructors make them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([0.5, 2.0]))
        first = nn.Linear(6, 5)
        self.layers = nn.ModuleList([first, copy.deepcopy(first)])
        self.layers[1].weight.data.mul_(2.0)


def test_a_copy_shares_the_mode_of_its_tensor():
    """Otherwise the copied mode releases storages that it does not hold, and memory is overwritten later."""
    mode = fake_mode()
    with mode:
        weight = nn.Parameter(torch.empty(3) * torch.tensor(2.0))
        copied = copy.deepcopy(weight)
    assert copied.fake_mode is mode and copied is not weight


@pytest.mark.filterwarnings("error:Accessing the data pointer")
def test_layers_copied_as_a_whole_are_recorded():
    model, steps = record(WithCopies, 3)
    real = built(WithCopies, 3)
    values = Values(steps)
    with seeded(3):
        for step, _ in steps.needed({view.storage for view in steps.tensors.values()}, stream=steps.bytes_of):
            values.do(step)
    for name, tensor in real.state_dict().items():
        assert torch.equal(values.get(steps.tensors[name]), tensor), name
    assert all(parameter.is_meta for parameter in model.parameters())


def test_numbers_of_chosen_tensors_are_drawn_as_if_the_others_were_not():
    steps = record(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 3)[1]
    chosen = {steps.tensors[name].storage for name in ("1.weight", "1.bias")}
    values = Values(steps)
    with seeded(3):
        for step, is_needed in steps.needed(chosen, stream=chosen):
            (values.do if is_needed else pass_over)(step)
    alone = built(lambda: nn.Linear(4, 4), 3)
    assert torch.equal(values.get(steps.tensors["1.weight"]), alone.weight)
    assert torch.equal(values.get(steps.tensors["1.bias"]), alone.bias)
