"""Facts about a model as text for people."""

from __future__ import annotations

from meshwright.core.errors import UnsupportedError
from meshwright.core.names import pattern
from meshwright.core.units import count_text

from .facts import ModelFacts, ParameterFact, measure_structure
from .structure.describe import describe
from .structure.structure import legal_degrees


def describe_model(facts: ModelFacts) -> str:
    """Parameters by name pattern, ties, blocks, attention, limits."""
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
    """Roles of the weights and how they can be cut, measured on a small copy; or why that cannot be told."""
    try:
        structure = measure_structure(facts, 1).structure
    except UnsupportedError as error:
        return f"tensor parallelism: {error}"
    return describe(structure, legal_degrees(structure))


def _patterns(names: tuple[str, ...]) -> str:
    counts: dict[str, int] = {}
    for name in names:
        counts[pattern(name)] = counts.get(pattern(name), 0) + 1
    return ", ".join(f"{name} ({count})" for name, count in counts.items()) or "none found"
