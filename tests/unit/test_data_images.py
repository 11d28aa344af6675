"""Rows with images, against the model's own processor: the same ids, the same pixels, a loss on the answers alone."""

from __future__ import annotations

import copy
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("PIL")

from support.vision_models import SPECIAL, asks, draw_image, model_folder, processor_of, write_rows

from meshwright.core.errors import ConfigError, IntegrityError, UnsupportedError
from meshwright.data import FileTokenizer, Loader, Samples, SourceOptions, open_corpus, prepare, validation_batches
from meshwright.data.building import TokenisingRecipe
from meshwright.data.corpus import Pictured, beside_images
from meshwright.data.images import IMAGES, PixelReader, vision_of
from meshwright.data.loader import StreamedSamples
from meshwright.data.scan import list_sources

FAMILIES = ("llava", "gemma3", "qwen2_5_vl", "smolvlm")
SIZES = {"wide.png": (60, 24), "tall.png": (20, 50), "small.png": (9, 9)}
SEQ = 160


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory) -> Path:
    return model_folder(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llava(tmp_path_factory) -> Path:
    return model_folder("llava", tmp_path_factory.mktemp("llava_alone"))


@pytest.fixture
def data(tmp_path) -> Path:
    for seed, (name, size) in enumerate(SIZES.items()):
        draw_image(tmp_path / "data" / "pictures" / name, *size, seed)
    return tmp_path / "data"


def picture(name: str) -> str:
    return f"pictures/{name}"


def conversations() -> list[dict[str, Any]]:
    two = asks(picture("wide.png"), picture("small.png"), about="both?", answer="green")
    longer = (
        asks(picture("tall.png"))["messages"] + asks(picture("wide.png"), about="and now?", answer="blue")["messages"]
    )
    return [asks(picture("small.png")), two, {"messages": longer}, asks(about="no picture?", answer="white")]


def opened(data: Path, folder: Path, rows: list[dict[str, Any]], **options: Any):
    """The training split of records, and what gives its rows their pixels."""
    vision = vision_of(str(folder))
    source = SourceOptions((str(write_rows(data / "rows.jsonl", rows)),), **options)
    made = prepare(source, FileTokenizer(folder), cache_dir=data.parent / "cache", vision=vision)
    return open_corpus(made.folder, source.too_long, made.scan).training, PixelReader(vision.processor)


def asked_of_the_processor(folder: Path, data: Path, row: dict[str, Any], family: str) -> dict[str, torch.Tensor]:
    messages = copy.deepcopy(row["messages"])
    for message in messages:
        for part in message["content"]:
            if part["type"] == "image":
                part["image"] = str(data / part["image"])
    return processor_of(family).apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")


def family_of(folder: Path) -> str:
    return {"llava": "llava", "gemma3": "gemma3", "qwen2_5_vl": "qwen2_5_vl"}.get(
        json.loads((folder / "config.json").read_text())["model_type"], "smolvlm"
    )


@pytest.mark.first("gemma3")
def test_each_row_has_the_processors_own_ids_and_pixels(model, data):
    split, pixels = opened(data, model, conversations())
    for index, row in enumerate(conversations()):
        batch = pixels(split.rows(np.array([index]), SEQ))
        wanted = asked_of_the_processor(model, data, row, family_of(model))
        ids = wanted["input_ids"][0].numpy()
        assert batch["tokens"][0, : len(ids)].tolist() == ids.tolist()
        assert (batch["tokens"][0, len(ids) :] == FileTokenizer(model).end_of_document).all()
        others = set(wanted) - {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}
        assert set(batch) - {"tokens", "labels", "images_per_row", "token_type_ids", "mm_token_type_ids"} == others
        for key in others:
            assert np.array_equal(batch[key], wanted[key].numpy()), key
        for key in {"token_type_ids", "mm_token_type_ids"} & set(wanted):
            assert batch[key][0, : len(ids)].tolist() == wanted[key][0].tolist()
            assert not batch[key][0, len(ids) :].any()


@pytest.mark.first("gemma3")
def test_only_answers_are_learnt_and_never_an_image(model, data):
    split, pixels = opened(data, model, conversations())
    answers = [" it is red", " green", " it is red blue", " white"]  # a token joins the space before an answer
    end, tokenizer = SPECIAL[family_of(model)][1], FileTokenizer(model)
    for index, answer in enumerate(answers):
        batch = pixels(split.rows(np.array([index]), SEQ))
        learnt = batch["labels"][0][batch["labels"][0] != -100]
        assert tokenizer.spell_out(learnt).replace(end, "").replace("\n", "") == answer
        assert not np.isin(batch["labels"], pixels.processor.image_token_ids).any()
        assert (batch["tokens"][0, 1:][batch["labels"][0, :-1] != -100] == learnt).all()


@pytest.mark.first("gemma3")
def test_a_batch_is_its_rows_one_after_the_other(model, data):
    split, pixels = opened(data, model, conversations())
    batch = pixels(split.rows(np.arange(4), SEQ))
    alone = [pixels(split.rows(np.array([index]), SEQ)) for index in range(4)]
    assert batch["images_per_row"].tolist() == [int(one["images_per_row"][0]) for one in alone]
    assert batch["images_per_row"][3] == 0
    assert "positions" not in batch and "document_ids" not in batch
    for key in set(alone[0]) - {"images_per_row"}:
        rows = [one[key] for one in alone if key in one]
        if family_of(model) == "smolvlm" and key.startswith("pixel"):
            for row, one in enumerate(alone):
                n = int(one["images_per_row"][0])
                assert np.array_equal(batch[key][row, :n], one[key][0] if key in one else batch[key][row, :0])
                assert not batch[key][row, n:].any()
        else:
            assert np.array_equal(batch[key], np.concatenate(rows)), key


@pytest.mark.first("gemma3")
def test_every_rank_gets_its_rows_of_the_same_global_batch(model, data):
    split, pixels = opened(data, model, conversations())

    def batches(world: int, workers: int, seek: int = 0) -> list[list[dict[str, torch.Tensor]]]:
        found = []
        for rank in range(world):
            with Loader(Samples.of([split], SEQ, 3), 4, rank, world, workers, finish=pixels) as loader:
                loader.seek(seek)
                found.append([next(loader) for _ in range(3)])
        return found

    whole, halves, later = batches(1, 0)[0], batches(2, 2), batches(1, 1, 4)[0]
    for step in range(3):
        for key in ("tokens", "labels", "images_per_row"):
            assert torch.equal(whole[step][key], torch.cat([half[step][key] for half in halves]))
        images = [half[step]["pixel_values"] for half in halves if "pixel_values" in half[step]]
        if family_of(model) == "smolvlm":
            most = whole[step]["pixel_values"].shape[1]
            for one, rows in zip(images, whole[step]["pixel_values"].split(2), strict=True):
                assert torch.equal(one, rows[:, : one.shape[1]]) and not rows[:, one.shape[1] : most].any()
        else:
            assert torch.equal(whole[step]["pixel_values"], torch.cat(images))
    for one, other in zip(later, whole[1:], strict=False):
        assert all(torch.equal(one[key], other[key]) for key in other)


def test_validation_reads_images_too(llava, data):
    split, pixels = opened(data, llava, conversations())
    batches = list(validation_batches(split, SEQ, 4, 1, 0, 2, pixels))
    assert [batch["images_per_row"].tolist() for batch in batches] == [[1], [2]]


MARKED = {
    "messages": [
        {"role": "user", "content": "<image>\nthis and <image> that?"},
        {"role": "assistant", "content": "red"},
    ],
    "images": [picture("wide.png"), picture("tall.png")],
}
FORMS = {
    "marks in the text": MARKED,
    "speakers": {
        "conversations": [
            {"from": "human", "value": MARKED["messages"][0]["content"]},
            {"from": "gpt", "value": "red"},
        ],
        "images": MARKED["images"],
    },
    "dicts with paths": {**MARKED, "images": [{"path": name} for name in MARKED["images"]]},
    "places without a path": {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image"},
                    {"type": "text", "text": "this and "},
                    {"type": "image", "image": None},
                    {"type": "text", "text": " that?"},
                ],
            },
            {"role": "assistant", "content": "red"},
        ],
        "images": MARKED["images"],
    },
    "OpenAI's parts": {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": picture("wide.png")}},
                    {"type": "text", "text": "this and "},
                    {"type": "image", "path": picture("tall.png")},
                    {"type": "text", "text": " that?"},
                ],
            },
            {"role": "assistant", "content": [{"type": "text", "text": "red"}]},
        ]
    },
    "a prompt and its answer": {
        "prompt": "<image>\nthis and <image> that?",
        "completion": "red",
        "images": MARKED["images"],
    },
    "a question and its answer": {
        "question": "<image>\nthis and <image> that?",
        "answer": "red",
        "images": MARKED["images"],
    },
}


