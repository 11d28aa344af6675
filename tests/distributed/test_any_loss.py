"""Losses of one's own over any output and batch: sums and means, equal to one process; wrong declarations refused."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from support.own_models import KINDS, ROWS, ConvNet, TwoHeads, built, computed, ids, scores_of, squares
from support.ranks import ranks
from support.ranks import told as said
from support.written_out import GPT, GPTConfig
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright import ConfigError, Layout, Loss, UnsupportedError, parallelize, plan
from meshwright.distributed.loss.declared import DeclaredLosses
from meshwright.distributed.mesh import data_position

EXACT = 1e-10
FP64 = {"precision": {"master": "float64", "compute": "float64", "reduce": "float64"}}
MEAN = Loss(lambda output, batch: F.cross_entropy(getattr(output, "logits", output), batch["labels"]), reduction="mean")
SUM = Loss(
    lambda output, batch: F.cross_entropy(getattr(output, "logits", output), batch["labels"], reduction="sum"),
    reduction="sum",
)
OWN = Loss(reduction="mean")
HEADS = {
    "classes": Loss(lambda output, batch: F.cross_entropy(scores_of(output)[0], batch["labels"]), reduction="mean"),
    "far": Loss(
        lambda output, batch: F.mse_loss(scores_of(output)[1], batch["far"], reduction="sum"),
        reduction="sum",
        count="rows",
        weight=0.3,
    ),
}


def plain_sum(logits, labels):
    return F.cross_entropy(logits, labels, reduction="sum")


LOSSES = {
    "vit": {"own": OWN, "mean": MEAN, "cross entropy": None},
    "dit": {
        "sum": Loss(squares, reduction="sum", count="weights"),
        "mean": Loss(
            lambda output, batch: squares(output, batch) / batch["weights"].sum(),
            reduction="mean",
            count=lambda batch: batch["weights"].sum(),
        ),
    },
    "bert": {"own": OWN, "sum": SUM, "cross entropy": None},
    "t5": {"own": OWN},
    "conv": {"mean": MEAN, "sum": SUM, "plain": plain_sum},
    "heads": {"both": HEADS},
}
ONE, DDP, HSDP = {"dp_shard": 1}, {"dp_replicate": 2, "dp_shard": 1}, {"dp_replicate": 2, "dp_shard": 2}
LAYOUTS = {
    1: {"one": (ONE, {}, 3)},
    2: {
        "ddp": (DDP, {}, 0),
        "ddp in pieces": (DDP, {}, 1),
        "zero 1": ({"dp_shard": 2}, {"zero_stage": 1}, 3),
        "zero 2": ({"dp_shard": 2}, {"zero_stage": 2}, 1),
        "fsdp": ({"dp_shard": 2}, {}, 0),
        "zero 3 in pieces": ({"dp_shard": 2}, {"zero_stage": 3}, 1),
    },
    4: {"hsdp": (HSDP, {}, 0), "hsdp in pieces": (HSDP, {}, 1)},
}


def laid_out(make, sizes, options, loss, rows=0):
    return parallelize(
        built(make), Layout(**sizes), techniques=FP64 | options, loss_fn=loss, microbatch_rows=rows, audit=False
    )


def share(model, batch):
    rank, ranks = data_position(model.mesh)
    return {key: value.chunk(ranks)[rank] for key, value in batch.items()}


def gradients(model):
    return {
        name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def worst(found, expected):
    """The largest relative error of a loss and gradients, and where."""
    norm = torch.stack([value.norm() for name, value in expected.items() if name != "loss"]).norm()
    errors = {
        name: float((found[name] - value).norm() / max(value.norm(), 1e-6 * norm)) for name, value in expected.items()
    }
    errors |= dict.fromkeys(found.keys() ^ expected.keys(), math.inf)
    return max((error, name) for name, error in errors.items())


def errors(name, layouts, mutant=None):
    """The worst error of each loss in each layout."""
    kind = KINDS[name]
    expected, found = computed(kind), {}
    for how, loss in LOSSES[name].items():
        for layout, (sizes, options, rows) in layouts.items():
            with MUTANTS[mutant]():
                model = laid_out(kind.make, sizes, options, loss, rows)
                step = model.forward_backward(share(model, kind.batch()))
            found[f"{how} on {layout}"] = worst({"loss": step.loss} | gradients(model), expected)
    return found


@pytest.mark.parametrize("world", LAYOUTS)
@pytest.mark.parametrize("name", KINDS)
def test_any_model_and_loss_equals_one_process(name, world, spmd):
    for found in spmd(world, errors, name, LAYOUTS[world]):
        assert {where: error for where, error in found.items() if not error[0] <= EXACT} == {}


# --- mutants


def own_counts_alone():
    """Each rank divides by its own count, as if no other had rows."""
    whole = DeclaredLosses.begin
    return patch.object(DeclaredLosses, "begin", lambda self, counts: whole(self, [count / 2 for count in counts]))


def mean_taken_for_a_sum():
    """A microbatch's mean is not multiplied by its count."""
    whole = DeclaredLosses._sum

    def summed(self, name, output, batch):
        return whole(self, name, output, batch) / (self.count(name, batch) or 1.0)

    return patch.object(DeclaredLosses, "_sum", summed)


