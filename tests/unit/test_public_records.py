"""Public shapes of records under tokenizers of every behaviour: ids and mask to the token, or a refusal that names it.

``SHAPES`` and the oracle (support/record_table) know transformers and the published texts, and nothing of meshwright.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support import data_mutants
from support.record_table import SHAPES, Shape, ended, own, own_mask, own_pair
from support.tokenizers_made import WAYS, save_way

from meshwright.core.errors import ConfigError
from meshwright.data.building import Encoder
from meshwright.data.formats import RECORD_FORMATS
from meshwright.data.options import SourceOptions
from meshwright.data.tasks import choose_task
from meshwright.data.tokenizers import FileTokenizer


@pytest.fixture(params=list(WAYS))
def way(request, tmp_path) -> Path:
    return save_way(request.param, tmp_path / "tokenizer")


def read(record, made: FileTokenizer, **options) -> list[tuple[list[int], list[bool]]]:
    """The ids of each example of a record, and which are learnt."""
    task = choose_task(SourceOptions(**options), made, record)
    examples = task.examples_in(record, "row 1", Path())
    encoded = Encoder(task, made).encode(("training", example) for example in examples)
    return [(ids.tolist(), [True] * len(ids) if mask is None else mask.tolist()) for _, ids, mask, _ in encoded]


def expected(one: Shape, tokenizer) -> list[tuple[list[int], list[bool]]]:
    found = []
    for talk in one.read:
        if isinstance(talk, str):
            ids = ended(tokenizer, tokenizer(talk)["input_ids"])
            found.append((ids, [True] * len(ids)))
        elif isinstance(talk, tuple):
            found.append(own_pair(tokenizer, *talk))
        else:
            learnt = [len(talk) - 1] if "chosen" in one.record else one.learnt
            found.append(own_mask(tokenizer, talk, learnt, **({"tools": one.tools} if one.tools else {})))
    return found


def wrong(folder: Path) -> dict[str, str]:
    """The shapes that are read otherwise than by the tokenizer's own calls, or not refused by what they name."""
    tokenizer, made, found = own(folder), FileTokenizer(folder), {}
    for name, one in SHAPES.items():
        says = one.refusal(tokenizer.chat_template)
        try:
            got = read(one.record, made, **one.options)
        except ConfigError as error:
            if not says or not re.match(rf"row 1(, |: (?:'\\w+': )?){says}", str(error)):
                found[name] = f"refused: {error}"
            continue
        if says:
            found[name] = "not refused"
        elif got != (want := expected(one, tokenizer)):
            found[name] = f"{got} is not {want}"
    return found


def test_public_shapes_are_read_as_by_the_own_call_or_refused(way):
    assert not wrong(way)


MIXED = {"messages, parts", "messages, answer in parts"}
"""Their turns hold text and lists, which no column of Arrow holds together."""


@pytest.mark.parametrize("tokenizer", ["calls tools", "begins"])
def test_saved_data_sets_of_arrow_are_read_as_their_records(tokenizer, tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    made = FileTokenizer(save_way(tokenizer, tmp_path / "tokenizer"))
    template = own(tmp_path / "tokenizer").chat_template
    for number, (name, one) in enumerate(SHAPES.items()):
        if name in MIXED:
            continue
        folder, says = tmp_path / str(number), one.refusal(template)
        datasets.Dataset.from_list([one.record]).save_to_disk(str(folder))
        ((_, record),) = RECORD_FORMATS["dataset"].records(folder)
        if says:
            with pytest.raises(ConfigError, match=says):
                read(record, made, **one.options)
        else:
            assert read(record, made, **one.options) == read(one.record, made, **one.options), name


MUTANTS = {
    "mask_one_early": ("begins", "completion"),
    "mask_one_late": ("begins", "messages"),
    "bos_dropped": ("begins", "text"),
    "end_dropped": ("begins", "completion"),
    "weight_0_learnt": ("neither", "messages, weight"),
    "column_dropped": ("neither", "completion, system"),
    "calls_dropped": ("neither", "messages, call of no tools"),
    "parts_of_answers_dropped": ("neither", "messages, answer in parts"),
}
"""A mutant of data, and a tokenizer with a shape of records by which it is caught."""


@pytest.mark.kills("data", "mutant")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_of_data_is_caught(mutant, tmp_path):
    tokenizer, name = MUTANTS[mutant]
    folder = save_way(tokenizer, tmp_path / "tokenizer")
    with getattr(data_mutants, mutant)():
        assert name in wrong(folder)


def test_every_mutant_of_data_is_tried():
    defined = {
        name for name, value in vars(data_mutants).items() if getattr(value, "__module__", "").endswith("data_mutants")
    }
    assert {name for name in defined if name[0] != "_"} == set(MUTANTS)
