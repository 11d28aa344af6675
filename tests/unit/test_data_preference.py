"""Pairs of a better and a worse answer: two rows, side by side, whatever the order, the ranks and the reader."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.data.building import TokenisingRecipe
from meshwright.data.cache import open_corpus, prepare
from meshwright.data.corpus import Pairs
from meshwright.data.loader import Loader, StreamedSamples, validation_batches
from meshwright.data.mixture import Samples
from meshwright.data.options import SourceOptions
from meshwright.data.packing import IGNORE_INDEX, RowEnds
from meshwright.data.scan import list_sources
from meshwright.data.tokenizers import ByteTokenizer

SEQ = 24
TEXTS = [{"prompt": f"q{i}", "chosen": f"good{i}", "rejected": f"bad{i}"} for i in range(10)]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ASK, GOOD, BAD = (
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "assistant", "content": "5"},
)


def opened(tmp_path: Path, rows: list[dict], fraction: float = 0.0, **options) -> Pairs:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    if not isinstance(rows[0].get("chosen"), str):
        options["template"] = str(tmp_path / "t.jinja")
    source = SourceOptions((str(tmp_path / "a.jsonl"),), **options)
    return open_corpus(prepare(source, ByteTokenizer(), fraction, tmp_path / "cache").folder, source.too_long)


def answers(batch) -> list[str]:
    """What each row is to learn, without the end of the document."""
    return [ByteTokenizer().decode(row[row != IGNORE_INDEX]) for row in np.asarray(batch["labels"])]


def test_a_pair_is_two_rows_of_one_document_whose_prompt_is_not_learnt(tmp_path):
    rows = opened(tmp_path, TEXTS[:2]).training.rows(np.arange(4), SEQ)
    assert answers(rows) == ["good0", "bad0", "good1", "bad1"]
    assert [ByteTokenizer().decode(row) for row in rows["tokens"]] == ["q0good0", "q0bad0", "q1good1", "q1bad1"]
    assert rows["labels"][0].tolist() == [-100, *b"good0", 256] + [-100] * (SEQ - 7)
    assert rows["document_ids"][1].tolist() == [0] * 7 + [-1] * (SEQ - 7)


@pytest.mark.first
@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        {"prompt": "2+2?", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        {"prompt": [ASK], "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        {"prompt": "2+2?", "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": "2+2?", "chosen": {"from": "gpt", "value": "4"}, "rejected": {"from": "gpt", "value": "5"}},
        {"chosen": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}], "rejected": [ASK, BAD]},
    ],
)
def test_every_form_of_a_conversation_with_two_answers_gives_the_same_rows(tmp_path, row):
    rows = opened(tmp_path, [row]).training.rows(np.arange(2), 40)
    assert answers(rows) == ["4;", "5;"]
    assert [ByteTokenizer().decode(ids[ids != 256]) for ids in rows["tokens"]] == [
        "<user>2+2?;<assistant>4;",
        "<user>2+2?;<assistant>5;",
    ]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"prompt": "q", "chosen": "a"},
            r"row 2: the column 'rejected' is missing. Columns with a value: 'prompt', 'ch",
        ),
        ({"prompt": "q", "chosen": "a", "rejected": None}, r"row 2: the column 'rejected' is empty"),
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, r"row 2: 'chosen' and 'rejected' are the same"),
        ({"chosen": "a", "rejected": "b"}, r"row 2: there is no column 'prompt', and the two sides do not begin"),
        ({"prompt": "q", "chosen": "a", "rejected": [BAD]}, r"row 2: the column 'rejected' must hold text"),
    ],
)
def test_a_pair_that_is_none_is_named_with_its_row(tmp_path, row, words):
    with pytest.raises(ConfigError, match=r"a.jsonl, " + words):
        opened(tmp_path, [TEXTS[0], row])
    kept = opened(tmp_path, [TEXTS[0], row, TEXTS[1]], on_bad_row="skip").training
    assert answers(kept.rows(np.arange(4), SEQ)) == ["good0", "bad0", "good1", "bad1"]


@pytest.mark.first("row1-'chosen' must .*adds assistant, user, assistant")
@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"chosen": [ASK, GOOD], "rejected": [ASK]}, r"row 2: 'rejected' must add one answer .*and adds nothing"),
        (
            {"chosen": [ASK, GOOD, ASK, GOOD], "rejected": [ASK, BAD]},
            r"'chosen' must .*adds assistant, user, assistant",
        ),
        ({"chosen": [GOOD], "rejected": [BAD]}, r"row 2: 'chosen' answers nothing: the column 'prompt' is empty"),
        (
            {"prompt": "3+3?", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
            r"'prompt' has other messages than the two sides begin with",
        ),
        ({"prompt": [ASK], "chosen": 4, "rejected": 5}, r"row 2: 'chosen' must be a list of messages"),
    ],
)
def test_a_conversation_that_is_no_pair_is_named_with_its_row(tmp_path, row, words):
    with pytest.raises(ConfigError, match=r"a.jsonl, .*" + words):
        opened(tmp_path, [{"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, row])


def both_sides(found: list[str]) -> bool:
    pairs = zip(found[::2], found[1::2], strict=True)
    return all(good.startswith("good") and bad == good.replace("good", "bad") for good, bad in pairs)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_pairs_stay_together_in_every_epoch_on_every_number_of_ranks(tmp_path, world):
    samples = Samples.of([opened(tmp_path, TEXTS).training], SEQ, seed=3)
    loaders = [Loader(samples, 8, rank, world) for rank in range(world)]
    steps = []
    for _ in range(5):  # two epochs of ten pairs
        parts = [answers(next(loader)) for loader in loaders]
        assert all(both_sides(part) for part in parts)
        steps += [row for part in parts for row in part]
    assert sorted(steps[:20]) == sorted(steps[20:]) == sorted(answers(samples.splits[0].rows(np.arange(20), SEQ)))
    assert steps[:20] != steps[20:] and samples.epochs(40) == {"training": 2.0}
    assert steps == [row for index in range(40) for row in answers(samples.rows(np.array([index])))], "at any index"


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        (RowEnds(), [18, 18]),  # pair 3 is the longest
        (RowEnds(multiple=8), [24, 24]),
        (RowEnds(multiple=100), [SEQ, SEQ]),
        (RowEnds(microbatch=2), [5, 18]),
        (RowEnds(microbatch=2, is_fixed=True), [18, 18]),
    ],
)
def test_a_microbatch_ends_where_the_longest_row_of_all_ranks_ends(tmp_path, ends, expected):
    rows = [{"prompt": "q", "chosen": "a" * n, "rejected": "b"} for n in (3, 2, 6, 16)]
    samples = Samples.of([opened(tmp_path, rows).training], SEQ, seed=0)
    assert samples.orders[0].take(np.arange(4)).tolist() == [0, 3, 1, 2], "the first rank has the longest"
    whole, ended = ([Loader(samples, 8, rank, 2, ends=each) for rank in range(2)] for each in (None, ends))
    for loader, short in zip(whole, ended, strict=True):
        padded, pieces = next(loader), next(short)
        pieces = pieces if isinstance(pieces, list) else [pieces]
        assert [piece["tokens"].shape[1] for piece in pieces] == expected[: len(pieces)]
        for key in padded:
            found = [row.tolist() for piece in pieces for row in piece[key]]
            assert found == [row[: len(one)] for row, one in zip(padded[key].tolist(), found, strict=True)]
        assert [one for piece in pieces for one in answers(piece)] == answers(padded), "nothing but padding is gone"


def test_half_a_pair_for_a_rank_is_refused(tmp_path):
    samples = Samples.of([opened(tmp_path, TEXTS).training], SEQ, seed=0)
    with pytest.raises(
        ConfigError,
        match=r"batch.global_batch = 6 rows are 3 for each of 2 data ranks, and each pair of answers takes 2. Legal: a"
        r" multiple of 4, like 4 or 8",
    ):
        Loader(samples, 6, 0, 2)
    with pytest.raises(ConfigError, match=r"rows = 3 per data rank, and each pair of answers takes 2: make it even"):
        validation_batches(samples.splits[0], SEQ, 4, 3)


def test_pairs_are_held_out_and_validated_whole(tmp_path):
    corpus = opened(tmp_path, TEXTS, fraction=0.3)
    assert (corpus.training.n_documents, corpus.validation.n_documents) == (14, 6)
    for world in (1, 2):
        ranks = [list(validation_batches(corpus.validation, SEQ, 5, 2, rank, world)) for rank in range(world)]
        found = [answers(batch) for batches in zip(*ranks, strict=True) for batch in batches]
        assert len(found) == 2 and all(both_sides(pair) for pair in found)


def test_an_answer_that_is_too_long_takes_the_other_with_it(tmp_path):
    rows = [*TEXTS[:2], {"prompt": "q", "chosen": "good2", "rejected": "b" * 40}, TEXTS[3]]
    with pytest.raises(ConfigError, match=r"1 of the 8 conversations .* longer than data.seq_len = 24"):
        opened(tmp_path, rows).training.n_samples(SEQ)
    left = opened(tmp_path, rows, too_long="skip").training
    assert left.n_samples(SEQ) == 6
    assert answers(left.rows(np.arange(6), SEQ)) == ["good0", "bad0", "good1", "bad1", "good3", "bad3"]
    cut = opened(tmp_path, rows, too_long="truncate").training
    assert answers(cut.rows(np.arange(4, 6), SEQ)) == ["good2", "b" * 23]


class HalfUnreadable:
    """Samples of pairs of which the second pair's worse answer cannot be read."""

    rows_together, seq_len = 2, SEQ

    def __init__(self, samples: Samples):
        self.samples = samples

    def rows(self, indexes):
        if 3 in indexes:
            raise OSError("gone")
        return self.samples.rows(indexes)