MUTANTS = {
    None: lambda: patch.object(DeclaredLosses, "begin", DeclaredLosses.begin),
    "own counts": own_counts_alone,
    "a mean for a sum": mean_taken_for_a_sum,
}


@pytest.mark.parametrize("mutant", ["own counts", "a mean for a sum"])
def test_wrong_counts_are_seen(mutant, spmd):
    layouts = {"in pieces": ({"dp_shard": 2}, {}, 3)}
    (found, _) = spmd(2, errors, "conv", layouts, mutant)
    assert found["mean on in pieces"][0] > 1e-3


# --- outputs


@ranks(2)
def test_tuples_dicts_and_objects_with_several_losses():
    kind, found = KINDS["heads"], {}
    for returns in ("tuple", "dict", "object"):
        for sizes in (DDP, {"dp_shard": 2}):
            model = laid_out(functools.partial(TwoHeads, returns), sizes, {}, HEADS, 2)
            step = model.forward_backward(share(model, kind.batch()))
            error = worst({"loss": step.loss} | gradients(model), computed(kind))
            parts = float(sum(step.parts.values()) - step.loss)
            found[returns, *sizes] = (*error, list(step.parts), parts)
    for where, (error, name, parts, difference) in found.items():
        assert error <= EXACT, (where, name)
        assert parts == ["classes", "far"] and abs(difference) < 1e-12


