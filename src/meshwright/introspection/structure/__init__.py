"""How a transformer can be cut among tensor-parallel ranks, measured on a small copy of it: no names, no list of families."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from meshwright.core.names import clean

from .local_form import LocalForm, local_form
from .probe import Probe
from .regions import Region
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
        probes: of the sample's first block of each kind, by its path.
        parameter_bytes: what each parameter of the model itself takes, by its names.
    """

    structure: Structure
    ranks: int
    forms: dict[tuple[str, str], LocalForm | None]
    sample: Sample
    probes: dict[str, list[Probe]] = field(default_factory=dict)
    parameter_bytes: dict[str, int] = field(default_factory=dict)

    def form_of(self, block: str, region: Region) -> LocalForm | None:
        """How a region that was not measured runs on one rank; None where no way was found."""
        probes = self.probes.get(block, [])
        known = {path for probe in probes for path in probe.calls}
        if not probes or not known.issuperset((region.container, *region.producers, region.consumer)):
            return None
        return local_form(probes, region, self.ranks)


def measured(model: nn.Module, arguments: dict[str, str | None], vocab_size: int, ranks: int) -> Measured:
    """Measure a small copy of ``model``. Takes tenths of a second.

    Args:
        arguments: "tokens" -> what the model's forward calls them.

    Raises:
        UnsupportedError: the model cannot be measured; the text says why.
    """
    sample = sample_of(model, arguments, vocab_size)
    structure, probes = measure(sample, model)
    sizes = {clean(name): p.numel() * p.element_size() for name, p in model.named_parameters(remove_duplicate=False)}
    return Measured(structure, ranks, forms(structure, probes, ranks), sample, probes, sizes)
