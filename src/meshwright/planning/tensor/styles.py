"""Interpret a plan that names styles of modules, beside a measured structure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from meshwright.core.errors import ConfigError, UnsupportedError, nearest
from meshwright.core.names import is_within, owner, pattern, selected
from meshwright.core.parts import FusedPart
from meshwright.introspection.module_kinds import ModuleKind
from meshwright.introspection.structure.regions import Cut, Region
from meshwright.introspection.structure.structure import BlockKind, Structure
from meshwright.planning.techniques import TensorStyleRequest


@dataclass(frozen=True)
class StyleMeaning:
    """The meaning of a style's name.

    Attributes:
        kind: column and row cut linear layers; whole cuts nothing; sum adds up a module's outputs.
        parts: number of equal parts side by side in the weight.
        whole_outside: whether the activation that is cut inside enters or leaves whole.
        silent: whether the module sends no messages, and leaves them to the module around it.
    """

    kind: Literal["column", "row", "embedding", "whole", "sum", "mla", "experts"]
    parts: int = 1
    whole_outside: bool = False
    silent: bool = False


STYLES: dict[str, StyleMeaning] = {
    "colwise": StyleMeaning("column"),
    "rowwise": StyleMeaning("row"),
    "colwise_gather_output": StyleMeaning("column", whole_outside=True),
    "rowwise_split_input": StyleMeaning("row", whole_outside=True),
    "packed_colwise": StyleMeaning("column", parts=2),
    "packed_rowwise": StyleMeaning("row", parts=2),
    "embedding_rowwise": StyleMeaning("embedding"),
    "embedding_colwise": StyleMeaning("embedding"),
    "replicate": StyleMeaning("whole"),
    "replicated_with_grad_allreduce": StyleMeaning("whole"),
    "all_reduce": StyleMeaning("sum"),
    "mla_kv_a_proj": StyleMeaning("mla"),
    "moe_tp_experts": StyleMeaning("experts"),
    "moe_identity_expert": StyleMeaning("experts"),
    "grouped_gemm": StyleMeaning("experts"),
    "ep_dispatch_experts": StyleMeaning("experts"),
    "local_params": StyleMeaning("whole"),
    "sequence_parallel": StyleMeaning("whole"),
    "colwise_rep": StyleMeaning("column", whole_outside=True),
    "rowwise_rep": StyleMeaning("row", whole_outside=True),
    "local": StyleMeaning("whole"),
    "local_colwise": StyleMeaning("column", silent=True),
    "local_rowwise": StyleMeaning("row", silent=True),
    "local_packed_rowwise": StyleMeaning("row", parts=2, silent=True),
}
"""Every style of transformers: 5.x, its expert-parallel ones, and those of 4.x."""

WHOLE = tuple(word for word, meaning in STYLES.items() if meaning.kind in ("whole", "mla"))
LEGAL_ON: dict[ModuleKind, tuple[str, ...]] = {
    "linear layer": tuple(word for word, meaning in STYLES.items() if meaning.kind in ("column", "row")) + WHOLE,
    "embedding": (
        *("embedding_rowwise", "embedding_colwise", "rowwise", "rowwise_rep", "rowwise_split_input"),
        *("colwise_rep", "colwise_gather_output", *WHOLE),
    ),
}
"""Styles that fit a kind of module; any other kind takes only styles that keep it whole."""


def unknown_style(where: str, word: object) -> str:
    return f"{where} is no style.{nearest(str(word), STYLES)} Legal: {', '.join(STYLES)}."


@dataclass(frozen=True)
class Named:
    """A module's style in a plan, and the pattern that names the module."""

    pattern: str
    word: str

    @property
    def kind(self) -> str:
        return STYLES[self.word].kind


