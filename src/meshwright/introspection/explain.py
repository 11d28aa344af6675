"""Facts about a model as text for people."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.core.errors import UnsupportedError
from meshwright.core.names import pattern
from meshwright.core.units import count_text

from .facts import ModelFacts, ParameterFact, measure_structure, premises_of
from .premises.hooks import hooks_of
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


def describe_premises(facts: ModelFacts) -> str:
    """What a forward does besides giving each row's tokens their logits, and hooks; one line each."""
    seen = premises_of(facts)
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
        ("hooks on parameters", _names(hook.parameter for hook in hooks_of(facts.module)) if facts.module is not None else ""),
    ]
    told = [f"  {what}: {names}" for what, names in lines if names]
    return "\n".join(["forward, played on a small copy:", *(told or ["  a function of the weights and each row"])])


def _names(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(pattern(name) for name in names))


def _patterns(names: tuple[str, ...]) -> str:
    counts: dict[str, int] = {}
    for name in names:
        counts[pattern(name)] = counts.get(pattern(name), 0) + 1
    return ", ".join(f"{name} ({count})" for name, count in counts.items()) or "none found"
