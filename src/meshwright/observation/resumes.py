"""Say what a rank that read a file, or joined, brought back of what it had."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .traces import Run, relative, vector


class Resume:
    """The beginning of a step, where ranks may read a file or join.

    Args:
        step: 0 the first.
    """

    def __init__(self, many: Run, step: int):
        self.many, self.number = many, step

    def joined(self, rank: int) -> bool:
        """Return whether a rank takes this step with one that took the last, too, as it did not."""
        before, here = ([bool(one["after"]) for one in self.many.at(n)] for n in (self.number - 1, self.number))
        return self.number > 0 and here[rank] and not before[rank] and any(map(min, before, here))

    def reads(self, rank: int) -> bool:
        """Return whether a rank read a file, or joined, just before the step."""
        last = self.many.step(rank, self.number - 1)["loaded"] if self.number else []
        return "after" in last or "before" in self.many.step(rank, self.number)["loaded"] or self.joined(rank)

    def kind(self, ranks: Sequence[int], norms: Iterable[float], keys: Sequence[str] = ()) -> str:
        """Say whether what ranks lost at a resume had been saved: tensors by their norms, numbers by their names."""
        saved, names = self.saved(all(map(self.joined, ranks)))
        if not saved and not names:
            return "not restored"
        there = all(any(abs(norm - other) <= 1e-6 * norm for other in saved) for norm in norms)
        return (
            "not restored"
            if there and all(any(n.endswith(key) or key.endswith(f".{n}") for n in names) for key in keys)
            else "not saved"
        )

    def is_older(self, rank: int, name: str) -> bool:
        """Return whether a parameter is what a step before the last one left."""
        now = self.many.step(rank, self.number)["before"].get(name)
        older = [self.many.step(rank, step)["after"].get(name) for step in range(self.number - 1)]
        return bool(now) and any(there and relative(vector(now), vector(there)) < 1e-6 for there in older)  # type: ignore[arg-type]

    def has_anothers(self, rank: int, name: str) -> bool:
        """Return whether a parameter's first moment was, before the step, that of another parameter."""
        own, last = self.many.step(rank, self.number), self.many.step(rank, self.number - 1)["state"]
        gradient, rates = own["gradients"].get(name), own["rates"].get(name, {})
        moment = "exp_avg" if "betas" in rates else "momentum_buffer"
        if not self.number or gradient is None or moment not in own["state"].get(name, {}):
            return False
        kept = rates["betas"][0] if "betas" in rates else rates.get("momentum") or 1.0
        new = vector(gradient) * (1 - kept if "betas" in rates else 1.0)
        begun = (vector(own["state"][name][moment]) - new) / kept
        others = {other: state[moment] for other, state in last.items() if moment in state}
        return any(other != name and relative(begun, vector(there)) < 1e-3 for other, there in others.items())

    def saved(self, only_files: bool) -> tuple[list[float], set[str]]:
        """Return the norms and names in files that were written before the step, or else in states that were taken."""
        steps = [one for step in range(self.number) for one in self.many.at(step)]
        for norms, keys in (("saved", "keys"), ("taken", "names"))[: 1 if only_files else 2]:
            found = [norm for step in steps for norm in step.get(norms, ())]
            names = {key for step in steps for key in step.get(keys, ())}
            if found or names:
                return found, names
        return [], set()
