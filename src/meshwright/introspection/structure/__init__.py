"""How a transformer can be cut among tensor-parallel ranks, measured on a small copy of it: no names, no list of families."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from meshwright.core.errors import UnsupportedError

from .local_form import LocalForm
from .sample import Sample, samples_of
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


def measured(model: nn.Module, arguments: dict[str, str | None], ranks: int) -> Measured:
    """Measure a small copy of ``model``. Takes tenths of a second.

    Args:
        arguments: "tokens" -> what the model's forward calls them.

    Raises:
        UnsupportedError: the model cannot be measured; the text says why.
    """
    trouble: UnsupportedError | None = None
    try:
        for sample in samples_of(model, arguments, ranks):
            try:
                structure, tried = measure(sample, model)
            except UnsupportedError as error:  # what a small one shows does not hold for the large one: the next is larger
                trouble = error
            except Exception as error:  # noqa: BLE001  (whatever a model's code raises when it is called in parts)
                trouble = UnsupportedError(
                    f"the structure of {type(model).__name__} could not be measured: its code failed on a small copy of it"
                    f" ({type(error).__name__}: {error})"
                )
            else:
                return Measured(structure, ranks, forms(structure, tried, ranks), sample)
    except UnsupportedError as error:
        raise trouble or error from None
    raise trouble or UnsupportedError(f"{type(model).__name__} could not be measured")
