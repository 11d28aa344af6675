"""Arguments of transformers' forwards on layouts: logits of chosen tokens, embeddings in the place of token ids."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.families import config_of, on_cpu, some_tokens
from support.ranks import ranks

from meshwright import Layout, UnsupportedError, parallelize
from meshwright.distributed import apply_fsdp2, context_parallel_rows, init_distributed
from meshwright.distributed.mesh import data_position


def llama() -> torch.nn.Module:
    return on_cpu(config_of("llama")).double()


@pytest.mark.first("dp_shard=2")
@pytest.mark.parametrize("layout", [Layout(tp=2, dp_shard=1), Layout(dp_shard=2)], ids=str)
@ranks(2)
def test_logits_of_chosen_tokens_are_those_of_the_whole_sequence(layout):
    plain, laid_out = llama(), parallelize(llama(), layout, techniques={"precision": {"master": "float64"}})
    largest = 0.0
    for length in (4, 5):
        tokens = some_tokens(2, length)
        for kept in (0, 1, 2, torch.tensor([0, 2])):
            with torch.no_grad():
                wanted = plain(input_ids=tokens, logits_to_keep=kept).logits
                found = laid_out.module(input_ids=tokens, logits_to_keep=kept).logits
            assert found.shape == wanted.shape
            largest = max(largest, float((found - wanted).abs().max()))
    assert largest < 1e-6


@pytest.mark.all
@ranks(2)
def test_a_part_of_each_row_chooses_no_tokens():
    mesh = init_distributed(Layout(dp_shard=1, cp=2))
    model = apply_fsdp2(llama(), mesh)
    with (
        context_parallel_rows(model, {"input_ids": some_tokens(2, 8)}) as own,
        pytest.raises(UnsupportedError) as refused,
    ):
        model(**own, logits_to_keep=1)
    said = str(refused.value)
    assert "logits_to_keep = 1 with a part of each row" in said


def embeddings() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    given = torch.randn(4, 6, llama().config.hidden_size, generator=generator, dtype=torch.float64)
    return {"inputs_embeds": given, "labels": some_tokens(4, 6)}


@pytest.mark.all
@pytest.mark.parametrize("layout", [Layout(dp_shard=2), Layout(tp=2, dp_shard=1)], ids=str)
@ranks(2)
def test_batches_of_embeddings_train_as_in_one_process(layout):
    """A model handed over with weights: what is known of it was found out by rank 0, before it was laid out."""
    plain, batch, wanted = llama(), embeddings(), []
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        logits = plain(inputs_embeds=batch["inputs_embeds"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(float(loss))
    model = parallelize(llama(), layout, techniques={"precision": {"master": "float64"}})
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    rank, ranks = data_position(model.mesh)
    for _ in range(2):
        losses.append(float(model.forward_backward({k: v.chunk(ranks)[rank] for k, v in embeddings().items()})))
        model.optimizer_step(optimizer)
    assert losses == pytest.approx(wanted, rel=1e-6)