@ranks(2)
def test_a_model_that_returns_its_own_mean_loss():
    """A model that returns its own mean loss and nothing else; evaluated too."""
    labels = torch.where(torch.arange(ROWS) % 4 == 1, -100, ids(1, 5, ROWS))
    batch = {"features": KINDS["heads"].batch()["features"], "labels": labels}
    plain = built(functools.partial(TwoHeads, "loss"))
    expected = plain(**batch)
    expected.backward()
    model = laid_out(functools.partial(TwoHeads, "loss"), {"dp_shard": 2}, {}, OWN, 2)
    step = model.forward_backward(share(model, batch))
    wanted = {"loss": expected.detach()} | {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    error = worst({"loss": step.loss} | gradients(model), wanted)
    evaluated = abs(float(model.evaluate(share(model, batch))) - expected.item())
    empty = batch | {"labels": torch.full_like(labels, -100)}
    count, told = step.tokens, said(lambda: model.forward_backward(share(model, empty)))
    assert error[0] <= EXACT and evaluated < 1e-12 and count == 6
    assert "0 / 0" in told


@ranks(2)
def test_a_head_that_no_loss_uses_is_left_alone_or_refused():
    """Only one head is trained: by FSDP as in one process; DDP would reduce nothing of the other's bucket."""
    kind, told = KINDS["heads"], ""
    plain = built(TwoHeads)
    expected = F.cross_entropy(plain(kind.batch()["features"])[0], kind.batch()["labels"])
    expected.backward()
    wanted = {"loss": expected.detach()} | {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    found = {}
    for how, sizes, options in (
        ("fsdp", {"dp_shard": 2}, {}),
        ("frozen", DDP, {"freeze": ("depth.*",)}),
        ("", DDP, {}),
    ):
        model = laid_out(TwoHeads, sizes, options, HEADS["classes"], 2)
        step = said(lambda model=model: model.forward_backward(share(model, kind.batch())))
        if isinstance(step, str):
            told = step
        else:
            found[how] = worst({"loss": step.loss} | gradients(model), wanted)
    assert {how: error for how, error in found.items() if not error[0] <= EXACT} == {}
    assert list(found) == ["fsdp", "frozen"]
    assert "the loss does not use depth.weight, depth.bias (2 of the trained parameters)" in told


class WritesIntoItsInput(ConvNet):
    """Normalises its images in place."""

    def forward(self, images):
        images -= images.mean((1, 2, 3), keepdim=True)
        return super().forward(images)


def smooth(output, batch):
    """Penalise gradients with respect to the images that have a label."""
    (slopes,) = torch.autograd.grad(output.sum(), batch["images"], create_graph=True)
    return F.cross_entropy(output, batch["labels"]) + slopes[batch["labels"] >= 0].square().flatten(1).sum(1).mean()


@pytest.mark.fast
@pytest.mark.parametrize("sizes", [DDP, {"dp_shard": 2}], ids=["ddp", "fsdp"])
@pytest.mark.parametrize("kind", [WritesIntoItsInput, ConvNet])
@ranks(2)
def test_inputs_are_written_by_the_forward_or_have_gradients_that_the_loss_takes(sizes, kind):
    batch, loss = KINDS["conv"].batch(), MEAN if kind is WritesIntoItsInput else Loss(smooth, reduction="mean")
    batch["images"].requires_grad_(kind is ConvNet)
    plain, own = built(kind), {key: value.clone() for key, value in batch.items()}
    expected = loss.fn(plain(own["images"]), own)
    expected.backward()
    model = laid_out(kind, sizes, {}, loss)
    step = model.forward_backward(share(model, batch))
    wanted = {"loss": expected.detach()} | {name: p.grad for name, p in plain.named_parameters()}
    assert worst({"loss": step.loss} | gradients(model), wanted)[0] <= EXACT


class Turned(ConvNet):
    """Turns its images by complex numbers: a buffer, a parameter, or a parameter of real pairs."""

    def __init__(self, kind: str):
        super().__init__()
        turn = torch.polar(torch.ones(8), torch.arange(8.0) / 3)
        self.register_buffer("turn", turn if kind == "buffer" else None)
        self.pairs = nn.Parameter(torch.view_as_real(turn)) if kind == "pairs" else None
        self.whole = nn.Parameter(turn) if kind == "parameter" else None

    def forward(self, images):
        turn = self.turn if self.turn is not None else torch.view_as_complex(self.pairs)
        return super().forward((images * turn).imag)


@pytest.mark.parametrize("sizes", [DDP, {"dp_shard": 2}], ids=["ddp", "fsdp"])
@ranks(2)
def test_complex_numbers_keep_their_imaginary_part(sizes):
    """Buffers stay complex where a model is cast; parameters are refused, and kept as pairs equal one process."""
    batch = KINDS["conv"].batch()
    told = said(lambda: laid_out(functools.partial(Turned, "parameter"), sizes, {}, MEAN))
    assert "parameter 'whole' is complex64" in told and "torch.view_as_complex(self.weight)" in told
    for kind in ("buffer", "pairs"):
        torch.manual_seed(0)
        single = Turned(kind).float()
        plain = copy.deepcopy(single).double()
        expected = MEAN.fn(plain(batch["images"]), batch)
        expected.backward()
        model = parallelize(single, Layout(**sizes), techniques=FP64, loss_fn=MEAN, audit=False)
        step = model.forward_backward(share(model, batch))
        wanted = {"loss": expected.detach()} | {name: p.grad for name, p in plain.named_parameters()}
        assert worst({"loss": step.loss} | gradients(model), wanted)[0] <= EXACT, kind


class CutInViews(ConvNet):
    """Reshapes by -1, which no tensor without elements allows."""

    def forward(self, images):
        return super().forward(images.view(len(images), images.shape[1], -1, images.shape[3]))


@ranks(2)
def test_a_rank_without_rows_is_refused_in_words_where_the_model_takes_none():
    batch, told = KINDS["conv"].batch(), {}
    for make in (KINDS["conv"].make, CutInViews):
        model = laid_out(make, DDP, {}, MEAN)
        model.forward_backward(share(model, batch))
        rank = data_position(model.mesh)[0]
        leaves = patch.object(model._runner, "forward_backward", side_effect=ConfigError("it would wait for the other"))
        with leaves if make is CutInViews and rank == 0 else contextlib.nullcontext():
            few = {key: value[:1] if rank == 0 else value[:0] for key, value in batch.items()}
            told[make] = said(lambda model=model, few=few: model.forward_backward(few))
    assert not isinstance(told[KINDS["conv"].make], str)
    assert rank == 0 or "this rank has none of the step's rows" in told[CutInViews]
    assert rank == 0 or "a row for each data rank at least" in told[CutInViews]


@pytest.mark.parametrize("sizes", [{"dp_shard": 2}, DDP], ids=["fsdp", "ddp"])
@ranks(2)
def test_steps_go_on_after_an_evaluation_in_inference_mode(sizes):
    batch = KINDS["conv"].batch()
    model = laid_out(KINDS["conv"].make, sizes, {}, MEAN)
    with torch.inference_mode():
        model.evaluate(share(model, batch))
    step = model.forward_backward(share(model, batch))
    assert worst({"loss": step.loss} | gradients(model), computed(KINDS["conv"]))[0] <= EXACT


# --- beside other axes


def gpt_loss(reduction):
    def loss(output, batch):
        return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), reduction=reduction)

    return Loss(loss, reduction=reduction)


