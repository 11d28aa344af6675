"""Ids outside the vocabulary: one sentence, the same on every rank, on every layout, before any model code runs."""

from __future__ import annotations

import pytest
import torch
from support.users import VOCABULARY, User
from support.written_out import GPT, GPTConfig

from meshwright import ConfigError, Layout, parallelize
from meshwright.distributed import apply_tensor_parallel, init_distributed
from meshwright.distributed.mesh import data_position
from meshwright.introspection.facts import model_facts

FP64 = {"precision": {"master": "float64", "compute": "float64", "reduce": "float64"}}
LAYOUTS = {
    "dp_replicate": (2, {"dp_replicate": 2, "dp_shard": 1}, {}),
    "dp_shard": (2, {"dp_shard": 2}, {}),
    "tp": (2, {"tp": 2, "dp_shard": 1}, {}),
    "tp in chunks, whole sequences": (2, {"tp": 2, "dp_shard": 1}, {"sequence_parallel": False, "loss_chunks": 2}),
    "cp": (2, {"cp": 2, "dp_shard": 1}, {}),
    "pp": (2, {"pp": 2, "dp_shard": 1}, {}),
    "dp_shard and tp": (4, {"dp_shard": 2, "tp": 2}, {}),
}
VALUES = {
    ("labels", -1): "the label -100",
    ("labels", -101): "the label -100",
    ("labels", VOCABULARY): "the tokenizer has more ids",
    ("labels", 2**31): "the tokenizer has more ids",
    ("tokens", -1): "padding needs an id",
    ("tokens", VOCABULARY): "the tokenizer has more ids",
    ("tokens", 2**31): "the tokenizer has more ids",
}
DTYPES = {
    ("labels", torch.int32): "batch['labels'].long()",
    ("labels", torch.float32): "batch['labels'].long()",
    ("tokens", torch.float32): "batch['tokens'].long()",
}


def unconfigured():
    """A model that states its vocabulary nowhere."""
    torch.manual_seed(0)
    model = User().double()
    del model.config
    return model


def refusals(sizes, techniques):
    """What each bad batch is answered with; and the loss of a good one behind them all."""
    model = parallelize(unconfigured(), Layout(**sizes), techniques=FP64 | techniques, audit=False)
    rank, ranks = data_position(model.mesh)
    tokens = torch.arange(24).view(4, 6) % VOCABULARY
    good = {"tokens": tokens, "labels": tokens.clone()}

    def answer(batch):
        try:
            return float(model.forward_backward({key: value.chunk(ranks)[rank] for key, value in batch.items()}).loss)
        except ConfigError as refusal:
            return str(refusal)

    found = {}
    for key, value in VALUES:
        changed = good[key].clone()
        changed[3, 2] = value  # on one data rank alone
        found[key, value] = answer(good | {key: changed})
    for key, dtype in DTYPES:
        found[key, dtype] = answer(good | {key: good[key].to(dtype)})
    return found, answer(good)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_says_the_same_sentence(layout, spmd):
    world, sizes, techniques = LAYOUTS[layout]
    results = spmd(world, refusals, sizes, techniques)
    assert len({repr(found) for found, _ in results}) == 1
    found, loss = results[0]
    for (key, value), words in VALUES.items():
        said = found[key, value]
        assert f"batch['{key}'] holds {value} in row" in said and f"0 to {VOCABULARY - 1} (" in said and words in said
    for which, words in DTYPES.items():
        assert words in found[which]
    assert all(isinstance(after, float) and after == loss for _, after in results)


def of_the_public_call(token):
    """The cut embedding in a loop of one's own, where nobody opens a step."""
    mesh = init_distributed(Layout(tp=2, dp_shard=1))
    torch.manual_seed(0)
    model = apply_tensor_parallel(unconfigured(), mesh)
    tokens = torch.zeros(1, 6, dtype=torch.int64)
    tokens[0, 3] = token
    return bool(model(tokens).isnan().any())


@pytest.mark.all
def test_a_cut_embedding_gives_no_zeros_for_an_id_that_nobody_has(spmd):
    for token, expected in ((3, False), (-1, True), (VOCABULARY, True)):
        assert spmd(2, of_the_public_call, token) == [expected, expected]


def test_labels_may_be_those_of_a_wider_head():
    model = unconfigured()
    assert (model_facts(model).vocab_size, model_facts(model).label_ids) == (VOCABULARY, VOCABULARY)
    model = unconfigured()
    model.head = torch.nn.Linear(16, VOCABULARY + 8)
    assert (model_facts(model).vocab_size, model_facts(model).label_ids) == (VOCABULARY, VOCABULARY + 8)
    written = GPT(GPTConfig())
    del written.config
    assert model_facts(written).vocab_size == 48, "the table of positions is given no tokens"
