"""Images in parts or of several sizes, read by parameters of their own, required: equal to one process, or refused."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import torch.nn.functional as F
from support.oracle import relative_errors

import meshwright
from meshwright.core.errors import UnsupportedError
from meshwright.distributed.mesh import data_position
from meshwright.distributed.weights.shards import whole_on_first
from meshwright.introspection.facts import model_facts
from meshwright.introspection.images import counted, rows_of
from meshwright.introspection.source import as_module
from meshwright.planning.build import plan
from meshwright.planning.layout import Layout

IMAGE, SEQ, STEPS, BOUND = 100, 40, 2, 1e-6
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TOWER = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}
SIZES = {
    "llava_next": [((16, 32), 14), ((16, 16), 10)],
    "mistral3": [((16, 16), 4), ((16, 8), 2)],
    "aya_vision": [(None, 4)],
    "blip_2": [(None, 4)],
}
"""Height and width of images in turn, where a model is told them, and the number of their tokens."""
EACH_ROW = {"two, none, one, none": (2, 0, 1, 0), "one": (1, 1, 1, 1), "two": (2, 2, 2, 2)}


def config_of(family):
    import transformers

    towers = {"llava_next": "clip_vision_model", "mistral3": "pixtral", "aya_vision": "siglip_vision_model"}
    tower = {"model_type": towers.get(family), "head_dim": 6, **TOWER}
    if family == "llava_next":
        text = {"model_type": "llama", **TEXT}
        parts = [[16, 32], [32, 16], [32, 32]]
        tower |= {"patch_size": 8, "projection_dim": 24}
        return transformers.LlavaNextConfig(
            text_config=text, vision_config=tower, image_token_index=IMAGE, image_grid_pinpoints=parts
        )
    if family == "mistral3":
        text = {"model_type": "mistral", "head_dim": 8, **TEXT}
        return transformers.Mistral3Config(text_config=text, vision_config=tower, image_token_index=IMAGE)
    if family == "aya_vision":
        kinds = ["sliding_attention", "full_attention"]
        text = {"model_type": "cohere2", "layer_types": kinds, **TEXT}
        return transformers.AyaVisionConfig(text_config=text, vision_config=tower, image_token_index=IMAGE)
    asking = {"hidden_size": 24, "encoder_hidden_size": 24, "num_attention_heads": 4, "intermediate_size": 32}
    sizes = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
    return transformers.Blip2Config(
        vision_config=TOWER,
        qformer_config={**asking, "num_hidden_layers": 2},
        text_config={"model_type": "opt", **sizes, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
        num_query_tokens=4,
        image_token_index=IMAGE,
    )


def plain(family):
    import transformers

    torch.manual_seed(0)
    config = config_of(family)
    config.get_text_config().use_cache = False
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():  # queries and new lines are zeros at first
            parameter.add_(0.02 * torch.randn(parameter.shape, dtype=torch.float64))
    return model.eval()


def batch_of(family, step, counts):
    """All rows of a step, as a processor and a collator give them."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(3, IMAGE, (len(counts), SEQ), generator=generator)
    labels = torch.randint(3, IMAGE, (len(counts), SEQ), generator=generator)
    sides = []
    for row, count in enumerate(counts):
        place = 1
        for number in range(count):
            size, each = SIZES[family][number % len(SIZES[family])]
            tokens[row, place : place + each] = IMAGE
            place += each + 1
            sides.append(size)
    shape = (3, 3, 16, 16) if family == "llava_next" else (3, 16, 16)
    pixels = torch.randn((len(sides), *shape), generator=generator, dtype=torch.float64)
    batch = {"tokens": tokens, "labels": labels.masked_fill(tokens == IMAGE, -100), "pixel_values": pixels}
    batch["images_per_row"] = torch.tensor(counts)
    return batch | ({"image_sizes": torch.tensor(sides)} if sides[0] else {})


def alone(family, counts):
    model, losses, gradients = plain(family), [], {}
    for step in range(STEPS):
        batch = batch_of(family, step, counts)
        beside = {key: batch[key] for key in ("pixel_values", "image_sizes") if key in batch}
        logits = model(input_ids=batch["tokens"], use_cache=False, **beside).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        losses.append(float(loss.detach()))
        gradients = gradients or {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0 if parameter.grad is None else 0.1 * parameter.grad
                parameter.grad = None
    return losses, gradients, {name: p.detach() for name, p in model.named_parameters()}


def laid_out(family, sizes, counts):
    exact = {"precision": {"master": "float64", "compute": "float64"}}
    model = meshwright.parallelize(plain(family), Layout(**sizes), techniques=exact, microbatch_rows=1)
    rank, ranks = data_position(model.mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, gradients, differ = [], {}, model.plan.pipeline is not None
    for step in range(STEPS):
        batch, own = batch_of(family, step, counts), len(counts) // ranks
        losses.append(model.forward_backward(rows_of(batch, rank * own, (rank + 1) * own)).loss)
        if not step:
            found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            gradients = whole_on_first(found, differ=differ)
        model.optimizer_step(optimizer)
    return losses, gradients, whole_on_first(dict(model.named_parameters()), differ=differ)


LAYOUTS = {"dp_shard": {"dp_shard": 2}, "tp": {"dp_shard": 1, "tp": 2}, "pp": {"dp_shard": 1, "pp": 2}}


def assert_equal(found, wanted):
    assert found[0] == pytest.approx(wanted[0], rel=BOUND)
    for mine, theirs in zip(found[1:], wanted[1:], strict=True):
        errors = relative_errors(mine, theirs)
        assert {name: error for name, error in errors.items() if not error <= BOUND} == {}


@pytest.mark.all
@pytest.mark.parametrize("axis", LAYOUTS)
@pytest.mark.parametrize("family", ["llava_next", "mistral3", "aya_vision"])
def test_two_axes_are_one_process(spmd, family, axis):
    counts = EACH_ROW["two, none, one, none"]
    assert_equal(spmd(2, laid_out, family, LAYOUTS[axis], counts)[0], alone(family, counts))


@pytest.mark.all
def test_a_model_that_requires_images_is_one_process_on_data_ranks(spmd):
    counts = EACH_ROW["one"]
    assert_equal(spmd(2, laid_out, "blip_2", LAYOUTS["dp_shard"], counts)[0], alone("blip_2", counts))


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_a_model_that_requires_images_is_refused_where_it_would_be_cut(axis):
    with pytest.raises(UnsupportedError, match=r"Blip2ForConditionalGeneration requires pixel_values beside token ids"):
        plan(plain("blip_2"), Layout(**LAYOUTS[axis]))


@pytest.mark.parametrize("counts", ["one", "two"])
@pytest.mark.parametrize("family", ["llava_next", "mistral3", "aya_vision"])
def test_as_many_images_of_a_size_in_each_row_need_no_count(family, counts):
    images = model_facts(as_module(config_of(family))).images
    batch = batch_of(family, 0, EACH_ROW[counts])
    if counts == "two" and "image_sizes" in batch:
        size, each = SIZES[family][0]
        batch["image_sizes"] = torch.tensor([size] * 8)
        batch["tokens"] = batch["tokens"].masked_fill(batch["tokens"] == IMAGE, 5)
        batch["tokens"][:, 1 : 1 + 2 * each] = IMAGE
    del batch["images_per_row"]
    assert counted(batch, images)["images_per_row"].tolist() == list(EACH_ROW[counts])