@pytest.mark.first("zbv")
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"tp": 2, "dp_shard": 1}, {}),
        ({"pp": 2, "dp_shard": 1}, {}),
        ({"pp": 2, "dp_shard": 1}, {"pipeline_schedule": "zbv_zero_bubble"}),
    ],
    ids=["tp", "pp", "zbv"],
)
@ranks(2)
def test_declared_losses_beside_axes_that_cut_the_model(sizes, options):
    """A language model's loss, declared, on axes that cut the model; three rows, so that a pipeline fills up."""
    tokens = ids(7, 48, 3, 9)
    labels = ids(8, 48, 3, 9)
    labels[0, 3:] = labels[2, :5] = -100
    make = functools.partial(GPT, GPTConfig(n_layer=4))
    plain = built(make)
    expected = F.cross_entropy(plain(tokens).flatten(0, 1), labels.flatten())
    expected.backward()
    wanted = {"loss": expected.detach()} | {name: p.grad for name, p in plain.named_parameters()}
    found = {}
    for reduction in ("sum", "mean"):
        model = laid_out(make, sizes, options, gpt_loss(reduction), 1)
        step = model.forward_backward({"tokens": tokens, "labels": labels})
        mine = {"loss": step.loss} | gradients(model)
        found[reduction] = worst(mine, {name: value for name, value in wanted.items() if name in mine})
    assert {how: error for how, error in found.items() if not error[0] <= EXACT} == {}


@pytest.mark.all
def test_an_encoder_classifier_on_the_tensor_axis(spmd):
    layouts = {"tp": ({"tp": 2, "dp_shard": 1}, {}, 3)}
    for found in spmd(2, errors, "bert", layouts):
        assert {where: error for where, error in found.items() if not error[0] <= EXACT} == {}


@pytest.mark.all
@ranks(2)
def test_an_encoder_classifier_in_stages():
    kind, found = KINDS["bert"], {}
    expected = computed(kind)
    for how in ("sum", "cross entropy"):
        model = laid_out(kind.make, {"pp": 2, "dp_shard": 1}, {}, LOSSES["bert"][how], 3)
        step = model.forward_backward(kind.batch())
        mine = {"loss": step.loss} | gradients(model)
        found[how] = worst(mine, {name: value for name, value in expected.items() if name in mine})
    told = said(lambda: laid_out(kind.make, {"cp": 2, "dp_shard": 1}, {}, None))
    assert {how: error for how, error in found.items() if not error[0] <= EXACT} == {}
    assert "its logits are (2, 5) for tokens (2, 13), not one for each token. Set layout.cp = 1" in told


# --- refusals


