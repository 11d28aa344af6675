"""The loss of a text over all its tokens: that of plain torch in one process, on every layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.problems import DDP2, FSDP2, ONE
from support.ranks import ranks
from torch.nn import functional as F

from meshwright import Layout, parallelize
from meshwright.data import Stream
from meshwright.data.tokenizers import ByteTokenizer, IdTokenizer
from meshwright.models.decoder import Decoder
from meshwright.models.decoder_config import DecoderConfig
from meshwright.training.evaluation import Evaluation, ToTheEnd, evaluate_rows
from meshwright.training.feed import HeldOut

SEQ = 16
LENGTHS = (61, 3, 150, 17)
"""231 tokens: 14 rows and a last one of 7 tokens, which ranks and batches share unequally."""
DECODER = DecoderConfig(257, 32, 2, 4, 2, 48, SEQ, qk_norm=True)
LAID_OUT = {
    "one": ONE,
    "ddp": DDP2,
    "fsdp": FSDP2,
    "fsdp4": Layout(dp_shard=4),
    "tp": Layout(tp=2, dp_shard=1),
    "pp": Layout(pp=2, dp_shard=1),
    "cp": Layout(cp=2, dp_shard=1),
    "tp x fsdp": Layout(tp=2, dp_shard=2),
}
DOUBLE = {"precision": {"master": "float64"}}


def text(kind: type[Stream] = Stream) -> Stream:
    tokens = np.random.default_rng(0).integers(0, 256, sum(LENGTHS)).astype(np.uint16)
    offsets = np.cumsum([0, *LENGTHS]).astype(np.int64)
    tokens[offsets[1:] - 1] = 256
    return kind("text", tokens, offsets)


def evaluated(layout, rows) -> Evaluation:
    model = parallelize(DECODER, layout, techniques=DOUBLE, seed=4)
    split = text(ToTheEnd)
    return evaluate_rows(model, [HeldOut("text", split, split.n_samples(SEQ))], SEQ, ByteTokenizer(), rows)


def by_plain_torch() -> tuple[float, int, int, float]:
    """The mean over all tokens, their number and that of their bytes, and the mean of the rows' means."""
    model = parallelize(DECODER, ONE, techniques=DOUBLE, seed=4)
    plain = Decoder(DECODER).double().eval()
    plain.load_state_dict(model.state_dict())
    losses, size, means = [], 0, []
    stream = text()
    of_token = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    for begin in range(0, stream.n_tokens, SEQ):
        end = min(begin + SEQ, stream.n_tokens)
        tokens, documents = torch.tensor(stream.tokens[begin:end].astype(np.int64)), of_token[begin:end]
        own = []
        for document in sorted(set(documents)):
            (places,) = np.nonzero(documents == document)
            logits = plain(tokens[places].unsqueeze(0))[0]
            for place, of_place in zip(places, logits, strict=True):
                following = begin + place + 1
                if following < stream.n_tokens and of_token[following] == document:
                    target = int(stream.tokens[following])
                    own.append(float(F.cross_entropy(of_place, torch.tensor(target))))
                    size += target < 256
        losses += own
        means += [sum(own) / len(own)] if own else []
    return sum(losses) / len(losses), len(losses), size, sum(means) / len(means)


@pytest.mark.first("4-one")
@pytest.mark.parametrize("name", LAID_OUT)
@pytest.mark.parametrize("rows", [1, 4])
def test_every_layout_computes_the_mean_over_all_tokens(spmd, name, rows):
    with torch.no_grad():
        ((loss, tokens, size, mean_of_means),) = spmd(1, by_plain_torch)
    assert tokens == sum(LENGTHS) - len(LENGTHS) and abs(mean_of_means - loss) > 1e-4
    for found in spmd(LAID_OUT[name].world, evaluated, LAID_OUT[name], rows):
        assert abs(found.loss - loss) <= 1e-10 * loss
        assert (found.tokens, found.bytes, found.rows) == (tokens, size, 15)
        assert found.bits_per_byte == pytest.approx(loss * tokens / np.log(2) / size, rel=1e-10)


@ranks(1)
def test_a_text_shorter_than_a_row_is_evaluated():
    model = parallelize(DECODER, ONE, techniques=DOUBLE, seed=4)
    split = ToTheEnd("text", text().tokens[:9], np.array([0, 9]))
    found = evaluate_rows(model, [HeldOut("text", split, split.n_samples(SEQ))], SEQ, IdTokenizer(257, 256), 2)
    rows = split.rows(np.zeros(3, dtype=np.int64), SEQ)
    assert (found.rows, found.bytes, found.bits_per_byte) == (1, None, None) and found.tokens == 8
    assert all(value.shape == (3, SEQ) for value in rows.values())
    assert (rows["document_ids"][:, 9:] == -1).all() and (rows["labels"][:, 9:] == -100).all()
