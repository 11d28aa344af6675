"""Initial weights are a function of (seed, name, position): equal bit by bit on every layout, and made without ever
being whole.
"""

from __future__ import annotations

import ctypes
import gc
import re
import sys
from itertools import combinations
from pathlib import Path

import pytest
import torch
from support import families, foreign
from support.problems import DDP2, FSDP4, HSDP, ONE, SEED, TIED, UNTIED
from support.ranks import refusal
from support.train import collect
from torch import nn

from meshwright import ConfigError, UnsupportedError, parallelize
from meshwright.distributed.weights.shards import BLOCK_ELEMENTS
from meshwright.models.decoder_config import DecoderConfig, parameter_count


def torchs_own() -> nn.Module:
    """Its attention initialises itself by ``_reset_parameters``, parameters of submodules included."""
    return nn.TransformerEncoderLayer(6, 3, dim_feedforward=5)


MODELS = {
    "decoder": UNTIED,
    "tied decoder": TIED,
    # rows of many elements: parameters of several blocks, whose borders are not those of the shards
    "wide decoder": DecoderConfig(
        2101, 1030, 1, n_heads=5, n_kv_heads=1, hidden_dim=211, max_seq_len=16, tied_embeddings=True
    ),
    "foreign": foreign.on_meta,
    "tied foreign": foreign.on_meta_tied,
    "torch's own layer": torchs_own,
    "tied, of transformers": families.tied,
    "experts, of transformers": families.with_experts,
}


def initial(model, layout, seed):
    """Parameters and buffers by name (of rank 0 only), and whether every tie is one tensor."""
    made = parallelize(model, layout, seed=seed)
    values = collect(dict([*made.named_parameters(), *made.named_buffers()]))
    tied = all(
        made.parts[0].get_parameter(alias) is made.parts[0].get_parameter(fact.name)
        for fact in made.facts.parameters
        for alias in fact.aliases
    )
    return values, tied


@pytest.mark.all
@pytest.mark.parametrize("name", MODELS)
def test_every_layout_starts_bitwise_equal(spmd, name):
    (one, tied), *_ = spmd(1, initial, MODELS[name], ONE, SEED)
    assert tied
    for layout in (DDP2, FSDP4, HSDP):
        (values, tied), *_ = spmd(layout.world, initial, MODELS[name], layout, SEED)
        assert tied
        assert values.keys() == one.keys()
        assert [key for key in one if not torch.equal(values[key], one[key])] == []


def test_the_wide_decoder_has_parameters_of_several_blocks(spmd):
    (values, _), *_ = spmd(1, initial, MODELS["wide decoder"], ONE, SEED)
    assert max(value.numel() for value in values.values()) > 2 * BLOCK_ELEMENTS


@pytest.mark.parametrize(("name", "constant"), [("decoder", "norm"), ("foreign", "first|second|table")])
def test_seeds_and_names_make_different_weights(spmd, name, constant):
    (one, _), *_ = spmd(1, initial, MODELS[name], ONE, SEED)
    (again, _), *_ = spmd(1, initial, MODELS[name], ONE, SEED)
    (other, _), *_ = spmd(1, initial, MODELS[name], ONE, SEED + 1)
    for key in one:
        assert torch.equal(one[key], again[key])
        assert torch.equal(one[key], other[key]) == bool(re.search(constant, key)), key
    drawn = [key for key in one if not re.search(constant, key)]
    for first, second in combinations(drawn, 2):
        if one[first].shape == one[second].shape:
            assert not torch.equal(one[first], one[second]), f"{first} and {second} are the same"


def test_the_decoder_starts_with_the_spread_that_its_law_states(spmd):
    (values, _), *_ = spmd(1, initial, MODELS["wide decoder"], ONE, SEED)
    assert values["embedding.weight"].std().item() == pytest.approx(0.02, rel=0.01)
    assert values["layers.0.attention.wo.weight"].std().item() == pytest.approx(0.02 / 2**0.5, rel=0.01)
    assert values["embedding.weight"].mean().abs().item() < 1e-4
    assert torch.equal(values["norm.weight"], torch.ones(1030))


# --- what cannot be initialised