TOLD = {
    "a mean for a sum": "it is a mean over its count, not a sum. Declare a mean: loss_fn=meshwright.Loss(fn",
    "a plain mean": "it is a mean over its count, not a sum",
    "a sum for a mean": "it is a sum, not a mean over its count. Declare a sum",
    "rows": "it is a mean over the labels that are not -100, not a mean over its count. Declare the count",
    "mean of rows": "it is a mean over rows, not a mean over its count. Declare the count",
    "no law": "it is not a sum. Rows of the batch depend on each other",
    "one of several": "loss_fn['b'] gives",
    "one row": "it is a mean over its count, not a sum",
    "no key": "'weight', which is no key of the batch (['images', 'labels'])",
    "negative": "is -1.0 in a microbatch; it must be finite, and 0 or more",
    "a tuple": "returned a tuple of a tensor of shape (), a int; it must return one number",
    "a vector": "returned a tensor of shape (5,); it must return one number",
    "no own loss": "the forward returned a tensor of shape (8, 5): give the batch the labels",
    "no labels": "no 'labels'",
    "no images": "no 'images'",
    "other rows": "disagree in their rows, dim 0: images (8, 3, 8, 8), labels (7,)",
    "no rows": "disagree in their rows, dim 0: images (8, 3, 8, 8), labels (8,), scale ()",
    "other labels": "labels'] has shape (8, 1), and the model's logits (8, 5)",
    "unknown": "'colour'",
    "rows that mix": "Rows of the batch depend on each other in the model or in the loss",
    "rows that mix, plainly": "Rows of the batch depend on each other in the model or in the loss",
    "chunks": "techniques.loss_chunks = 3 computes the cross entropy inside the head",
    "no names": "a mapping of names to meshwright.Loss, and 'a' is a function",
    "empty": "the batch is empty",
}


@ranks(1)
def test_wrong_declarations_and_batches_are_refused_in_a_sentence():
    kind, batch = KINDS["conv"], KINDS["conv"].batch()
    images, labels = batch["images"], batch["labels"]

    def step(loss, given=None, make=kind.make):
        return said(lambda: laid_out(make, ONE, {}, loss).forward_backward(batch if given is None else given))

    def mean(output, batch):
        return MEAN.fn(output, batch)

    lm, tokens = functools.partial(GPT, GPTConfig()), ids(7, 48, 4, 9)
    packed = {"tokens": tokens, "labels": tokens}

    def by_rows(output, batch):
        losses = F.cross_entropy(output.transpose(1, 2), batch["labels"], reduction="none")
        return (losses.sum(1) / (batch["labels"] != -100).sum(1)).mean()

    found = {
        "a mean for a sum": step(Loss(mean, reduction="sum")),
        "a plain mean": step(lambda logits, labels: F.cross_entropy(logits, labels)),
        "a sum for a mean": step(Loss(SUM.fn, reduction="mean")),
        "rows": step(Loss(mean, reduction="mean", count="rows")),
        "mean of rows": step(Loss(by_rows, reduction="mean"), packed, lm),
        "mean of rows, stated": step(Loss(by_rows, reduction="mean", count="rows"), packed, lm),
        "no law": step(Loss(lambda output, batch: output.sum() ** 2, reduction="sum")),
        "one of several": step({"a": SUM, "b": Loss(mean, reduction="sum")}),
        "one row": step(Loss(mean, reduction="sum"), {"images": images[:1], "labels": labels[:1]}),
        "no key": step(Loss(mean, reduction="mean", count="weight")),
        "negative": step(Loss(mean, reduction="mean", count=lambda batch: -1.0)),
        "a tuple": step(Loss(lambda output, batch: (mean(output, batch), 3), reduction="mean")),
        "a vector": step(Loss(lambda output, batch: output[0], reduction="sum")),
        "no own loss": step(OWN, {"images": images}),
        "no labels": step(None, {"images": images}),
        "no images": step(MEAN, {"labels": labels}),
        "other rows": step(MEAN, batch | {"labels": labels[1:]}),
        "no rows": step(MEAN, batch | {"scale": torch.ones(())}),
        "other labels": step(None, batch | {"labels": labels[:, None]}),
        "unknown": step(None, batch | {"colour": labels}),
        "rows that mix": step(MEAN, make=functools.partial(ConvNet, "rows")),
        "rows that mix, plainly": step(None, make=functools.partial(ConvNet, "rows")),
        "chunks": said(lambda: laid_out(lm, ONE, {"loss_chunks": 3}, gpt_loss("sum"))),
        "no names": said(lambda: laid_out(kind.make, ONE, {}, {"a": plain_sum})),
        "empty": step(MEAN, {}),
    }
    for how, words in TOLD.items():
        assert isinstance(found[how], str) and found[how].startswith("ConfigError") and words in found[how], found[how]
    assert not isinstance(found["mean of rows, stated"], str)


