"""Measure on a small copy how tensor-parallel ranks can share a transformer, without names or a list of families."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import nn

from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.core.names import clean
from meshwright.introspection.small.sample import Sample, samples_of

from .local_search import LocalForm, line_that_stops, local_form
from .probe import Probe
from .regions import Region, resized, shapes_of
from .structure import Structure, forms, measure


@dataclass(frozen=True)
class Measured:
    """The measured structure of a model.

    Attributes:
        structure: possible cuts of the model.
        ranks: size of the tensor axis.
        forms: how each region runs on one of ``ranks``, by (first block of its kind, consumer); None where it cannot.
        sample: the small copy that was measured.
        probes: probes of the sample's first block of each kind, by its path.
        parameter_bytes: bytes of each parameter of the model itself, by its names.
        shapes: shapes of parameters and buffers in the model's first block of each kind, by block and local name.
    """

    structure: Structure
    ranks: int
    forms: dict[tuple[str, str], LocalForm | None]
    sample: Sample
    probes: dict[str, list[Probe]] = field(default_factory=dict)
    parameter_bytes: dict[str, int] = field(default_factory=dict)
    shapes: dict[str, dict[str, torch.Size]] = field(default_factory=dict)

    def form_of(self, block: str, region: Region, *, without_mask: bool = False) -> LocalForm | None:
        """Find how a region that was not measured runs on one rank; None if no way is found.

        Args:
            without_mask: in forwards that are given no padding mask.
        """
        probes = self.probes.get(block, [])[: 1 if without_mask else None]
        known = {path for probe in probes for path in probe.calls}
        if not probes or not known.issuperset((region.container, *region.linears)):
            return None
        return local_form(probes, self._small(block, region), self.ranks)

    def line_that_stops(self, block: str, region: Region) -> str:
        """Return the model's line at which a region of these sizes does not compute on one rank; "" if none stops."""
        small = self._small(block, region)
        fits = region.fits(self.ranks) and small.fits(self.ranks)
        return line_that_stops(self.probes[block][0], small, self.ranks) if fits else ""

    def _small(self, block: str, region: Region) -> Region:
        """Return a region in the sample's sizes."""
        shapes = shapes_of(self.probes[block][0].block)
        return resized(region, self.shapes[block], shapes, Fraction(1, self.sample.heads))


def measured(model: nn.Module, arguments: dict[str, str | None], ranks: int) -> Measured:
    """Measure a small copy of ``model``, which takes tenths of a second.

    Args:
        arguments: "tokens" -> the name of that argument of the model's forward.

    Raises:
        UnsupportedError: the model cannot be measured; the text names the reason.
    """
    trouble: UnsupportedError | None = None
    try:
        for sample in samples_of(model, arguments, ranks, few_experts=True):
            try:
                structure, tried = measure(sample, model)
            except (
                UnsupportedError
            ) as error:  # findings on a small copy do not hold for the model: the next copy is larger
                trouble = error
            except ConfigError:  # hints name a module or argument that the model lacks
                raise
            except Exception as error:  # noqa: BLE001  (whatever a model's code raises when it is called in parts)
                trouble = UnsupportedError(
                    f"the structure of {type(model).__name__} could not be measured: its code failed on a small copy of"
                    f" it ({type(error).__name__}: {error})"
                )
            else:
                sizes = {
                    clean(name): p.numel() * p.element_size()
                    for name, p in model.named_parameters(remove_duplicate=False)
                }
                probes = {kind.blocks[0]: found for kind, (found, _) in zip(structure.kinds, tried, strict=True)}
                shapes = {block: shapes_of(model.get_submodule(block)) for block in probes}
                return Measured(structure, ranks, forms(structure, tried, ranks), sample, probes, sizes, shapes)
    except UnsupportedError as error:
        raise trouble or error from None
    raise trouble or UnsupportedError(f"{type(model).__name__} could not be measured")
