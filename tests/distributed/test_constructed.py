"""What a constructor computes is what every layout begins with, to the last bit.

Beyond some size by the same laws, alike everywhere.
"""

from __future__ import annotations

import os
import warnings
from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import pytest
import torch
from support import constructors, families
from torch import nn

from meshwright import Layout, parallelize
from meshwright.core.names import clean
from meshwright.distributed.process.workers import WorkerFailed
from meshwright.distributed.process.world import get_world_info
from meshwright.distributed.weights import constructed
from meshwright.distributed.weights.shards import whole_on_first

SEED = 5
LAYOUTS = {
    "one rank": Layout(dp_shard=1),
    "fsdp": Layout(dp_shard=2),
    "ddp": Layout(dp_replicate=2, dp_shard=1),
    "tp": Layout(dp_shard=1, tp=2),
    "pp": Layout(dp_shard=1, pp=2),
    "fsdp tp": Layout(dp_shard=2, tp=2),
}


def of_transformers(family: str) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(families.config_of(family, use_cache=False))


MODELS = {kind.__name__: kind for kind in (*constructors.RECORDED, *constructors.RUN_WHOLE, *constructors.NEED_VALUES)}
MODELS |= {family: partial(of_transformers, family) for family in ("gpt2", "mixtral", "gemma2", "mpt")}


def plain(build):
    """What plain torch makes in one process."""
    torch.manual_seed(SEED)
    constructors.np.random.seed(SEED)
    model = build()
    return {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


FAULTS = {
    "weights by reset_parameters": lambda: patch.object(constructed, "builder_of", lambda model: None),
    "draws of what is overwritten left out": lambda: patch.object(constructed, "pass_over", lambda step: None),
    "every rank draws by itself": lambda: patch.object(
        constructed, "seeded", lambda seed: _seeded(seed + get_world_info()[0])
    ),
}
_seeded = constructed.seeded


def beginning(build, layout, fault="", limit=constructed.STREAM_ELEMENTS):
    """Parameters (whole; on rank 0) and buffers of a model at its start, and what was said."""
    with warnings.catch_warnings(record=True) as said, patch.object(constructed, "STREAM_ELEMENTS", limit):
        warnings.simplefilter("always")
        with FAULTS[fault]() if fault else nullcontext():
            model = parallelize(build, layout, seed=SEED)
    parameters = whole_on_first(dict(model.named_parameters()), differ=model.plan.pipeline is not None)
    found = {clean(name): buffer for part in model.parts for name, buffer in part.named_buffers()} | parameters
    return {name: tensor.detach().clone() for name, tensor in found.items()}, [str(one.message) for one in said]


def differences(found, wanted, layout):
    """Names of what is not the same; a stage of a pipeline has its own buffers only."""
    missing = [] if layout.pp > 1 else wanted.keys() - found.keys()
    return [*missing, *(name for name, value in found.items() if not torch.equal(value, wanted[name]))]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_every_layout_begins_with_what_the_constructor_computes(spmd, model, layout):
    build, asked = MODELS[model], LAYOUTS[layout]
    found, said = spmd(asked.world, beginning, build, asked)[0]
    wanted = plain(build)
    assert len(found) > 10 and not differences(found, wanted, asked)
    runs_whole = build in constructors.RUN_WHOLE and asked.world > 1
    assert any("runs whole on every rank" in line for line in said) == runs_whole


def without_launcher(build, layout):
    """As in a notebook, or in processes that torch.multiprocessing starts."""
    with patch.dict(os.environ):
        del os.environ["LOCAL_WORLD_SIZE"]
        return beginning(build, layout)


@pytest.mark.parametrize("layout", ["one rank", "fsdp"])
@pytest.mark.parametrize("build", constructors.RUN_WHOLE)
def test_a_constructor_runs_where_no_launcher_counts_processes(spmd, build, layout):
    asked = LAYOUTS[layout]
    found, _ = spmd(asked.world, without_launcher, build, asked)[0]
    assert len(found) > 10 and not differences(found, plain(build), asked)


@pytest.mark.kills("weights", "fault")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_shows(spmd, fault):
    build, layout = constructors.Applied, LAYOUTS["fsdp"]
    found, _ = spmd(layout.world, beginning, build, layout, fault)[0]
    assert differences(found, plain(build), layout)


@pytest.mark.all
@pytest.mark.parametrize("model", ["Applied", "TiedBefore", "Truncated", "Tables", "gpt2"])
def test_beyond_the_limit_every_layout_begins_alike_and_by_the_same_laws(spmd, model):
    """A constant is that constant; of drawn values the spread is the constructor's."""
    build = MODELS[model]
    wanted = plain(build)
    one, *others = [spmd(layout.world, beginning, build, layout, "", 0)[0][0] for layout in LAYOUTS.values()]
    for layout, found in zip(list(LAYOUTS.values())[1:], others, strict=True):
        assert not differences(found, one, layout)
    drawn = [
        name for name, value in wanted.items() if value.is_floating_point() and value.numel() > 200 and value.std() > 0
    ]
    assert drawn and all(torch.equal(one[name], value) for name, value in wanted.items() if value.unique().numel() == 1)
    for name in drawn:
        assert float(one[name].std()) == pytest.approx(float(wanted[name].std()), rel=0.3), name
        assert float(one[name].mean()) == pytest.approx(
            float(wanted[name].mean()), abs=0.3 * float(wanted[name].std())
        ), name
    assert sum(not torch.equal(one[name], wanted[name]) for name in drawn) > len(drawn) / 2


def misspelt():
    return constructors.Plain(widht=3)  # type: ignore[call-arg]


def test_what_a_real_build_raises_is_raised(spmd):
    with pytest.raises(WorkerFailed, match="unexpected keyword argument 'widht'"):
        spmd(1, beginning, misspelt, LAYOUTS["one rank"])


def test_elements_that_nothing_wrote_are_refused(spmd):
    with pytest.raises(
        WorkerFailed, match=r"the model itself' \(Forgetful\) was built on meta and nothing initialises its table"
    ):
        spmd(1, beginning, constructors.Forgetful, LAYOUTS["one rank"])


def test_random_numbers_of_the_caller_go_on_as_before():
    torch.manual_seed(1)
    parallelize(constructors.Applied, seed=SEED)
    after = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(after, torch.rand(3))
