"""Models nobody planned for, whose rows are cut: computed as in one process, or refused with the module."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.mixing import HEADS, Attention, Model, causal, in_documents, places, shifted
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright import ConfigError, Layout, UnsupportedError, plan
from meshwright.distributed.context.proof import prove, rehearse, rehearsed
from meshwright.distributed.context.rows import refuse_other_shapes
from meshwright.introspection.facts import model_facts
from meshwright.introspection.mixing.measure import measure_mixing, small_copy
from meshwright.introspection.premises.playing import FixedDraws, HeldRandomness
from meshwright.planning.context.plan import plan_methods


class OwnForward(Model):
    """A model whose attentions run by a forward of their own."""

    def __init__(self, kind: type[Attention], **options):
        super().__init__(causal)
        self.attentions = nn.ModuleList([kind(causal, **options) for _ in range(2)])


class ShiftsInTraining(Attention):
    def forward(self, x, documents):
        return super().forward(shifted(x) if self.training else x, documents)


class ShiftsInEvaluation(Attention):
    def forward(self, x, documents):
        return super().forward(x if self.training else shifted(x), documents)


class Recomputes(Attention):
    """Recomputes its own forward in training, which is then called by nobody that intercepts it."""

    def __init__(self, attend, reentrant: bool):
        super().__init__(attend)
        self.reentrant = reentrant

    def forward(self, x, documents):
        if not self.training:
            return super().forward(x, documents)
        return checkpoint(super().forward, x, documents, use_reentrant=self.reentrant)


class ByHandInTraining(Attention):
    def forward(self, x, documents):
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if not self.training:
            return super().forward(x, documents)
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(places(q) < 0, -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


BY_MODE = {
    "shift in training": (lambda: OwnForward(ShiftsInTraining), r"plain, and .* attentions.0 \(ShiftsInTraining\)"),
    "shift in evaluation": (
        lambda: OwnForward(ShiftsInEvaluation),
        r"plain, in evaluation mode, in rows of [0-9]+ tokens, and .* attentions.0 \(ShiftsInEvaluation\)",
    ),
    "recomputed": (lambda: OwnForward(Recomputes, reentrant=False), "the forward or backward fails: CheckpointError"),
    "recomputed, reentrant": (lambda: OwnForward(Recomputes, reentrant=True), r"the gradient of attentions.*is wrong"),
    "by hand in training": (
        lambda: OwnForward(ByHandInTraining),
        r"attentions.0 \(ByHandInTraining\) mixes or counts tokens",
    ),
}


@pytest.mark.parametrize("name", BY_MODE)
def test_training_and_evaluation_are_rehearsed(name):
    build, words = BY_MODE[name]
    facts = model_facts(build())
    made = plan(facts, Layout(dp_shard=1, cp=2)).context
    assert made is not None
    with pytest.raises(UnsupportedError, match=words) as error:
        prove(facts, made)
    assert "Set layout.cp = 1." in str(error.value)


def dropped(q, k, v, documents):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.4)


class Drops(Model):
    """Dropout of attention, of features and of whole tokens, and noise."""

    def __init__(self):
        super().__init__(dropped)

    def forward(self, tokens, positions=None, document_ids=None):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]) if positions is None else positions)
        x = F.dropout(x, 0.3, self.training)
        if self.training:
            x = x * (torch.rand(x.shape[:2])[..., None] > 0.2) + 0.1 * torch.randn_like(x)
        for attention in self.attentions:
            x = x + attention(x, document_ids)
        return self.head(x)


def test_random_draws_do_not_stand_in_the_way_of_a_rehearsal():
    model = small_copy(Drops())
    made = plan_methods(measure_mixing(model), 2, 1, "auto", "float64")
    for batch in rehearsed(model).values():
        assert max(rehearse(model.train(), made, batch).values()) < 1e-12


@pytest.mark.parametrize("fixed", [FixedDraws, lambda: HeldRandomness(torch.empty(0))], ids=["draws", "all"])
@pytest.mark.parametrize("grad", [False, True])
def test_fixed_draws_leave_fused_attention_as_it_is(fixed, grad):
    q, k, v = (torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=grad) for _ in range(3))
    with fixed():
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        once, again = (F.dropout(v.detach(), 0.5) for _ in range(2))
    assert torch.allclose(found, F.scaled_dot_product_attention(q, k, v, is_causal=True), rtol=1e-12)
    assert torch.equal(once, again)


# --- calls of attention in odd shapes


def without_heads(q, k, v, documents):
    return F.scaled_dot_product_attention(*(x.flatten(0, 1) for x in (q, k, v)), is_causal=True).view_as(v)


def in_groups(q, k, v, documents):
    return F.scaled_dot_product_attention(*(x[:, None] for x in (q, k, v)), is_causal=True)[:, 0]


def heads_as_rows(q, k, v, documents):
    mask = in_documents(places(q) >= 0, documents)
    mask = mask if documents is None else mask.repeat_interleave(HEADS, 0)
    return F.scaled_dot_product_attention(*(x.flatten(0, 1)[:, None] for x in (q, k, v)), attn_mask=mask).view_as(v)


@pytest.mark.parametrize(
    ("attend", "words"),
    [
        (without_heads, "attentions.0 calls attention on tensors of 3 dims"),
        (in_groups, "attentions.0 calls attention on tensors of 5 dims"),
        (heads_as_rows, "attentions.0 calls attention on 4 rows for a batch of 2"),
    ],
)
def test_heads_that_have_no_dim_of_their_own_are_computed_for_whole_rows(attend, words):
    facts = model_facts(Model(attend))
    made = plan(facts, Layout(dp_shard=1, cp=2)).context
    assert made is not None and {m.mixer.path for m in made.mixers} == {"attentions.0", "attentions.1"}
    assert words in made.mixers[0].mixer.why
    prove(facts, made)


def head_by_head(q, k, v, documents):
    """A call for each head."""
    heads = [F.scaled_dot_product_attention(*(x[:, n : n + 1] for x in (q, k, v)), is_causal=True) for n in (0, 1)]
    return torch.cat(heads, 1)


def twice(q, k, v, documents):
    once = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
    return once + F.scaled_dot_product_attention(v, q, k, is_causal=True)


def chunks(q, k, v, documents):
    place = torch.arange(q.shape[2])
    mask = (places(q) >= 0) & (place[:, None] // 6 == place // 6)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=in_documents(mask, documents))


class SharesAttention(Model):
    """Two blocks, one attention."""

    def __init__(self):
        super().__init__(chunks)
        self.attentions[1] = self.attentions[0]


class RecomputesBlocks(Model):
    """Recomputes its attentions by the code of the model: their forwards are called again."""

    def forward(self, tokens, positions=None, document_ids=None):
        positions = torch.arange(tokens.shape[1]) if positions is None else positions
        x = self.tokens(tokens) + self.places(positions)
        for attention in self.attentions:
            x = x + checkpoint(attention, x, document_ids, use_reentrant=False)
        return self.head(x)


@pytest.mark.first
@pytest.mark.parametrize("method", ["all_gather", "ring", "halo", "auto"])
@pytest.mark.parametrize(
    "build",
    [
        lambda: Model(head_by_head),
        lambda: Model(twice),
        lambda: Model(chunks),
        SharesAttention,
        lambda: RecomputesBlocks(causal),
    ],
    ids=["head by head", "twice", "chunks", "shared", "recomputed"],
)
def test_odd_calls_compute_what_one_process_does(build, method):
    model = small_copy(build())
    made = plan_methods(measure_mixing(model), 2, 1, method, "float64")
    for training in (True, False):
        for batch in rehearsed(model).values():
            assert max(rehearse(model.train(training), made, batch).values()) < 1e-12


def test_chunks_are_a_rule():
    assert {str(caller.rule) for caller in measure_mixing(Model(chunks)).callers} == {
        "causal in chunks of 6 per document"
    }


PREFIX = {
    "prefix": lambda distance, key: (distance >= 0) | (key < 5),
    "first tokens and a window": lambda distance, key: (distance >= 0) & ((distance < 5) | (key < 2)),
    "both sides": lambda distance, key: distance.abs() < 4,
    "others alone": lambda distance, key: distance > 0,
    "each head its own": lambda distance, key: torch.stack((distance >= 0, (distance >= 0) & (distance < 3)))[None],
}


@pytest.mark.parametrize("name", PREFIX)
def test_masks_of_no_known_rule_are_made_of_whole_rows(name):
    def attend(q, k, v, documents):
        mask = PREFIX[name](places(q), torch.arange(q.shape[2]))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    facts = model_facts(Model(attend))
    made = plan(facts, Layout(dp_shard=1, cp=2)).context
    assert made is not None and {m.mixer.path: m.kind for m in made.mixers} == {
        "attentions.0": "whole",
        "attentions.1": "whole",
    }
    assert "follows no rule of places" in made.mixers[0].mixer.why
    if name != "others alone":  # its first token sees nothing, and gives no number
        prove(facts, made)


# --- batches


def test_tensors_that_cannot_be_cut_are_refused():
    batch = {"tokens": torch.zeros(3, 23, dtype=torch.int64), "kinds": torch.zeros(3, 23), "scale": torch.zeros(3)}
    refuse_other_shapes(batch)
    for shape in ((3, 1, 23, 23), (3, 23, 23), (3, 4, 23)):
        with pytest.raises(
            ConfigError,
            match=r"has shape .*the 23 tokens of a row lie elsewhere than|has shape .*, but tokens have",
        ):
            refuse_other_shapes(batch | {"mask": torch.zeros(shape)})
