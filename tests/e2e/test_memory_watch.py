"""A run says what its first step's memory was held for, and what would help where there is not enough."""

from __future__ import annotations

import re

import pytest
from e2e_runs import Job, Result
from torch import Tensor

from meshwright.core.torch_private import has_no_values
from meshwright.distributed.step.whole_model import WholeModel

LINE = re.compile(
    r"memory of the first step on this rank; RSS.*: parameters .*iB, gradients .*, optimizer .*, activations ([\d.]+)"
    r" ([KM])iB(?: \(plan ([\d.]+) ([KM])iB\))?, logits .*iB"
)


@pytest.mark.all
def test_the_first_step_is_accounted_for_once(train):
    first, *others = train(2, {"steps": 2})
    ((found, unit, estimated, its_unit),) = LINE.findall(first.out)
    assert unit == (its_unit or unit) and float(estimated or found) == pytest.approx(float(found), rel=0.05)
    assert not any("memory of" in other.out for other in others)
    compiled = train(2, {"steps": 1, "techniques.compile": True, "techniques.compile_backend": "eager"})[0].out
    assert "memory of the first step on this rank (blocks are compiled: what they keep is not seen); RSS" in compiled
    assert re.search(r"\n  plan: the compiler chooses what compiled blocks keep for their backward", compiled)
    assert "fall apart into several graphs" not in compiled


@pytest.mark.all
def test_graph_breaks_are_said_once_in_words(train):
    compiled = {"techniques.compile": True, "techniques.compile_backend": "eager"}
    changes = {
        "steps": 2,
        "layout.dp_shard": 2,
        "layout.ep": 2,
        "model.moe.n_experts": 4,
        "logging.every": 1,
        **compiled,
    }
    said = train(2, changes)[0].out
    assert said.count("compiled blocks fall apart into several graphs (what is between them runs uncompiled):") == 1
    assert re.search(r"\n  \d+ × \S.*torch\.compiler\.disable", said)


class Short(Job):
    """There is not enough memory in step ``step``."""

    def __init__(self, changes: dict, step: int):
        super().__init__(changes)
        self.step = step

    def __call__(self) -> Result:
        forward, taken = WholeModel._loss_sum, 0

        def short(model: WholeModel, piece: dict[str, Tensor]) -> Tensor:
            nonlocal taken
            taken += not has_no_values(piece["tokens"])  # a dry run is no step
            loss = forward(model, piece)
            if taken == self.step and not has_no_values(piece["tokens"]):
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
            return loss

        WholeModel._loss_sum = short  # pyright: ignore[reportAttributeAccessIssue]
        try:
            return super().__call__()
        finally:
            WholeModel._loss_sum = forward


@pytest.mark.parametrize("step", [1, 2])
def test_out_of_memory_ends_with_what_it_was_held_for_and_two_switches(train, small, step):
    (result,) = train(1, job=Short(small({"steps": 3, "batch.microbatch": 8}), step))
    said = str(result.error)
    assert said.startswith("out of memory: DefaultCPUAllocator: can't allocate memory") and result.status == 1
    assert re.search(r"\n  activations +[\d.]+ [KM]iB +[\d.]+ [KM]iB\n", said) and "\n  gradients " in said
    assert (
        'techniques.activation_checkpointing = "full" saves about' in said
        and "batch.microbatch = 4 saves about" in said
    )