@ranks(2)
def test_a_bad_batch_on_one_rank_is_refused_on_all():
    kind = KINDS["conv"]
    model = laid_out(kind.make, {"dp_shard": 2}, {}, MEAN, 2)
    batch = share(model, kind.batch())
    told = []
    for spoil in (lambda b: b | {"labels": b["labels"][1:]}, lambda b: {"labels": b["labels"]}):
        spoilt = spoil(batch) if data_position(model.mesh)[0] == 1 else batch
        told.append(said(lambda given=spoilt: model.forward_backward(given)))
    step = model.forward_backward(batch)
    (rows, lacks), error = told, worst({"loss": step.loss} | gradients(model), computed(kind))
    assert "disagree in their rows, dim 0: images (4, 3, 8, 8), labels (3,)" in rows
    assert "no 'images'" in lacks
    assert error[0] <= EXACT


@pytest.mark.follows("layout.dp_shard")
@ranks(2)
def test_a_batch_without_tokens_needs_a_layout_of_data_axes():
    kind = KINDS["bert"]
    tokens, *_ = (batch := kind.batch()).values()
    found = {}
    for axis, sizes in (("pp", {"pp": 2, "dp_shard": 1}), ("dp_shard", {"dp_shard": 2})):
        model = laid_out(kind.make, sizes, {}, OWN if axis == "dp_shard" else None)
        given = {"inputs_embeds": built(kind.make).get_input_embeddings()(tokens).detach(), **batch}
        given.pop(next(iter(batch)))
        found[axis] = said(lambda m=model, g=given: float(m.forward_backward(share(m, g))))
    assert "the batch has no 'tokens' (rows, seq), by which layout.pp cuts rows or counts" in found["pp"]
    assert "leave that to the data axes (layout.dp_replicate, layout.dp_shard)" in found["pp"]
    assert found["dp_shard"] == pytest.approx(float(computed(kind)["loss"]), rel=EXACT)


@ranks(2)
def test_layouts_that_cut_what_a_loss_reads_are_refused():
    make = functools.partial(GPT, GPTConfig())
    layouts = {"cp": ({"cp": 2, "dp_shard": 1}, gpt_loss("sum")), "pp": ({"pp": 2, "dp_shard": 1}, OWN)}
    told = {how: said(lambda s=sizes, x=loss: laid_out(make, s, {}, x)) for how, (sizes, loss) in layouts.items()}
    assert "layout.cp cuts rows over ranks. Set layout.cp = 1" in told["cp"]
    assert "a pipeline calls the forward in parts" in told["pp"]


def test_batch_norm_is_refused_where_rows_are_cut():
    with pytest.raises(UnsupportedError, match="rows of a batch depend on each other in ConvNet: norm"):
        plan(ConvNet("batch"), Layout(dp_shard=2))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reduction": "average"}, "the function returns a 'sum' or a 'mean'"),
        ({"reduction": "mean", "count": 3}, "count is 'auto'"),
        ({"reduction": "mean", "weight": math.inf}, "a weight is a finite number"),
        ({"reduction": "mean", "fn": 3}, "fn is a function"),
    ],
)
def test_a_declaration_has_legal_values(options, words):
    with pytest.raises(ConfigError, match=words):
        Loss(**options)


whole_init = DeclaredLosses.__init__


def unshifted(self, *args):
    whole_init(self, *args)
    self._shifts = False


@ranks(2)
def test_labels_that_a_causal_model_shifts_are_counted_behind_the_first():
    """A causal model of transformers shifts labels itself: the first label of a row is no target."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    make = functools.partial(LlamaForCausalLM, LlamaConfig(**sizes, vocab_size=48))
    batch = {"input_ids": ids(7, 48, 4, 9), "labels": ids(7, 48, 4, 9)}
    batch["labels"][0, 2:] = batch["labels"][3, :5] = -100
    plain = built(make)
    expected = plain(**batch).loss
    expected.backward()
    wanted = {"loss": expected.detach()} | {name: p.grad for name, p in plain.named_parameters()}
    model = laid_out(make, {"dp_shard": 2}, {}, OWN, 1)
    step = model.forward_backward(share(model, batch))
    shifts = patch.object(DeclaredLosses, "__init__", unshifted)
    with shifts:
        wrong = said(lambda: laid_out(make, {"dp_shard": 2}, {}, OWN, 1).forward_backward(share(model, batch)))
    error = worst({"loss": step.loss} | gradients(model), wanted)
    assert error[0] <= 1e-6  # norms and rotary tables compute in float32 inside
    assert "it is not a mean over its count" in wrong
