"""Describe facts about a model as text for people."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.core.errors import UnsupportedError
from meshwright.core.names import owner, pattern
from meshwright.core.units import count_text

from .facts import ModelFacts, ParameterFact
from .premises.hooks import hooks_of
from .structure.region import Region
from .structure.structure import Structure, legal_degrees


def describe_model(facts: ModelFacts) -> str:
    """Describe parameters by name pattern, ties, blocks, attention and limits."""
    lines = [f"{facts.kind}: {facts.numel:,} parameters ({count_text(facts.numel)})"]
    limits = {"longest sequence": facts.max_seq_len, "vocabulary": facts.vocab_size}
    lines += [f"  {name}: {value:,}" for name, value in limits.items() if value]
    lines.append(f"  repeated blocks: {_patterns(facts.blocks)}")
    lines.append(f"  attention: {_patterns(facts.attentions)}")
    lines += [f"  tied: {p.name} = {', '.join(p.aliases)}" for p in facts.parameters if p.aliases]
    groups: dict[tuple, list[ParameterFact]] = {}
    for p in facts.parameters:
        groups.setdefault((pattern(p.name), p.shape, p.dtype), []).append(p)
    width = max(len(name) for name, _, _ in groups)
    for (name, shape, dtype), found in groups.items():
        lines.append(f"    {name:<{width}}  {len(found):>3} × {'×'.join(map(str, shape)) or 'scalar':<14} {dtype}")
    return "\n".join(lines)


def describe_structure(facts: ModelFacts) -> str:
    """Describe the weights' roles and cuts, measured on a small copy, or the reason why measuring them fails."""
    try:
        structure = facts.measurements.structure(1).structure
    except UnsupportedError as error:
        return f"tensor parallelism: {error}"
    return _structure_text(structure, legal_degrees(structure))


def _structure_text(structure: Structure, legal: list[int]) -> str:
    """Describe roles and cuts; ``legal``: sizes of the tensor axis among which all regions can be sharded."""
    lines = [f"tensor parallelism: up to {legal[-1]} ranks (legal: {', '.join(map(str, legal))})"]
    for kind in structure.kinds:
        lines.append(f"  {pattern(kind.blocks[0])} ({len(kind.blocks)})")
        for region in kind.regions:
            lines += _region(region)
        if not kind.regions:
            lines.append("    no layers were found whose features fall into groups")
        if kind.mixes_outside:
            lines.append("    tokens meet outside these layers, so the sequence stays whole")
        gathers = (tuple(path for paths in kind.gathers for path in paths),) if kind.norms else kind.gathers
        before = f" (before {', '.join(kind.norms)})" if kind.norms else ""
        lines += [f"    one gather{before}: {', '.join(paths)}" for paths in gathers if len(paths) > 1]
        lines += [f"    reduced together: {', '.join(kind.summed)}"] if kind.summed else []
    lines.append(f"  embedding: {structure.embedding or 'not recognised'}; head: {structure.head or 'not recognised'}")
    if structure.tail.obstacle:
        lines.append(f"  behind the head: {structure.tail.obstacle}")
    elif structure.tail.steps:
        lines.append(f"  behind the head: {', '.join(structure.tail.steps)}")
    return "\n".join(lines)


def _region(region: Region) -> list[str]:
    what = "heads" if region.kind == "attention" else "hidden features"
    fewer = (
        f" ({region.joint} of keys and values)" if region.kind == "attention" and region.joint < region.groups else ""
    )
    lines = [f"    {region.kind.replace('_', '-')}: {region.groups:,} {what}{fewer}"]
    for path, role in region.roles:
        cut = region.cut_of(f"{path}.weight")
        how = "whole" if cut is None else f"{' + '.join(f'{part.size}' for part in cut.parts)} along dim {cut.dim}"
        lines.append(f"      {role:<16} {path} ({how})")
    lines += [f"      {'norm of all':<16} {path}" for path in region.spanning]
    lines += [f"      {'shared':<16} {name}" for name in region.shared if owner(name) not in region.latent]
    return lines


def describe_premises(facts: ModelFacts) -> str:
    """Describe hooks, and effects of a forward besides giving each row's tokens their logits; one line each."""
    seen = facts.measurements.premises()
    if seen.unknown:
        return f"forward: could not be rehearsed ({seen.unknown})"
    lines = [
        ("rows depend on each other", seen.mixes_rows),
        ("writes parameters", _names(w.name for w in seen.parameters)),
        ("writes buffers, by what its rows are", _names(w.name for w in seen.buffers if w.by_data)),
        ("writes buffers, whatever its rows are", _names(w.name for w in seen.buffers if not w.by_data)),
        ("later calls compute otherwise", _names(seen.changes)),
        ("an earlier batch changes a later one's results", "by state that is no buffer" if seen.remembers else ""),
        ("only some rows use", _names(seen.conditional)),
        ("no row that was tried uses", _names(seen.unused)),
        ("sparse gradients", _names(seen.sparse)),
        ("a loss of its own in the output", _names(seen.losses)),
        (
            "hooks on parameters",
            _names(hook.parameter for hook in hooks_of(facts.module)) if facts.module is not None else "",
        ),
    ]
    found = [f"  {what}: {names}" for what, names in lines if names]
    return "\n".join(["forward, observed on a small copy:", *(found or ["  a function of the weights and each row"])])


def _names(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(pattern(name) for name in names))


def _patterns(names: tuple[str, ...]) -> str:
    counts: dict[str, int] = {}
    for name in names:
        counts[pattern(name)] = counts.get(pattern(name), 0) + 1
    return ", ".join(f"{name} ({count})" for name, count in counts.items()) or "none found"
