"""Train on pairs of answers: the loss of a run, and what the first weights gave its pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

from meshwright.core.config.schema import is_unset
from meshwright.core.errors import ConfigError, IntegrityError, MissingExtraError, UnsupportedError
from meshwright.core.files import replacing
from meshwright.core.losses import PreferenceLoss
from meshwright.data.corpus import Pairs
from meshwright.data.formats import RECORD_FORMATS, first_record
from meshwright.data.mixture import Samples
from meshwright.data.packing import RowEnds, ended, lengths_at
from meshwright.data.scan import list_files
from meshwright.data.tasks import TASK, task_name
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.distributed.process import agree
from meshwright.distributed.process.world import is_rank_zero
from meshwright.training.config import Config
from meshwright.training.feed import Feed

FOLDER = "reference"
"""Subfolder of a run with the log-probabilities of its pairs under the first weights."""


def loss_of(config: Config, feed: Feed) -> PreferenceLoss | None:
    """Return the loss of a run on pairs; None for any other, which has the cross entropy.

    Raises:
        ConfigError: [dpo] is given and there are no pairs.
        UnsupportedError: the run is to be compared with a trace, which is of the cross entropy.
    """
    if not is_on_pairs(feed):
        if not (is_unset(config.dpo.beta) and is_unset(config.dpo.label_smoothing)):
            raise ConfigError(
                f"dpo.beta = {config.dpo.beta} and dpo.label_smoothing = {config.dpo.label_smoothing} are of pairs of"
                f" answers, and the task of data.source is another one: leave [dpo] out, or give records"
                f" with the columns chosen and rejected"
            )
        return None
    if config.check_trace:
        raise UnsupportedError("check_trace compares with the cross entropy, and this run is on pairs: leave it out")
    return PreferenceLoss(config.dpo.beta, config.dpo.label_smoothing)


def is_on_pairs(feed: Feed) -> bool:
    """Return whether a run's data are pairs of answers."""
    return any(_splits(feed))


def expects_pairs(config: Config) -> bool:
    """Return whether the first record of a config's data is a pair of answers, for what is planned before data is read.

    Data that cannot be read here counts as pairs where ``dpo`` is stated: whoever trains on it is told why.
    """
    for part in config.data.mixture or (config.data,):
        if part.task != "auto":
            return part.task == TASK
        try:
            listed, form, _ = list_files(part.source, part.format)
            if form not in RECORD_FORMATS:
                return False
            return task_name(part, first_record([path for _, _, path in listed], form)) == TASK
        except (ConfigError, MissingExtraError, IntegrityError, OSError):
            return not all(map(is_unset, vars(config.dpo).values()))
    return False


def give_references(
    config: Config,
    feed: Feed,
    model: ParallelModel,
    folder: Path,
    place: tuple[int, int],
    *,
    has_begun: bool,
    stopped: Callable[[], int],
) -> int:
    """Give every pair the log-probabilities of its answers under the first weights. Collective.

    They are computed before the first step, and read from the run's folder when the run goes on. Where adapters can be
    switched off, nothing is computed beforehand: each step computes without them.

    Args:
        place: this process's data rank, and the number of data ranks.
        has_begun: whether the weights are no longer the first ones.
        stopped: returns a signal that all ranks agree on, or 0.

    Returns:
        A signal that came meanwhile, else 0.

    Raises:
        IntegrityError: a run that has begun has lost them.
    """
    (rank, ranks), length, ends = place, config.data.seq_len, feed.ends or RowEnds()
    rows = config.batch.microbatch or config.batch.global_batch // ranks
    for split in _splits(feed) if _why_computed(config, model) else ():
        n, path = split.n_samples(length), folder / FOLDER / f"{split.name}.npy"
        read = partial(_read, path, n, has_begun)
        values = agree.from_rank_zero(agree.together(read, here=is_rank_zero()))
        if values is None:
            found = []
            for begin in range(0, n, rows * ranks):
                # the last row again, where there are no more, so that all ranks have as many
                of_ranks = np.minimum(begin + np.arange(ranks * rows).reshape(ranks, rows), n - 1)
                own = ends.length([split], lengths_at(split, of_ranks, length), length)
                arrays = ended(split.rows(of_ranks[rank], length), own)
                batch = {key: torch.from_numpy(array) for key, array in arrays.items()}
                found.append(model.row_log_probs(batch).double().cpu().numpy())
                if signal := stopped():
                    return signal
            by_rank = dict(agree.everybody_says((rank, np.stack(found))))
            values = np.stack([by_rank[each] for each in range(ranks)], axis=1).reshape(-1)[:n]

            def write(path: Path = path, values: np.ndarray = values) -> None:
                path.parent.mkdir(exist_ok=True)
                with replacing(path) as temporary, open(temporary, "wb") as file:
                    np.save(file, values)

            agree.together(write, here=is_rank_zero())
        split.set_reference(length, values)
    return 0


def _why_computed(config: Config, model: ParallelModel) -> str:
    """Return why the model without its adapters is not that of the first step; "" where it is."""
    begun = f"the adapters of {config.model.adapter} were trained before" if config.model.adapter else ""
    return begun or model.reference_refusal


def where_reference_comes_from(config: Config, feed: Feed, model: ParallelModel) -> str:
    """Say how the log-probabilities under the first weights are found; "" for a run without pairs."""
    if not is_on_pairs(feed):
        return ""
    if why := _why_computed(config, model):
        return f"computed before the first step, and kept in {FOLDER}/ ({why})"
    return "the model without its adapters, in each step"


def pretend_references(config: Config, feed: Feed) -> None:
    """Give every pair log-probabilities of zero, for steps whose values nobody asks for."""
    for split in _splits(feed):
        split.set_reference(config.data.seq_len, np.zeros(split.n_samples(config.data.seq_len)))


def _splits(feed: Feed) -> Iterator[Pairs]:
    """Yield the splits that hold pairs, each once."""
    trained = feed.samples.splits if isinstance(feed.samples, Samples) else ()
    yield from (split for split in (*trained, *(held.split for held in feed.held_out)) if isinstance(split, Pairs))


def _read(path: Path, n: int, has_begun: bool) -> np.ndarray | None:
    try:
        values = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        values = None
    except (OSError, ValueError) as error:
        raise IntegrityError(f"{path} cannot be read ({error}): begin the run anew") from None
    if values is not None and values.shape != (n,):
        raise IntegrityError(
            f"{path} holds {values.shape} log-probabilities, and there are {n} rows: begin the run anew"
        )
    if values is None and has_begun:
        raise IntegrityError(
            f"{path} is missing: it holds what the first weights gave the pairs, which this run no longer has. Put it"
            f" back, or begin the run anew"
        )
    return values