@dataclass(frozen=True)
class GivenStyles:
    """A plan of styles resolved for a model, by path of the modules that it names.

    Attributes:
        linears: torch's linear layers of the model by path: (outputs, inputs).
    """

    named: Mapping[str, Named]
    linears: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def kind_at(self, path: str) -> str:
        return self.named[path].kind if path in self.named else "whole"

    def says(self, paths: Iterable[str]) -> str:
        return ", ".join(f"{path}: {self.named[path].word if path in self.named else 'not named'}" for path in paths)

    def of_block(self, block: str) -> dict[str, str]:
        """Map each path within the block to its style."""
        return {path[len(block) + 1 :]: named.word for path, named in self.named.items() if is_within(path, block)}

    def check_alike(self, kind: BlockKind) -> None:
        """Raise UnsupportedError if a plan treats blocks of one kind differently."""
        first = self.of_block(kind.blocks[0])
        for block in kind.blocks[1:]:
            if (other := self.of_block(block)) != first:
                within = min(path for path in {*first, *other} if first.get(path) != other.get(path))
                raise UnsupportedError(
                    f"tensor plan: {kind.blocks[0]}.{within} and {block}.{within} are given different styles, and"
                    f" blocks that are made alike are cut alike. Write {pattern(block)}.{within}."
                )

    def cuts(self, block: str, region: Region) -> bool:
        """Return whether a region is to be cut; ConfigError if a plan names only a part of its layers."""
        for path in (f"{block}.{path}" for path in region.latent):
            if self.kind_at(path) in ("column", "row"):
                named = self.named[path]
                raise ConfigError(
                    f"tensor plan: {pattern(path)} ({named.word}, pattern '{named.pattern}') gives what all heads are"
                    f" made from, so every rank computes it whole. Legal here: mla_kv_a_proj, replicate."
                )
        begins, end = [f"{block}.{path}" for path in region.producers], f"{block}.{region.consumer}"
        kinds = {self.kind_at(path) for path in begins}
        if kinds == {"column"} and self.kind_at(end) == "row":
            return True
        if not {*kinds, self.kind_at(end)} & {"column", "row"}:
            return False
        raise ConfigError(
            f"tensor plan: the layers {', '.join(map(pattern, begins))} (colwise) and {pattern(end)} (rowwise) can only"
            f" be cut together, and the plan has {self.says([*begins, end])}. Give all of them these styles, or none."
        )

    def built(self, kind: BlockKind, ranks: int) -> tuple[Region, ...]:
        """Build regions that no measurement found: column-wise layers of a module before its row-wise one.

        Raises:
            ConfigError: such layers lack their counterpart, or have sizes that the ranks cannot share.
        """
        block = kind.blocks[0]
        known = {path for region in kind.regions for path in region.linears}
        cut = {
            path: word
            for path, word in self.of_block(block).items()
            if STYLES[word].kind in ("column", "row") and path not in known
        }
        columns = [path for path, word in cut.items() if STYLES[word].kind == "column"]
        found = []
        for consumer in (path for path, word in cut.items() if STYLES[word].kind == "row"):
            begins = tuple(path for path in columns if is_within(path, owner(consumer)))
            if not begins:
                raise ConfigError(
                    f"tensor plan: {pattern(block)}.{consumer} is row-wise (pattern"
                    f" '{self.named[f'{block}.{consumer}'].pattern}'), and no"
                    f" layer beside it is colwise. Name the layers before it too."
                )
            columns = [path for path in columns if path not in begins]
            cuts: list[Cut] = []
            for path in (*begins, consumer):
                where, whole = f"tensor plan: {pattern(block)}.{path}", f"{block}.{path}"
                word = self.named[whole].word
                if STYLES[word].parts > 1 or whole not in self.linears:
                    raise UnsupportedError(
                        f"{where}: the structure of this layer could not be measured, and by names alone only torch's"
                        f" Linear can be cut, in one part. Leave {word} out of the plan: the layer stays whole."
                    )
                size = self.linears[whole][1 if path == consumer else 0]
                if size % ranks:
                    raise ConfigError(
                        f"{where} ({word}) has {size} features, which layout.tp = {ranks} ranks cannot share"
                    )
                dim, names = (1, ("weight",)) if path == consumer else (0, ("weight", "bias"))
                cuts += [Cut(f"{path}.{name}", dim, (FusedPart(size, ranks),)) for name in names]
            mixes: Literal["attention", "feed_forward"] = "attention" if kind.mixes_outside else "feed_forward"
            found.append(Region(mixes, owner(consumer), begins, consumer, ranks, tuple(cuts)))
        if columns:
            raise ConfigError(
                f"tensor plan: {pattern(block)}.{columns[0]} is column-wise (pattern"
                f" '{self.named[f'{block}.{columns[0]}'].pattern}'), and"
                f" no layer behind it is rowwise. Name that too, or leave both out."
            )
        return tuple(found)

    def ends(self, structure: Structure, tied: Iterable[tuple[str, ...]]) -> tuple[str, str]:
        """Return (embedding, head) that are to be cut, "" for one that stays whole.

        Raises:
            ConfigError: a style that an end does not take, or two for one tied weight.
            UnsupportedError: a module to be cut outside the blocks is neither.
        """
        wanted = {path: named for path, named in self.named.items() if named.kind in ("column", "row", "embedding")}
        outside = [path for path in wanted if not any(is_within(path, block) for block in structure.blocks)]
        for path in outside:
            if path not in (structure.embedding, structure.head):
                found = ", ".join(p for p in (structure.embedding, structure.head) if p) or "none"
                raise UnsupportedError(
                    f"tensor plan: {path} ({wanted[path].word}, pattern '{wanted[path].pattern}') lies outside the"
                    f" blocks, where only the embedding of the tokens and the layer that gives the logits can be cut"
                    f" (found: {found}). Legal here: replicate."
                )
        if structure.head in wanted and wanted[structure.head].kind != "column":
            raise ConfigError(
                f"tensor plan: {structure.head} gives the logits, and {wanted[structure.head].word} (pattern"
                f" '{wanted[structure.head].pattern}') does not fit it. Legal here: colwise_gather_output, colwise,"
                f" replicate."
            )
        cut = {path for path in (structure.embedding, structure.head) if path in wanted}
        for paths in tied:
            both = {path for path in paths if path in (structure.embedding, structure.head)}
            if len(both) == 2 and cut & both:
                whole = next((path for path in both - cut if path in self.named), None)
                if whole is not None:
                    raise ConfigError(
                        f"tensor plan: {' and '.join(sorted(both))} are one tied weight, and the plan has"
                        f" {self.says(sorted(both))}. Give both a style that cuts, or neither."
                    )
                cut |= both
        return tuple(path if path in cut and path else "" for path in (structure.embedding, structure.head))  # type: ignore[return-value]


