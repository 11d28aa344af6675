"""A module has one record: values by type, and a line for each change, which print(model) shows."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass

import torch
from torch import nn

from meshwright.core.record import ATTRIBUTE, changes_of, note, recall, remember, values_of, wrap
from meshwright.introspection.measurements import measurements_of


@dataclass(frozen=True)
class Colour:
    name: str


def doubled(forward):
    def doubled_forward(x):
        return 2 * forward(x)

    return doubled_forward


def test_values_are_kept_by_type_and_copies_go_their_own_way():
    module = nn.Linear(2, 2)
    assert recall(module, Colour) is None and not values_of(module)
    remember(module, Colour("red"))
    other = copy.copy(module)
    remember(other, Colour("blue"))
    assert recall(module, Colour) == Colour("red") and recall(other, Colour) == Colour("blue")
    assert [name for name in vars(module) if "meshwright" in name] == [ATTRIBUTE]


def test_a_wrapped_forward_keeps_a_name_of_its_own_and_the_signature_of_what_it_wraps():
    module = nn.Linear(2, 2)
    x = torch.randn(3, 2)
    plain = module(x)
    wrap(module, doubled(module.forward), "doubled")
    assert torch.equal(module(x), 2 * plain)
    assert module.forward.__name__ == module.forward.__code__.co_name == "doubled_forward"
    assert list(inspect.signature(module.forward).parameters) == list(
        inspect.signature(nn.Linear(2, 2).forward).parameters
    )


def test_changes_are_printed_once_each_beside_what_the_module_says_of_itself():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU())
    for _ in range(2):
        note(model[0], "doubled")
    note(model[1], "compiled")
    note(model, "recomputed")
    assert changes_of(model[0]) == ("doubled", "doubled")
    assert "Linear(in_features=2, out_features=2, bias=False, doubled)" in str(model)
    assert "ReLU(compiled)" in str(model) and "recomputed" in str(model)
    assert "doubled" in str(copy.deepcopy(model)), "a copy describes itself"
    made = copy.deepcopy(model)
    note(made[0], "halved")
    assert "halved" in str(made) and "halved" not in str(model)


def test_a_copy_of_a_model_is_measured_anew():
    model = nn.Linear(2, 2)
    known = measurements_of(model)
    assert measurements_of(model) is known
    for made in (copy.copy(model), copy.deepcopy(model)):
        assert measurements_of(made) is not known and measurements_of(made).model is made