@pytest.mark.first
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_record_is_the_same_row(llava, data, form):
    (row, _), (first, _) = (opened(data, llava, [FORMS[name]]) for name in (form, "OpenAI's parts"))
    one, other = (split.rows(np.array([0]), SEQ) for split in (row, first))
    assert one["tokens"].tolist() == other["tokens"].tolist()
    assert [file.name for file in one["images"][0]] == [file.name for file in other["images"][0]] == MARKED["images"]


def test_images_without_a_place_come_before_the_first_question(llava, data):
    row = {"messages": [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "red"}]}
    split, _ = opened(data, llava, [row | {"image": picture("tall.png")}])
    assert (
        FileTokenizer(llava)
        .spell_out(split.rows(np.array([0]), 32)["tokens"][0])
        .startswith("<s>user: " + "<image>" * 4 + "what?")
    )


def test_an_image_that_the_processor_refuses_is_refused_with_its_row_or_skipped(tmp_path):
    folder = model_folder("qwen2_5_vl", tmp_path / "model")
    draw_image(tmp_path / "data" / "pictures" / "line.png", 400, 1)
    draw_image(tmp_path / "data" / "pictures" / "wide.png", 60, 24)
    rows = [asks(picture("line.png")), asks(picture("wide.png"))]
    with pytest.raises(
        ConfigError, match=r"rows\.jsonl, row 1: the image .*line\.png cannot be used: .*400 x 1 pixels"
    ):
        opened(tmp_path / "data", folder, rows)
    split, _ = opened(tmp_path / "data", folder, rows, on_bad_row="skip")
    assert split.n_documents == 1