def given_styles(
    requested: Iterable[TensorStyleRequest],
    kinds: Mapping[str, ModuleKind],
    linears: Mapping[str, tuple[int, int]] | None = None,
) -> GivenStyles:
    """Match a plan's patterns to modules.

    Args:
        kinds: kinds of all modules, by path.
        linears: (outputs, inputs) of torch's linear layers.

    Raises:
        ConfigError: an unknown style, a pattern that names nothing, two for one module, a style that does not fit a
            module.
        UnsupportedError: a style that no technique does yet.
    """
    found: dict[str, Named] = {}
    for request in requested:
        if request.style not in STYLES:
            raise ConfigError(
                unknown_style(f"tensor plan: '{request.style}' of pattern '{request.pattern}'", request.style)
            )
        paths = selected(request.pattern, kinds)
        if not paths:
            known = dict.fromkeys(pattern(path) for path in kinds if path)
            raise ConfigError(
                f"tensor plan: the pattern '{request.pattern}' names no module of the"
                f" model.{nearest(request.pattern, known)} A pattern is a module's whole path, with * for an index."
            )
        for path in paths:
            if path in found:
                both = f"'{found[path].pattern}' and '{request.pattern}'"
                raise ConfigError(f"tensor plan: the patterns {both} both name {path}. Keep one of them.")
            where, kind = f"tensor plan: {request.style} for {path} (pattern '{request.pattern}')", kinds[path]
            meaning, legal = STYLES[request.style].kind, LEGAL_ON.get(kind, WHOLE)
            if meaning == "experts" or (kind == "parameter" and meaning != "whole"):
                raise UnsupportedError(
                    f"{where}: experts and single parameters cannot be cut in this version. Leave it out: it stays"
                    f" whole."
                )
            if meaning == "sum":
                raise UnsupportedError(f"{where}: the row-wise layer that ends a region sums by itself. Leave it out.")
            if request.style not in legal:
                raise ConfigError(
                    f"{where}: this is {'an' if kind[0] in 'aeiou' else 'a'} {kind}. Legal here: {', '.join(legal)}."
                )
            found[path] = Named(request.pattern, request.style)
    return GivenStyles(found, linears or {})


def differences(own: Mapping[str, str], kinds: Mapping[str, ModuleKind], cut: Mapping[str, str]) -> Iterator[str]:
    """Yield notes where the measured structure and a model's own plan disagree.

    Args:
        own: patterns -> names of styles.
        cut: path -> "column", "row" or "embedding", for each module that the measured plan cuts.
    """
    styled: dict[str, str] = {}
    for wildcard, word in own.items():
        meaning = STYLES[word].kind if word in STYLES else "whole"
        for path in selected(wildcard, kinds):
            if meaning in ("column", "row", "embedding", "experts"):
                styled[path] = word
            if meaning in ("column", "row", "embedding", "experts") and path not in cut:
                yield (
                    f"the model's own plan cuts {pattern(path)} ({word}); what was measured does not, and every"
                    f" rank has it whole"
                )
    for path in cut:
        if path not in styled:
            yield f"the model's own plan leaves {pattern(path)} whole; it was measured that it can be cut, and it is"