@pytest.mark.parametrize("has_reference", [False, True])
def test_a_pair_of_which_half_cannot_be_read_is_left_out_whole(tmp_path, has_reference):
    pairs = opened(tmp_path, TEXTS).training
    samples = Samples.of([pairs], SEQ, seed=0)
    if has_reference:
        pairs.set_reference(SEQ, np.arange(20) - 30.0)
    loader = Loader(HalfUnreadable(samples), 6, skip_unreadable=True)
    batch = next(loader)
    assert ("reference_log_probs" in batch) == has_reference
    if has_reference:
        given = batch["reference_log_probs"].tolist()
        expected = samples.orders[0].take(np.arange(3)) * 2 - 30.0
        assert given == [expected[0], expected[0] + 1, 0.0, 0.0, expected[2], expected[2] + 1], "each row's own"
    found = answers(batch)
    assert found[2:4] == ["", ""] and both_sides(found[:2] + found[4:]) and sorted(loader.unreadable) == [2, 3]


def test_what_would_part_pairs_is_refused(tmp_path):
    pairs = opened(tmp_path, TEXTS).training
    with pytest.raises(UnsupportedError, match=r"the part 'b' of data.mixture holds pairs .* make it the only source"):
        (tmp_path / "b.txt").write_text("x" * 100)
        prose = open_corpus(prepare(str(tmp_path / "b.txt"), ByteTokenizer(), 0, tmp_path / "cache").folder).training
        Samples.of([prose, pairs], SEQ, 0, ["a", "b"])
    options = SourceOptions((str(tmp_path / "a.jsonl"),))
    recipe = TokenisingRecipe(list_sources(options.source), options, ByteTokenizer(), 0.0)
    with pytest.raises(UnsupportedError, match=r"parts the two answers of a preference pair: leave data.streaming out"):
        StreamedSamples(recipe, SEQ, print)
