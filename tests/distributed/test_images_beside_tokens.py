"""Models of images and text on layouts: equal to one process of plain torch, in fp64, images dealt by rows."""

import functools
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from support.laid_out import assert_estimated, counted, estimated
from support.oracle import relative_errors
from support.pictures import FAMILIES, ROWS, SEQ, config_of, one_process, plain, rows_of_step, together
from support.ranks import ranks

import meshwright
from meshwright.distributed.mesh import data_position
from meshwright.distributed.process.absent_peers import WireCounter
from meshwright.distributed.weights.shards import whole_on_first
from meshwright.planning.layout import Layout
from meshwright.planning.values import Batch

pytestmark = pytest.mark.all

STEPS, BOUND = 2, 1e-6
"""The towers and the text models compute norms and rotary tables in float32."""

EXACT = {"precision": {"master": "float64", "compute": "float64"}}


def trained(family, sizes, images, rows, techniques, given=True, changes=None):
    """Losses, first gradients and last weights on a layout; each data rank brings its own rows."""
    model = plain(family, **(changes or {}))
    laid_out = meshwright.parallelize(model, Layout(**sizes), techniques=EXACT | techniques, microbatch_rows=rows)
    rank, ranks = data_position(laid_out.mesh)
    trainable = [p for p in laid_out.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.1) if trainable else None
    losses, gradients, differ = [], {}, laid_out.plan.pipeline is not None
    for step in range(STEPS):
        everything = rows_of_step(family, step, images)
        own = len(everything) // ranks
        batch = together(family, everything[rank * own : (rank + 1) * own])
        if not given:
            del batch["images_per_row"]
        losses.append(laid_out.forward_backward(batch).loss)
        if not step:
            found = {name: p.grad for name, p in laid_out.named_parameters() if p.grad is not None}
            gradients = whole_on_first(found, differ=differ)
        laid_out.optimizer_step(optimizer)
    return losses, gradients, whole_on_first(dict(laid_out.named_parameters()), differ=differ)


@functools.cache
def oracle(family, images=ROWS, frozen="", **changes):
    return one_process(family, STEPS, images, frozen, **changes)


def assert_equal(found, wanted, bound=BOUND):
    assert found[0] == pytest.approx(wanted[0], rel=bound)
    for mine, theirs in zip(found[1:], wanted[1:], strict=True):
        errors = relative_errors(mine, theirs)
        assert {name: error for name, error in errors.items() if not error <= bound} == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_and_microbatches_without_images(spmd, family):
    found = spmd(2, trained, family, {"dp_shard": 2}, ROWS, 1, {})[0]
    assert_equal(found, oracle(family))


LAYOUTS = {
    "tp 2": (2, {"dp_shard": 1, "tp": 2}, {}),
    "tp 2, whole sequences": (2, {"dp_shard": 1, "tp": 2}, {"sequence_parallel": False}),
    "pp 2": (2, {"dp_shard": 1, "pp": 2}, {}),
    "dp_shard 2, tp 2": (4, {"dp_shard": 2, "tp": 2}, {}),
    "dp_shard 2, pp 2": (4, {"dp_shard": 2, "pp": 2}, {}),
    "HSDP": (4, {"dp_shard": 2, "dp_replicate": 2}, {}),
    "ddp 2": (2, {"dp_replicate": 2}, {"data_parallel": "ddp"}),
    "pp 2, tp 2": (4, {"dp_shard": 1, "pp": 2, "tp": 2}, {}),
}


@pytest.mark.first("qwen2_5_vl-ddp 2")
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_layouts(spmd, family, name):
    world, sizes, techniques = LAYOUTS[name]
    found = spmd(world, trained, family, sizes, ROWS, 1, techniques)[0]
    assert_equal(found, oracle(family))


TOWERS = {"llava": "model.vision_tower", "qwen2_5_vl": "model.visual"}


@pytest.mark.parametrize("family", TOWERS)
def test_a_frozen_tower(spmd, family):
    found = spmd(4, trained, family, {"dp_shard": 2, "tp": 2}, ROWS, 1, {"freeze": [TOWERS[family] + r"\."]})[0]
    assert_equal(found, oracle(family, ROWS, TOWERS[family]))


@pytest.mark.first
def test_a_frozen_tower_on_a_first_stage(spmd):
    found = spmd(2, trained, "smolvlm", {"dp_shard": 1, "pp": 2}, ROWS, 1, {"freeze": [r"model\.vision_model\."]})[0]
    assert_equal(found, oracle("smolvlm", ROWS, "model.vision_model"))


FROZEN = {
    "the token embedding": ("model.language_model.embed_tokens",),
    "all but the projector": ("model.vision_tower", "model.language_model", "lm_head"),
}


@pytest.mark.parametrize("images", [(2, 1, 0, 0), (2, 0, 1, 0)], ids=["one rank has all", "microbatches without"])
@pytest.mark.parametrize("frozen", FROZEN)
def test_ranks_with_and_without_images_end_backward_alike(spmd, frozen, images):
    """Where nothing in front of the blocks is trained but what makes images' features."""
    found = spmd(2, trained, "llava", {"dp_shard": 2}, images, 1, {"freeze": list(FROZEN[frozen])})[0]
    assert_equal(found, oracle("llava", images, FROZEN[frozen]))


@pytest.mark.parametrize("sizes", [{"dp_shard": 2, "tp": 2}, {"dp_shard": 2, "pp": 2}], ids=["tp", "pp"])
@pytest.mark.parametrize("images", [(2, 1, 0, 0), (0, 0, 0, 0)], ids=["one rank has all", "none has any"])
def test_a_rank_without_any_image(spmd, images, sizes):
    found = spmd(4, trained, "qwen2_5_vl", sizes, images, 1, {})[0]
    assert_equal(found, oracle("qwen2_5_vl", images))


