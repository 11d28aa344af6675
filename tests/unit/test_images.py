"""Images beside tokens: which class is built, how batches are cut by rows, and what is refused."""

import pytest
import torch
from support.pictures import EACH, FAMILIES, IMAGE, batch_of, config_of, plain, rows_of_step, together
from torch import nn

from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.introspection.facts import model_facts
from meshwright.introspection.images import counted, rows_of
from meshwright.introspection.premises.premises import play
from meshwright.introspection.source import as_module, read_causal_lm
from meshwright.planning.build import plan
from meshwright.planning.layout import Layout

FACTS = {}


def images_of(family):
    if family not in FACTS:
        module = as_module(config_of(family))
        FACTS[family] = module, model_facts(module).images
    return FACTS[family][1]


@pytest.mark.first("qwen2_5_vl")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_and_its_folder_build_the_class_of_images_and_text(family, tmp_path):
    images_of(family)
    module = FACTS[family][0]
    assert type(module).__name__.endswith("ForConditionalGeneration")
    config_of(family).save_pretrained(tmp_path)
    assert type(as_module(read_causal_lm(tmp_path))) is type(module)


@pytest.mark.parametrize("is_counted", [True, False], ids=["images_per_row", "image tokens"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_keep_their_own_images(family, is_counted):
    rows = rows_of_step(family, 0, (2, 0, 1, 3))
    batch = together(family, rows)
    if not is_counted:
        del batch["images_per_row"]
    whole = counted(batch, images_of(family))
    assert whole["images_per_row"].tolist() == [2, 0, 1, 3]
    for start, stop in ((0, 2), (1, 2), (2, 4), (3, 4), (0, 4)):
        found, wanted = rows_of(whole, start, stop), together(family, rows[start:stop])
        most = int(wanted["images_per_row"].max())
        if family == "smolvlm" and "pixel_values" in found:  # filled up to what the whole batch needs
            assert not found["pixel_values"][:, most:].any()
            found |= {key: found[key][:, :most] for key in ("pixel_values", "pixel_attention_mask")}
        assert found.keys() == wanted.keys(), (start, stop)
        assert all(torch.equal(found[key], wanted[key]) for key in found), (start, stop)


def test_without_images_there_is_no_argument_of_images():
    assert {"pixel_values", "image_grid_thw"}.isdisjoint(rows_of(batch_of("qwen2_5_vl", 0, (0, 0)), 0, 2))
    empty = batch_of("llava", 0, (0, 0)) | {"pixel_values": torch.zeros(0, 3, 16, 16)}
    assert "pixel_values" not in counted(empty, images_of("llava"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_with_more_image_tokens_than_images_is_named(family):
    batch = batch_of(family, 0, (1, 0, 2, 1))
    batch["tokens"][1, 3:7] = IMAGE
    with pytest.raises(ConfigError, match=r"row 1 of the batch has 4 image tokens \(id 100\)"):
        counted(batch, images_of(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_with_fewer_image_tokens_than_images_is_named(family):
    batch = batch_of(family, 0, (1, 0, 2, 1))
    batch["tokens"][2][batch["tokens"][2] == IMAGE] = 5
    with pytest.raises(ConfigError, match="row 2 of the batch has 0 image tokens"):
        counted(batch, images_of(family))


@pytest.mark.parametrize("family", ["llava", "gemma3", "qwen2_5_vl"])
def test_images_dealt_to_other_rows_are_refused(family):
    batch = batch_of(family, 0, (2, 0))
    batch["images_per_row"] = torch.tensor([1, 1])  # evenly
    with pytest.raises(ConfigError, match=r"row 0 of the batch has \d+ image tokens"):
        counted(batch, images_of(family))


def test_one_row_is_told_by_the_size_of_an_image():
    batch = batch_of("llava", 0, (2,))
    batch["pixel_values"], batch["images_per_row"] = batch["pixel_values"][:1], torch.tensor([1])
    with pytest.raises(ConfigError, match=f"row 0 of the batch has {2 * EACH} image tokens.*its 1 images take {EACH}"):
        counted(batch, images_of("llava"))


def test_sizes_that_differ_ask_for_images_per_row():
    batch = batch_of("llava", 0, (2, 1)) | {"image_sizes": torch.tensor([[16, 16], [16, 8], [8, 8]])}
    del batch["images_per_row"]
    with pytest.raises(ConfigError, match=r"does not tell which row has which image.*batch\['images_per_row'\]"):
        counted(batch, images_of("llava"))


def test_as_many_images_as_rows_with_image_tokens_are_one_for_each():
    """Whatever their sizes, of which LLaVA-NeXT and Mistral-3 make other numbers of tokens."""
    batch = batch_of("llava", 0, (2, 1)) | {"image_sizes": torch.tensor([[16, 16], [16, 8]])}
    del batch["images_per_row"]
    batch["pixel_values"] = batch["pixel_values"][:2]
    found = counted(batch, images_of("llava"))
    assert found["images_per_row"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"images_per_row": torch.tensor([1, 1, 1, 1])}, "counts 4 images, and the batch's tensors of images have 3"),
        ({"images_per_row": torch.tensor([2.0, 0, 1, 0])}, r"it must be \(4,\) torch.int64"),
        ({"images_per_row": torch.tensor([3])}, r"it must be \(4,\) torch.int64"),
        ({"image_grid_thw": torch.tensor([[1, 4, 4]])}, "has 64 patches, and batch.'image_grid_thw'. speaks of 16"),
    ],
)
def test_counts_that_do_not_fit_are_refused(change, words):
    with pytest.raises(ConfigError, match=words):
        counted(batch_of("qwen2_5_vl", 0) | change, images_of("qwen2_5_vl"))


def test_image_tokens_without_pixels_are_refused():
    batch = batch_of("gemma3", 0)
    del batch["pixel_values"], batch["images_per_row"]
    with pytest.raises(ConfigError, match=r"row 0 of the batch has 8 image tokens.*no batch\['pixel_values'\]"):
        counted(batch, images_of("gemma3"))


def test_videos_are_refused():
    with pytest.raises(UnsupportedError, match="videos are not dealt"):
        counted(batch_of("qwen2_5_vl", 0) | {"pixel_values_videos": torch.zeros(1)}, images_of("qwen2_5_vl"))


class NormedOverImages(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.norm = inner, nn.BatchNorm1d(24, track_running_stats=False).double()

    def forward(self, x):
        return self.inner(self.norm(x.transpose(1, 2)).transpose(1, 2))


@pytest.mark.first
@pytest.mark.parametrize("is_normed", [False, True])
def test_images_that_depend_on_those_of_other_rows_are_seen(is_normed):
    model = plain("llava")
    if is_normed:
        model.model.multi_modal_projector = NormedOverImages(model.model.multi_modal_projector)
    assert bool(play(model).mixes_rows) is is_normed


@pytest.mark.all
def test_a_large_model_is_cut_as_its_small_copy_with_images_is():
    """The sizes of LLaVA-1.5 7B: all 24 blocks of its tower lie on the first stage, before its 32 language blocks."""
    import transformers

    module = as_module(transformers.LlavaConfig(text_config={"model_type": "llama", "vocab_size": 32064}))
    facts = model_facts(module)
    made = plan(module, Layout(dp_shard=2, tp=2, pp=2))
    assert (len(facts.blocks), len(facts.token_blocks)) == (56, 32)
    assert facts.images.each == 576
    last = "model.vision_tower.encoder.layers.23.mlp.fc1.weight"
    assert not made.tensor.is_summed(last)
    assert made.tensor.cut_of("model.language_model.layers.31.mlp.up_proj.weight", (11008, 4096)) is not None
    assert [made.pipeline.has(stage, last) for stage in (0, 1)] == [True, False]
    assert last in made.data.idle
    assert made.units[0].name == ""
    assert not any("vision_tower" in unit.name for unit in made.units)