def test_an_image_that_ends_too_soon_is_refused_with_its_row_or_skipped(llava, data):
    from PIL import Image

    photo = data / picture("photo.jpg")
    Image.open(data / picture("wide.png")).convert("RGB").save(photo)
    photo.write_bytes(photo.read_bytes()[:-60])
    assert Image.open(photo).size == Image.open(data / picture("wide.png")).size, "its header is whole"
    rows = [asks(picture("photo.jpg")), asks(picture("wide.png"))]
    with pytest.raises(
        ConfigError, match=r"row 1: the image .*photo\.jpg does not open .*truncated.*on_bad_row = 'skip'"
    ):
        opened(data, llava, rows)
    assert opened(data, llava, rows, on_bad_row="skip")[0].n_documents == 1


def test_a_pipe_is_no_image(llava, data):
    os.mkfifo(data / picture("pipe.png"))
    with pytest.raises(ConfigError, match=r"row 1: the image .*pipe\.png is no file"):
        opened(data, llava, [asks(picture("pipe.png"))])


@pytest.mark.parametrize("kind", ["jpg", "tiff"])
def test_a_photograph_that_lies_on_its_side_is_stood_up(tmp_path, kind):
    """Its header says 60 x 24, and the processor is handed 24 x 60."""
    from PIL import Image

    folder = model_folder("qwen2_5_vl", tmp_path / "model")
    draw_image(tmp_path / "data" / "pictures" / "wide.png", 60, 24)
    image = Image.open(tmp_path / "data" / "pictures" / "wide.png")
    exif = image.getexif()
    exif[0x0112] = 6
    image.save(tmp_path / "data" / "pictures" / f"turned.{kind}", exif=exif)
    row = asks(picture(f"turned.{kind}"))
    split, pixels = opened(tmp_path / "data", folder, [row])
    batch = pixels(split.rows(np.array([0]), SEQ))
    wanted = asked_of_the_processor(folder, tmp_path / "data", row, "qwen2_5_vl")
    assert batch["image_grid_thw"].tolist() == wanted["image_grid_thw"].tolist()
    assert np.array_equal(batch["pixel_values"], wanted["pixel_values"].numpy())


