"""What was done to each module can be read off the model: printed, in tracebacks, and in one attribute."""

from __future__ import annotations

import traceback
from typing import Any
from unittest.mock import patch

import torch
from support.ranks import ranks
from torch import nn

from meshwright import Layout, parallelize
from meshwright.core.record import ATTRIBUTE
from meshwright.models.decoder_config import DecoderConfig
from meshwright.verification.problem import RandomBatches

MODEL = DecoderConfig(256, 64, 2, 4, 2, 128, 64)
TECHNIQUES = {"activation_checkpointing": "full"}


@ranks(2)
def test_a_laid_out_model_says_what_was_done_to_it():
    model = parallelize(MODEL, Layout(dp_shard=1, tp=2), techniques=TECHNIQUES, seed=1)
    (part,) = model.parts
    seen: list[str] = []

    def core(*args: Any, **kwargs: Any) -> Any:
        seen.extend(frame.name for frame in traceback.extract_stack())
        raise KeyboardInterrupt

    attention = part.get_submodule("layers.0.attention.core")
    with patch.object(attention, "forward", core):
        try:
            model.forward_backward(dict(RandomBatches(256, 2, 8)(0)))
        except KeyboardInterrupt:
            torch.distributed.barrier()
    ours = {name for module in part.modules() for name in vars(module) if "meshwright" in name}
    text = str(part)
    lines = {line.strip() for line in text.splitlines()}
    assert "(wq): Linear(in_features=64, out_features=64, bias=False, column-parallel tp 2)" in lines
    assert "(wo): Linear(in_features=64, out_features=64, bias=False, row-parallel tp 2)" in lines
    assert "(embedding): Embedding(256, 64, vocabulary-parallel tp 2, local parameters)" in lines
    assert any(line.endswith("recomputed") for line in lines)
    assert {"recomputed_forward", "container_forward", "forward_with_local_parameters"} <= set(seen)
    assert "run" not in seen[seen.index("recomputed_forward") :]
    assert ours == {ATTRIBUTE}


def test_every_wrapped_forward_has_a_name_of_its_own(spmd):
    names = spmd(2, _names)[0]
    assert {"column_forward", "row_forward", "head_forward", "recomputed_forward"} <= names
    assert not names & {"run", "<lambda>", "forward"}


def _names() -> set[str]:
    model = parallelize(MODEL, Layout(dp_shard=1, tp=2), techniques=TECHNIQUES, seed=1)
    modules: list[nn.Module] = [module for part in model.parts for module in part.modules()]
    return {vars(module)["forward"].__code__.co_name for module in modules if "forward" in vars(module)}
