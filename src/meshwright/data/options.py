"""Define the options of a source: its location, its format, and the part of it that is learnt.

This module is part of the config tree and does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from meshwright.core.config.ranges import FROM_0, NOT_EMPTY

Format = Literal["auto", "text", "jsonl", "json", "csv", "parquet", "dataset", "npy", "bin", "megatron"]
FARMYARD = "farmyard"
"""The word for the demo's text (``farmyard.toml``)."""
STDLIB = "stdlib"
"""The word for the source code of the running Python's standard library."""
BUILT_IN = (FARMYARD, STDLIB)
"""Words for sources that are no files of the user's."""

Task = Literal["auto", "text", "completion", "chat", "alpaca", "preference"]


@dataclass(frozen=True)
class SourceOptions:
    """One source of samples."""

    source: Annotated[tuple[Annotated[str, NOT_EMPTY], ...], NOT_EMPTY] = (FARMYARD,)
    """Files or folders; "farmyard" is the demo's text, short sentences about animals; "stdlib" is the source code of
    Python's own standard library."""
    format: Format = "auto"
    """How they are written; auto: by the names of the files. json: a list of records; csv: CSV or TSV; dataset: a
    folder of Hugging Face datasets' save_to_disk; npy, bin and megatron hold token ids, and are read where they lie.
    """
    task: Task = "auto"
    """The part of a record that is learnt; auto: chat where it has messages, completion where it has prompt and
    completion, or question and answer, alpaca where it has instruction and output, preference where it
    has chosen and rejected, else text."""
    column: Annotated[str, NOT_EMPTY] = "text"
    """The column that holds the text; for the task chat, "text" means "messages"."""
    dtype: str = ""
    """Of the ids in a flat .bin file: uint8, uint16, uint32, int32 or int64, little-endian; it says nothing about
    itself."""
    template: str = ""
    """A file with the Jinja template of a chat; empty: the tokenizer's own. Where it is given, prompts and answers of
    text are turns too; "own" is the tokenizer's for these."""
    learn: Literal["answers", "last", "all"] = "answers"
    """What is learnt of a conversation: the assistant's turns, the last of them, or the whole text; of a prompt and its
    answer, "all" learns the prompt too. Turns marked by weight 0, or by train, training or loss = false, are read only.
    """
    ignore: tuple[str, ...] = ()
    """Columns that are left out on purpose, as if records had none of them."""
    end_of_answer: bool = False
    """The token that ends a document is put behind each answer of a chat that its template does not end with a special
    token, and learnt."""
    on_bad_row: Literal["refuse", "skip"] = "refuse"
    """The treatment of a record that cannot be used: the run is refused, with file and row, or it is left out, counted
    and said.
    """
    too_long: Literal["refuse", "truncate", "skip"] = "refuse"
    """The treatment of a conversation that is longer than seq_len (plain text is cut into rows and is never too long).
    """
    streaming: bool = False
    """Records are tokenised as they are needed, in the order of the files, instead of all beforehand: nothing is held
    out or shuffled, every rank reads everything, and continuing a run reads again what came before.
    """
    max_epochs: Annotated[float, FROM_0] = 0.0
    """The run is refused if it would read the source more often than this; 0: as often as it takes."""


@dataclass(frozen=True)
class MixturePart(SourceOptions):
    """One source of a mixture."""

    name: str = ""
    """What metrics and messages call it; empty: the name of its first file or folder."""
    weight: Annotated[float, FROM_0] = 1.0
    """Its share of the samples is its weight over the sum of all weights."""


@dataclass(frozen=True)
class CurriculumStage:
    """Other weights from some step on."""

    from_step: Annotated[int, FROM_0]
    """The first step with these weights."""
    weights: Annotated[tuple[Annotated[float, FROM_0], ...], NOT_EMPTY]
    """One for each part of the mixture, in their order; 0 leaves a part out."""
