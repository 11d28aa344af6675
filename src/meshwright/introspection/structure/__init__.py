"""How a transformer can be cut among tensor-parallel ranks, measured on a small copy of it: no names, no list of families."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from .local_form import LocalForm
from .sample import Sample, sample_of
from .structure import Structure, forms, measure


@dataclass(frozen=True)
class Measured:
    """What was measured of a model.

    Attributes:
        structure: how it can be cut.
        ranks: size of the tensor axis.
        forms: how each region runs on one of ``ranks``, by (first block of its kind, consumer); None where it cannot.
        sample: the small copy that was measured.
    """

    structure: Structure
    ranks: int
    forms: dict[tuple[str, str], LocalForm | None]
    sample: Sample


def measured(model: nn.Module, arguments: dict[str, str | None], vocab_size: int, ranks: int) -> Measured:
    """Measure a small copy of ``model``. Takes tenths of a second.

    Args:
        arguments: "tokens" -> what the model's forward calls them.

    Raises:
        UnsupportedError: the model cannot be measured; the text says why.
    """
    sample = sample_of(model, arguments, vocab_size)
    structure, probes = measure(sample, model)
    return Measured(structure, ranks, forms(structure, probes, ranks), sample)
