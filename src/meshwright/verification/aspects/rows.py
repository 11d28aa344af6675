"""Join what modules computed of a batch's rows from the ranks that have them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from meshwright.comparison.equality import relative_errors
from meshwright.comparison.sketch import is_inside
from meshwright.verification.outcome import Outcome, Reference

Named = Mapping[str, Tensor]


class Rows:
    """The sketches of one stage and step: every rank's, and those of one process for the same rows.

    Ranks that have the same rows (tensor parallelism) compute a module's output whole, as one process does, or as
    partial sums, or each some tokens of every row (whose sketches are partial sums too), or each some features.
    Outputs sharded by features are not compared.

    Attributes:
        parts: modules whose features are sharded over ranks, or whose output is never whole; and modules whose sums
            are reduced together with another's, including those that pass such an output on.
    """

    def __init__(self, found: Outcome, reference: Reference, stage: str, step: int):
        one = reference.seen[0]
        known: Named = {
            name: rows
            for name, rows in getattr(one, stage)[step].items()
            if not is_inside(name, (*found.seen[0].compiled, *found.seen[0].unlike))
        }
        self._by_rank: Sequence[Named] = [getattr(seen, stage)[step] for seen in found.seen]
        self._places = [seen.place for seen in found.seen]
        self._tensor_ranks = [seen.tensor_rank for seen in found.seen]
        self._is_shared = len(found.seen) > self._places[0][1]
        self.parts = {
            name
            for name in known
            if any(seen.shapes.get(name) == () for seen in found.seen)
            or (
                self._is_shared
                and any(seen.shapes.get(name, one.shapes[name]) != one.shapes[name] for seen in found.seen)
            )
        }
        if stage == "backward":
            self.parts |= {name for seen in found.seen for name in seen.graphless.get(step, ())}
        given = one.forward[step]
        elsewhere = [given[path] for path in found.seen[0].summed if path in given]
        self.parts |= {
            name for name in known if name in given and any(torch.equal(given[name], other) for other in elsewhere)
        }
        known = {name: rows for name, rows in known.items() if name not in self.parts}
        self._expected = [{name: _cut(rows, *place) for name, rows in known.items()} for place in self._places]
        self._together = _joined(self._expected)

    def errors(self) -> dict[str, float]:
        """Return the relative error of each module, over all ranks' rows."""
        found = _joined(self._by_rank)  # wrappers may add modules of their own
        errors = relative_errors({name: rows for name, rows in found.items() if name in self._together}, self._together)
        if self._is_shared and any(errors.values()):
            for sums in self._summed():
                summed = relative_errors(_joined(sums), self._together)
                errors |= {name: min(error, summed.get(name, error)) for name, error in errors.items()}
        return errors

    def ranks(self, name: str, bound: float) -> tuple[int, ...]:
        """Return the ranks on whose rows the error exceeds its bound; none where it does on all."""
        beyond = []
        summed = self._summed() if self._is_shared else []
        for rank, found in enumerate(zip(self._by_rank, *summed, strict=True)):
            if not min(self._error_of(name, rank, own) for own in found) <= bound:
                beyond.append(rank)
        return tuple(beyond) if len(beyond) < len(self._by_rank) else ()

    def _error_of(self, name: str, rank: int, own: Named) -> float:
        """Compute the error if all other ranks had computed what one process did."""
        patched = [own if other == rank else expected for other, expected in enumerate(self._expected)]
        rows = {name: torch.cat([named[name] for named in patched])} if name in own else {}
        return relative_errors(rows, {name: self._together[name]})[name]

    def _summed(self) -> Iterator[list[Named]]:
        """Yield each rank's rows replaced by sums over the ranks that have the same rows: over all, whose outputs may
        be summands or parts; and over those of one tensor rank, where tensor ranks compute the same.
        """
        for keys in (self._places, [*zip(self._places, self._tensor_ranks, strict=True)]):
            found = []
            for key in keys:
                same = [named for other, named in zip(keys, self._by_rank, strict=True) if other == key]
                names = [name for name in same[0] if name in self._together and all(name in named for named in same)]
                found.append({name: torch.stack([named[name] for named in same]).sum(0) for name in names})
            yield found


def _cut(rows: Tensor, rank: int, ranks: int) -> Tensor:
    n = len(rows) // ranks
    return rows[rank * n : (rank + 1) * n]


def _joined(by_rank: Sequence[Named]) -> dict[str, Tensor]:
    """Concatenate the rows of all ranks, for modules that every rank has."""
    return {
        name: torch.cat([named[name] for named in by_rank])
        for name in by_rank[0]
        if all(name in named for named in by_rank)
    }
