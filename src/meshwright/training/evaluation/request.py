"""Evaluate an opened model's loss, as one rank of however many."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.core.errors import ConfigError
from meshwright.data import SourceOptions
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.distributed.setup import DistributedConfig
from meshwright.planning.layout import Layout
from meshwright.training.config import ProcessConfig
from meshwright.training.run.opened import Opened

from .losses import ROWS, Evaluation, evaluate_rows
from .rows import own_rows, rows_of


@dataclass(frozen=True)
class ModelOnRanks:
    """An opened model, and the layout on which the ranks evaluate it."""

    opened: Opened
    layout: Layout
    process: ProcessConfig

    def model(self) -> ParallelModel:
        """Bring the ranks up, and read the model (collective)."""
        p = self.process
        setup = DistributedConfig(
            **vars(self.layout),
            backend=p.backend,
            startup_timeout_sec=p.startup_timeout_sec,
            nccl_timeout_sec=p.step_timeout_sec,
        )
        return self.opened.model(setup)


@dataclass(frozen=True)
class TextRequest:
    """The loss of a model on a source.

    Attributes:
        source: None: the validation part of the run's own data.
        seq_len: tokens per row; 0: as the model was trained.
        limit: number of rows; None: all.
        batch_rows: rows per forward of a data rank.
    """

    placed: ModelOnRanks
    source: SourceOptions | None = None
    seq_len: int = 0
    cache: str = ""
    limit: int | None = None
    batch_rows: int = ROWS


def evaluate_loss(request: TextRequest) -> Evaluation:
    """Evaluate on this rank (collective).

    Raises:
        ConfigError: rows are longer than the model takes, or the source cannot be used.
    """
    opened = request.placed.opened
    data = opened.config.data
    data = replace(data, seq_len=request.seq_len or data.seq_len, cache=request.cache or data.cache)
    config = replace(opened.config, data=data)
    model = request.placed.model()
    longest = model.facts.max_seq_len
    if longest is not None and data.seq_len > longest:
        raise ConfigError(
            f"--data.seq_len = {data.seq_len}: the model takes rows of at most {longest} tokens; lower it"
        )
    if request.source is None:
        chosen = own_rows(config, opened.tokenizer, request.limit)
    else:
        chosen = rows_of(config, request.source, opened.tokenizer, request.limit)
    return evaluate_rows(model, chosen, data.seq_len, opened.tokenizer, request.batch_rows)
