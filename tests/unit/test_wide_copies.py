"""Models whose code asks for float32 by name are measured on a copy in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.users import Attention, Block, User

from meshwright import Layout, plan
from meshwright.distributed.context.proof import prove as prove_context
from meshwright.distributed.pipeline.split import prove as prove_stages
from meshwright.distributed.tensor.parallel import prove
from meshwright.introspection.facts import model_facts


class FloatHead(User):
    def logits(self, x):
        return self.head(self.norm(x).float())


class FloatAttention(Attention):
    def queries_keys_values(self, x):
        q, k, v = super().queries_keys_values(x)
        return q.to(torch.float32), k.type(torch.float32), v.float()


class FloatInside(User):
    def __init__(self):
        super().__init__(lambda: Block(FloatAttention))


class FloatSoftmax(User):
    def logits(self, x):
        return F.log_softmax(super().logits(x), -1, dtype=torch.float32)


@pytest.mark.parametrize("kind", [FloatHead, FloatInside, FloatSoftmax])
@pytest.mark.parametrize("axis", ["tp", "cp", "pp"])
def test_a_copy_in_float64_computes(kind, axis):
    torch.manual_seed(0)
    model = kind()
    model.config.wide = kind.__name__
    facts = model_facts(model)
    made = plan(facts, Layout(dp_shard=1, **{axis: 2}))
    if made.tensor is not None:
        assert {planned.region.kind for one in made.tensor.kinds for planned in one.regions} >= {"attention"}
        prove(facts, made.tensor)
    if made.context is not None:
        prove_context(facts, made.context)
    if made.pipeline is not None:
        prove_stages(facts, made.pipeline, 1)