class Mute(nn.Module):
    """A parameter of its own, and nothing that gives it a value."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.empty(4))


class Forgetful(nn.Linear):
    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            nn.init.ones_(self.weight)  # and the bias?


def refused(factory) -> str:
    return refusal(lambda: parallelize(factory, ONE), UnsupportedError)


def mute() -> nn.Module:
    return nn.ModuleDict({"body": Mute()})


def forgetful() -> nn.Module:
    return nn.ModuleDict({"body": Forgetful(4, 4)})


@pytest.mark.parametrize(
    ("factory", "module", "parameters"),
    [(mute, "'body' (Mute)", "its scale"), (forgetful, "'body' (Forgetful)", "its bias")],
)
def test_what_nothing_initialises_is_refused_by_name(spmd, factory, module, parameters):
    text = spmd(1, refused, factory)[0]
    assert module in text
    assert parameters in text
    assert "reset_parameters()" in text
    assert "build the model on the CPU" in text


class Lawful(nn.Module):
    """Says how its parameters start, and keeps a buffer of its own."""

    def __init__(self, kind: str = "normal"):
        super().__init__()
        self.scale, self.kind = nn.Parameter(torch.empty(6, 4)), kind
        self.register_buffer("steps", torch.empty(4), persistent=False)

    def reset_parameters(self) -> None:
        self.steps.copy_(torch.arange(4.0))

    def weight_law(self, name: str) -> tuple[str, float]:
        return self.kind, 0.5

    def forward(self, tokens):
        return self.scale[tokens] + self.steps


class Unset(Lawful):
    reset_parameters = None


class Unlawful(Lawful):
    def __init__(self):
        super().__init__("uniform")


def lawful(layout) -> tuple:
    model = parallelize(Lawful, layout, seed=SEED)
    return collect(dict(model.named_parameters())), dict(model.parts[0].named_buffers())["steps"].tolist()


def test_a_law_of_weights_leaves_no_buffer_unwritten(spmd):
    one, two = spmd(1, lawful, ONE)[0], spmd(2, lawful, DDP2)[0]
    assert one[1] == two[1] == [0.0, 1.0, 2.0, 3.0] and torch.equal(one[0]["scale"], two[0]["scale"])
    assert "its steps" in spmd(1, refused, Unset)[0]


def unlawful() -> str:
    return refusal(lambda: parallelize(Unlawful, ONE), ConfigError)


def test_a_law_that_says_something_else_is_refused(spmd):
    assert spmd(1, unlawful)[0] == "weight_law('scale') of Unlawful says 'uniform': legal are 'normal' and 'constant'"


# --- memory

# two parameters make most of it, so that a single whole one would be noticed too
LARGE = DecoderConfig(40_000, 512, 2, n_heads=8, n_kv_heads=8, hidden_dim=1536, max_seq_len=64)
MIB = 2**20
SLACK = 32 * MIB
"""For the checksums of the audit (three int64 copies of a block) and what else torch allocates at first use."""


def peak_of_building(layout) -> int:
    """Bytes by which this rank's resident memory rose at its highest while a model was made."""
    parallelize(UNTIED, layout)  # what is allocated once is allocated now
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or what earlier jobs freed would be filled first, unseen
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = status("VmRSS")
    made = parallelize(LARGE, layout)
    return status("VmHWM") - before if made else 0


def status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


@pytest.mark.all
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason=f"no high-water mark of memory on {sys.platform}"
)
def test_a_rank_holds_its_share_and_one_block_while_it_builds(spmd, measured):
    total = 4 * parameter_count(LARGE)
    allowed = total // 4 + 4 * BLOCK_ELEMENTS + SLACK
    largest = 4 * LARGE.vocab_size * LARGE.dim
    assert total // 4 + largest > 1.2 * allowed, "a whole parameter would go unnoticed"
    peaks = spmd(4, peak_of_building, FSDP4)
    measured("fsdp4", "peak of building, of the whole model", {"resident": max(peaks) / total})
    assert max(peaks) <= allowed, [f"{peak / MIB:.0f} MiB of {allowed / MIB:.0f}" for peak in peaks]
    assert min(peaks) > total // 5, "the model was not built"