@pytest.mark.all
def test_a_long_conversation_is_never_cut_within_an_image(llava, data):
    split, pixels = opened(data, llava, conversations()[1:3], too_long="truncate")
    whole = [split.rows(np.array([index]), SEQ) for index in (0, 1)]
    learns = [length for length in range(1, 80) if split.kept_lengths(length).all()]
    assert len(learns) > 20, "others leave a conversation nothing to learn, and leave it out"
    for index in (0, 1):
        ids = whole[index]["tokens"][0]
        for length in learns:
            batch = pixels(split.rows(np.array([index]), length))
            kept = batch["tokens"][0]
            n_tokens = int((kept == 2).sum())
            assert n_tokens == 4 * batch["images_per_row"][0]
            real = next((i for i in range(length) if kept[i] != ids[i]), length)
            assert real == length or (ids[real] == 2 and (kept[real:] == 1).all())


def test_long_ones_are_refused_or_skipped_as_ever(llava, data):
    split, _ = opened(data, llava, conversations())
    with pytest.raises(ConfigError, match="longer than data.seq_len = 40"):
        split.n_samples(40)
    fits = [int(n) for n in split.lengths if n <= 40]
    assert isinstance(split, Pictured) and 0 < len(fits) < 4
    kept = replace(split, too_long="skip")
    assert kept.n_samples(40) == len(fits)
    rows = kept.rows(np.arange(len(fits)), 40)
    assert kept.n_images(40) == sum(map(len, rows[IMAGES])) < kept.n_images(SEQ) == len(kept.images.places)


def test_a_changed_image_is_noticed(llava, data):
    vision, source = vision_of(str(llava)), write_rows(data / "rows.jsonl", conversations())

    def made():
        options = SourceOptions((str(source),))
        return prepare(options, FileTokenizer(llava), cache_dir=data.parent / "cache", vision=vision)

    first, again = made(), made()
    assert (first.was_built, again.was_built) == (True, False) and first.key == again.key
    path = data / picture("tall.png")
    path.touch()
    assert not made().was_built
    draw_image(path, *SIZES["tall.png"], seed=9)
    changed = made()
    assert changed.was_built and changed.key != first.key and changed.folder == first.folder


def test_an_image_of_another_size_than_when_tokenised_is_no_batch(llava, data):
    split, pixels = opened(data, llava, conversations()[:1])
    draw_image(data / picture("small.png"), 10, 9)
    with pytest.raises(IntegrityError, match="10 x 9 pixels, and had 9 x 9"):
        pixels(split.rows(np.array([0]), SEQ))


def test_a_row_whose_image_breaks_later_is_left_out_and_said(llava, data):
    split, pixels = opened(data, llava, [asks(picture("wide.png")), asks(picture("small.png"))])
    both = Samples.of([split], SEQ, 0)
    broken = data / picture("wide.png")
    broken.write_bytes(broken.read_bytes()[:200])
    loader = Loader(both, 2, finish=pixels, skip_unreadable=True)
    batch = next(loader)
    assert sorted(batch["images_per_row"].tolist()) == [0, 1] and len(batch["pixel_values"]) == 1
    assert (batch["labels"][batch["images_per_row"] == 0] == -100).all()
    assert ["no longer opens" in why for why in loader.unreadable.values()] == [True]
    alone = Loader(Samples.of([both.splits[0]], SEQ, 0), 1, finish=pixels, skip_unreadable=True)
    assert sorted(next(alone)["images_per_row"].tolist() + next(alone)["images_per_row"].tolist()) == [0, 1]
    with pytest.raises(IntegrityError, match=r"wide\.png no longer opens.*put it back as it was"):
        next(Loader(both, 2, finish=pixels))