@pytest.mark.first("smolvlm")
@pytest.mark.parametrize("family", ["llava", "smolvlm"])
def test_rows_of_images_are_found_by_their_tokens(spmd, family):
    found = spmd(2, trained, family, {"dp_shard": 2}, ROWS, 1, {}, False)[0]
    assert_equal(found, oracle(family))


def test_several_blocks_in_a_stage_and_the_schedules_of_several_stages(spmd):
    techniques = {"pipeline_schedule": "interleaved_1f1b"}
    changes = {"num_hidden_layers": 4}
    found = spmd(2, trained, "gemma3", {"dp_shard": 1, "pp": 2}, ROWS, 1, techniques, True, changes)[0]
    assert_equal(found, oracle("gemma3", **changes))


def refused(family, sizes, wrong_rank):
    """The refusal of a step in which one rank's row has an image too few."""
    laid_out = meshwright.parallelize(plain(family), Layout(**sizes), microbatch_rows=1)
    rank, _ = data_position(laid_out.mesh)
    batch = together(family, rows_of_step(family, 0, (1, 1)))
    if rank == wrong_rank:
        batch["tokens"][1, 8:12] = 100
    try:
        laid_out.forward_backward(batch)
    except meshwright.ConfigError as error:
        return str(error)
    return ""


def test_a_row_of_one_rank_is_refused_on_all(spmd):
    said = spmd(4, refused, "llava", {"dp_shard": 2, "tp": 2}, 1)
    assert all("row 1 of the batch has 8 image tokens (id 100)" in text for text in said), said


def evaluated(family):
    """The loss of a list of microbatches, under the model's own name for tokens, before and after a step."""
    laid_out = meshwright.parallelize(plain(family), Layout(dp_shard=1, tp=2), techniques=EXACT)
    rows = rows_of_step(family, 0)
    pieces = [together(family, rows[:1]), together(family, rows[1:])]
    pieces = [{("input_ids" if key == "tokens" else key): value for key, value in piece.items()} for piece in pieces]
    return float(laid_out.evaluate(pieces).loss), float(laid_out.forward_backward(pieces).loss)


def test_lists_of_microbatches_and_evaluation(spmd):
    wanted = oracle("gemma3")[0][0]
    assert spmd(2, evaluated, "gemma3")[0] == pytest.approx((wanted, wanted), rel=BOUND)


@pytest.mark.first("qwen2_5_vl-dp_shard 2")
@pytest.mark.parametrize("sizes", [{"dp_shard": 2}, {"dp_shard": 2, "tp": 2}], ids=["dp_shard 2", "dp_shard 2, tp 2"])
@pytest.mark.parametrize("family", ["smolvlm", "qwen2_5_vl"])  # LLaVA's last layer of the tower gets no gradient
@ranks(lambda sizes: 2 * sizes.get("tp", 1))
def test_the_plan_estimates_every_byte_of_steps_with_images(family, sizes):
    laid_out = meshwright.parallelize(plain(family), Layout(**sizes), microbatch_rows=1)
    optimizer = torch.optim.SGD(laid_out.parameters(), lr=0.1)
    rank, ranks = data_position(laid_out.mesh)
    for number in range(2):
        rows = rows_of_step(family, number, (1, 2, 1, 1))
        own = len(rows) // ranks
        with WireCounter() if number else nullcontext() as wire:
            laid_out.forward_backward(together(family, rows[rank * own : (rank + 1) * own]))
            laid_out.optimizer_step(optimizer, 1.0)
    planned, sent = estimated(laid_out.plan, Batch(4, SEQ, 1)), counted(wire)
    assert_estimated(planned, sent)


@pytest.mark.parametrize("family", FAMILIES)
def test_verify_makes_images_itself(pool, family):
    """By ``meshwright verify``'s own batches, with microbatches and ranks without any image."""
    report = meshwright.verify(config_of(family), Layout(dp_shard=2), steps=2, dtypes=("float64",), pool=pool)
    assert report, str(report)
    assert "pixel_values" in report.coverage


def test_adapters_beside_language_blocks(pool):
    """Beside frozen weights, rows without an image give no gradient to what lies before the first adapter."""
    adapters = {
        "rank": 4,
        "targets": ["language_model.layers.*.self_attn.q_proj", "language_model.layers.*.mlp.down_proj"],
    }
    for layout in (Layout(dp_shard=1, tp=2), Layout(dp_shard=1, pp=2)):
        options = {"steps": 2, "dtypes": ("float64",), "techniques": {"adapters": adapters}}
        report = meshwright.verify(config_of("llava"), layout, pool=pool, **options)
        assert report, str(report)


def summed(output, batch):
    return F.cross_entropy(output.logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def declared(family):
    """The first loss of one that is declared, whose declaration is checked on halves of the first batch."""
    loss = meshwright.Loss(summed, reduction="sum")
    laid_out = meshwright.parallelize(plain(family), Layout(dp_shard=2), loss_fn=loss, techniques=EXACT)
    rank, _ = data_position(laid_out.mesh)
    rows = rows_of_step(family, 0)
    batch = together(family, rows[2 * rank : 2 * rank + 2])
    return float(laid_out.forward_backward({key: batch[key] for key in reversed(batch)}).loss)


@pytest.mark.first("smolvlm")
@pytest.mark.parametrize("family", ["llava", "smolvlm"])
def test_a_declared_loss_is_checked_on_rows_with_their_images(spmd, family):
    assert spmd(2, declared, family)[0] == pytest.approx(oracle(family)[0][0], rel=BOUND)
