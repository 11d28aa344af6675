"""A measured structure as text for people."""

from __future__ import annotations

from meshwright.core.names import owner, pattern

from .region import Region
from .structure import Structure


def describe(structure: Structure, legal: list[int]) -> str:
    """Roles, and how everything can be cut.

    Args:
        legal: sizes of the tensor axis that all regions can be shared out to.
    """
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
        lines.append(f"  behind the head: {', '.join(map(str, structure.tail.steps))}")
    return "\n".join(lines)


def _region(region: Region) -> list[str]:
    what = "heads" if region.kind == "attention" else "hidden features"
    fewer = f" ({region.joint} of keys and values)" if region.kind == "attention" and region.joint < region.groups else ""
    lines = [f"    {region.kind.replace('_', '-')}: {region.groups:,} {what}{fewer}"]
    for path, role in region.roles:
        cut = region.cut_of(f"{path}.weight")
        how = "whole" if cut is None else f"{' + '.join(f'{part.size}' for part in cut.parts)} along dim {cut.dim}"
        lines.append(f"      {role:<16} {path} ({how})")
    lines += [f"      {'norm of all':<16} {path}" for path in region.spanning]
    lines += [f"      {'shared':<16} {name}" for name in region.shared if owner(name) not in region.latent]
    return lines