@pytest.mark.follows("data.mixture, by 'it'")
def test_parts_of_a_mixture_get_rows_alike(llava, data):
    pictured, pixels = opened(data, llava, conversations())
    source = write_rows(data / "plain" / "rows.jsonl", [{"prompt": "a", "completion": "b"}] * 3)
    options, cache = SourceOptions((str(source),)), data.parent / "cache"
    made = prepare(options, FileTokenizer(llava), cache_dir=cache, vision=vision_of(str(llava)))
    plain = open_corpus(made.folder, "refuse", made.scan)
    both = beside_images([replace(plain, training=pictured), plain], ["images", "plain"])
    samples = Samples.of([corpus.training for corpus in both], SEQ, 0, ("images", "plain"))
    batch = next(Loader(samples, 6, finish=pixels))
    assert batch["tokens"].shape == (6, SEQ) and sorted(batch["images_per_row"].tolist())[:3] == [0, 0, 0]
    (data / "text").mkdir()
    (data / "text" / "a.txt").write_text("some words " * 99)
    text = prepare(str(data / "text"), FileTokenizer(llava), cache_dir=cache)
    with pytest.raises(
        UnsupportedError,
        match="'words' of data.mixture is plain text, of which .*: leave it out, or write it as conversations",
    ):
        beside_images([replace(plain, training=pictured), open_corpus(text.folder)], ["images", "words"])
    assert len(beside_images([replace(plain, training=pictured)], ["images"])) == 1


def test_a_stream_reads_no_images(llava, data):
    source = write_rows(data / "rows.jsonl", conversations())
    options = SourceOptions((str(source),), streaming=True)
    recipe = TokenisingRecipe(list_sources(str(source)), options, FileTokenizer(llava), 0.0, vision_of(str(llava)))
    with pytest.raises(UnsupportedError, match="data.streaming reads no images"):
        StreamedSamples(recipe, SEQ, print)


def bad(what: str) -> dict[str, Any]:
    good = asks(picture("small.png"))
    if what == "mark in text":
        return asks(picture("small.png"), about="what is <image> here?")
    if what == "more places":
        return {**MARKED, "images": MARKED["images"][:1]}
    if what == "fewer places":
        return {**MARKED, "images": [*MARKED["images"], picture("small.png")]}
    if what == "both columns":
        return {**MARKED, "image": picture("small.png")}
    if what == "video":
        good["messages"][0]["content"][0] = {"type": "video", "video": "a.mp4"}
    elif what == "inside":
        good["messages"][0]["content"][0] = {"type": "image", "image": {"bytes": "abc", "path": None}}
    else:
        good["messages"][0]["content"][0]["image"] = what
    return good


REFUSALS = {
    "pictures/none.png": r"row 2: the image 'pictures/none.png' is missing",
    "rows.jsonl": r"row 2: the image .*rows\.jsonl does not open",
    "../model/config.json": r"row 2: the image '\.\./model/config\.json' is not in",
    "/etc/passwd": r"row 2: the image '/etc/passwd' is not in",
    "pictures/out.png": r"row 2: the image 'pictures/out\.png' is not in .*is a link to",
    "https://example.org/a.png": r"row 2: the image 'https://example.org/a.png' is an address, and nothing is downl",
    "data:image/png;base64,AAAA": r"row 2: the image 'data:image.*' is an address",
    "inside": r"row 2: an image is named by its path.* here is an image inside the record",
    "mark in text": r"row 2: .* has 2 places for images \(<image>\), and the record has 1 images",
    "more places": r"row 2: the conversation has 2 places for images .* the record has 1 images",
    "fewer places": r"row 2: the conversation has 2 places for images .* the record has 3 images",
    "both columns": r"row 2: both columns images and image name images",
    "video": r"row 2, turn 1: a part of a content is a text .* or an image",
}


@pytest.mark.first
@pytest.mark.parametrize("what", REFUSALS)
def test_what_is_wrong_with_a_row_is_said_with_file_and_row(llava, data, what):
    (data.parent / "secret.png").write_bytes((data / picture("wide.png")).read_bytes())
    (data / picture("out.png")).symlink_to(data.parent / "secret.png")
    rows = [asks(picture("small.png")), bad(what)]
    with pytest.raises(ConfigError, match=r"rows\.jsonl, " + REFUSALS[what]):
        opened(data, llava, rows)
    split, _ = opened(data, llava, rows, on_bad_row="skip")
    assert split.n_documents == 1


def test_a_token_of_images_in_a_text_is_refused(tmp_path, data):
    folder = model_folder("gemma3", tmp_path / "model")
    with pytest.raises(ConfigError, match=r"row 1: the text holds <image_soft_token>, a token that only images have"):
        opened(data, folder, [asks(picture("small.png"), about="<image_soft_token>")])


@pytest.mark.all
def test_other_models_and_tasks_refuse_images(llava, data, tmp_path):
    text, blind = tmp_path / "text_model", model_folder("llava", tmp_path / "blind")
    text.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (text / name).write_bytes((llava / name).read_bytes())
    (text / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for name in ("preprocessor_config.json", "processor_config.json"):
        (blind / name).unlink()
    row = {"instruction": "what?", "output": "red", "image": picture("small.png")}
    for folder, rows, words in (
        (text, conversations(), r"row 1: the record has images, and the model of model.hf = .* takes no images"),
        (text, [MARKED], r"row 1: the record has images, and the model of model.hf = .* takes no images"),
        (blind, conversations(), r"row 1: the record has images, and beside the model .* lies no processor \(proc"),
        (llava, [row], r"row 1: the record has images, and the task 'alpaca' reads none"),
    ):
        vision, source = vision_of(str(folder)), write_rows(data / "rows.jsonl", rows)
        with pytest.raises(ConfigError, match=words):
            prepare(str(source), FileTokenizer(llava), cache_dir=tmp_path / "cache", vision=vision)


def test_without_a_template_there_is_no_conversation(tmp_path, data):
    folder = model_folder("llava", tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="no chat template"):
        opened(data, folder, conversations())


@pytest.mark.all
def test_another_tokenizer_than_the_processors_is_refused(tmp_path, llava, data):
    other = model_folder("qwen2_5_vl", tmp_path / "other")
    source = write_rows(data / "rows.jsonl", conversations())
    with pytest.raises(ConfigError, match="does not write an image as the processor in"):
        prepare(str(source), FileTokenizer(other), cache_dir=tmp_path / "cache", vision=vision_of(str(llava)))


@pytest.mark.all
def test_without_pillow_the_extra_is_named(monkeypatch, llava, data):
    import sys

    from meshwright.core.errors import MissingExtraError

    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(MissingExtraError, match=r"pip install .*pillow"):
        opened(data, llava, conversations())


@pytest.mark.all
def test_parquet_names_its_images_and_those_inside_it_are_refused(llava, data):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    vision, cache = vision_of(str(llava)), data.parent / "cache"
    rows = [{**MARKED}, {**asks(about="none?"), "images": None}]
    rows[1]["messages"] = [{"role": m["role"], "content": m["content"][0]["text"]} for m in rows[1]["messages"]]
    parquet.write_table(pa.Table.from_pylist(rows), data / "rows.parquet")
    made = prepare(str(data / "rows.parquet"), FileTokenizer(llava), cache_dir=cache, vision=vision)
    split = open_corpus(made.folder, "refuse", made.scan).training
    named = [[file.name for file in files] for files in split.rows(np.array([0, 1]), SEQ)["images"]]
    assert named == [MARKED["images"], []]
    inside = [{**MARKED, "images": [{"bytes": b"abc", "path": "a.png"}] * 2}]
    parquet.write_table(pa.Table.from_pylist(inside), data / "rows.parquet")
    with pytest.raises(ConfigError, match=r"rows\.parquet, row 1: .* an image inside the record: write it to a file"):
        prepare(str(data / "rows.parquet"), FileTokenizer(llava), cache_dir=cache, vision=vision)


@pytest.mark.all
def test_images_inside_a_saved_dataset_are_refused_and_not_left_out(llava, data):
    datasets = pytest.importorskip("datasets")
    messages = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "red"}]
    table = {"messages": [messages] * 2, "image": [str(data / picture("wide.png"))] * 2}
    made = datasets.Dataset.from_dict(table).cast_column("image", datasets.Image())
    made.save_to_disk(str(data / "saved"))
    with pytest.raises(ConfigError, match="row 1: .* an image inside the record"):
        options = (str(data / "saved"), FileTokenizer(llava))
        prepare(*options, cache_dir=data.parent / "cache", vision=vision_of(str(llava)))
