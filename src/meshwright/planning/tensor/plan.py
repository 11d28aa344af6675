"""Describe tensor parallelism: the parts that are cut, how each region runs on one rank, and the parts left whole."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from torch import nn

from meshwright.core.names import around, is_within, owner
from meshwright.core.parts import FusedPart, is_plain, ranges
from meshwright.introspection.deferred_logits import Tail
from meshwright.introspection.small.sample import Sample
from meshwright.introspection.structure.local_search import LocalForm
from meshwright.introspection.structure.regions import Cut, Region, resized, shapes_of


@dataclass(frozen=True)
class RegionPlan:
    """A region that is cut, and how it runs on one rank."""

    region: Region
    form: LocalForm


@dataclass(frozen=True)
class BlocksPlan:
    """Blocks that are cut alike; see ``introspection.structure.BlockKind``.

    Attributes:
        blocks: paths of the blocks.
        hidden: the argument of a block that is the residual stream.
        regions: the regions that are cut.
        gathers: layers that begin regions and share one gathered input.
        summed: row-parallel layers that are reduced together, the last one last; empty: each is reduced by itself.
        norms: norms of the block's input, one before each of ``gathers``: the input is gathered once, and normed
            whole; empty: the outputs of norms are gathered.
    """

    blocks: tuple[str, ...]
    hidden: int | str
    regions: tuple[RegionPlan, ...]
    gathers: tuple[tuple[str, ...], ...]
    summed: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()

    def cuts(self) -> Iterator[Cut]:
        """Yield cuts of parameters, named within a block; norms over all features are computed whole."""
        for planned in self.regions:
            for cut in planned.region.cuts:
                if owner(cut.name) not in planned.region.spanning:
                    yield cut

    @functools.cached_property
    def cut_by_name(self) -> dict[str, tuple[int, tuple[FusedPart, ...]]]:
        """The dim and the parts of each cut, by the parameter's name within a block."""
        found: dict[str, tuple[int, tuple[FusedPart, ...]]] = {}
        for cut in self.cuts():
            found.setdefault(cut.name, (cut.dim, cut.parts))
        return found

    def summed_outputs(self) -> Iterator[str]:
        """Yield the modules whose outputs are reduced together by the last one; each alone differs from one process."""
        places = {planned.region.consumer: planned.region.place_of(planned.region.consumer) for planned in self.regions}
        for block in self.blocks:
            for path in self.summed:
                yield from (f"{block}.{path}", f"{block}.{places.get(path, path)}")

    def parts_of(self, path: str) -> OperandParts:
        """Return the operands of a linear layer of which a rank has a part; ``path`` is within the block."""
        for region in (planned.region for planned in self.regions):
            if path == region.consumer:
                return ROW
            if path in region.latent:
                return FEEDING
            if path in region.producers:
                return COLUMN
            for adapter in region.adapted:
                for first, second in adapter.pairs:
                    if path in (first, second):
                        ends = adapter.host == region.consumer
                        return (ROW if ends else FEEDING) if path == first else (SUMMAND if ends else COLUMN)
        return WHOLE  # a rank's own tokens: a rank without tokens (of an expert) would not take part in an agreement


@dataclass(frozen=True)
class TensorPlan:
    """The work of every rank of the tensor axis.

    Attributes:
        ranks: size of the axis.
        source: origin of the plan, in words.
        blocks: all blocks, in forward order.
        sequence_parallel: whether each rank has only its part of the sequence between blocks.
        regather: whether gathered activations are gathered again in backward instead of saved.
        kinds: kinds of blocks.
        begins: whether the first block's input derives from the token ids; else another pipeline stage sends it, cut
            already.
        embedding: the module that turns ids into vectors, its rows distributed; "": it stays whole.
        embedding_is_hidden: whether its output is the first block's input, unchanged.
        gathers_after_blocks: whether the whole sequence is gathered after the last block, since later modules count
            tokens; else at the head.
        before: whole parameters on which the first block's input depends: all ranks compute with them alike.
        head: the layer that computes the logits, its rows distributed; "": it stays whole.
        tied: other names of the parameters of embedding and head.
        alike_behind: whole parameters after the blocks that all ranks use alike, for the whole sequence: all of them if
            the head is whole.
        tail: the model's operations on the logits.
        async_tensor_parallel: whether products overlap with the messages beside them.
        of_images: modules before the blocks whose parameters, at any depth, all ranks compute with alike.
    """

    ranks: int
    source: str
    blocks: tuple[str, ...]
    sequence_parallel: bool
    regather: bool
    kinds: tuple[BlocksPlan, ...]
    begins: bool = True
    embedding: str = ""
    embedding_is_hidden: bool = False
    gathers_after_blocks: bool = False
    before: tuple[str, ...] = ()
    head: str = ""
    tied: tuple[str, ...] = ()
    alike_behind: tuple[str, ...] = ()
    tail: Tail = field(default_factory=Tail)
    async_tensor_parallel: bool = False
    of_images: tuple[str, ...] = ()

    @property
    def last_block(self) -> str:
        return self.blocks[-1]

    @functools.cached_property
    def _kinds(self) -> dict[str, BlocksPlan]:
        return {block: kind for kind in reversed(self.kinds) for block in kind.blocks}

    def kind_of(self, block: str) -> BlocksPlan:
        return self._kinds[block]

    def _around(self, name: str) -> tuple[BlocksPlan | None, str]:
        """Return the block that a parameter is in, after its kind; (None, "") if it is in none."""
        block = next(filter(self._kinds.__contains__, around(name)), "")
        return self._kinds.get(block), block

    def for_sample(self, sample: Sample, model: nn.Module) -> TensorPlan:
        """Adapt the plan of ``model`` to its small copy."""
        kinds = []
        for kind in self.kinds:
            block = next(block for block in kind.blocks if block in sample.blocks)
            before, after = shapes_of(model.get_submodule(block)), shapes_of(sample.model.get_submodule(block))
            sizes = before, after, Fraction(1, sample.heads)
            kinds.append(
                replace(kind, regions=tuple(replace(r, region=resized(r.region, *sizes)) for r in kind.regions))
            )
        return replace(self, kinds=tuple(kinds)).only(sample.blocks)

    def only(self, blocks: tuple[str, ...]) -> TensorPlan:
        """Restrict the plan to a model with these blocks alone."""
        kinds = tuple(replace(k, blocks=tuple(block for block in k.blocks if block in blocks)) for k in self.kinds)
        return replace(self, blocks=blocks, kinds=kinds)

    def cut_of(self, name: str, shape: Sequence[int]) -> tuple[int, tuple[FusedPart, ...]] | None:
        """Return (dim, parts) of a parameter of that shape; None if it stays whole."""
        path = owner(name)
        if name in self.tied or (path and path in (self.embedding, self.head)):
            return 0, (FusedPart(shape[0], shape[0]),)
        kind, block = self._around(name)
        return kind and kind.cut_by_name.get(name[len(block) + 1 :])

    def local_shape(self, name: str, shape: Sequence[int], rank: int = 0) -> tuple[int, ...]:
        """Return the shape of a rank's part of a parameter; of the first rank, which has the largest, by default."""
        cut = self.cut_of(name, shape)
        if cut is None:
            return tuple(shape)
        dim, parts = cut
        size = (
            chunk_size(shape[dim], rank, self.ranks)
            if is_plain(parts, self.ranks)
            else sum(high - low for low, high in ranges(parts, rank, self.ranks))
        )
        return (*shape[:dim], size, *shape[dim + 1 :])

    def parts_of(self, path: str) -> OperandParts:
        """Return the operands of a linear layer of which a rank has a part; none if all ranks compute it alike."""
        name = f"{path}.weight"
        kind, block = self._around(name)
        if kind is None or not (self.is_summed(name) or self.cut_of(name, ()) is not None):
            return WHOLE
        return kind.parts_of(path[len(block) + 1 :])

    def is_summed(self, name: str) -> bool:
        """Return whether the ranks' gradients of a whole parameter are partial."""
        if name in self.before or name in self.alike_behind or any(is_within(name, p) for p in self.of_images):
            return False
        if self.sequence_parallel:
            return True
        kind, block = self._around(name)
        within = name[len(block) + 1 :]
        # or a region uses it for the groups of one rank only
        return kind is not None and (
            owner(within) in kind.norms
            or any(within in r.region.shared or owner(within) in r.region.spanning for r in kind.regions)
        )


def chunk_size(size: int, rank: int, ranks: int) -> int:
    """Return the size of a rank's part of a dim, as torch.chunk cuts."""
    share = -(-size // ranks)
    return max(0, min(share, size - rank * share))


def words_of_cut(dim: int, parts: tuple[FusedPart, ...]) -> str:
    """Format a cut in several parts, or with copies: the sizes of its parts, and the shares in each."""
    return f"Shard({dim}: {' + '.join(f'{part.size}/{part.groups}' for part in parts)})"


def placement_words(cut: tuple[int, tuple[FusedPart, ...]] | None, ranks: int) -> str:
    """Format a parameter's placement on the tensor axis."""
    if cut is None:
        return "Replicate()"
    return f"Shard({cut[0]})" if is_plain(cut[1], ranks) else words_of_cut(*cut)


# --- name the operands of a linear layer of which a tensor-parallel rank has only a part


@dataclass(frozen=True)
class OperandParts:
    """The operands of a linear layer's products of which a rank has only a part.

    Attributes:
        x: the rank has a part of the input.
        weight: the rank has a part of the weight.
        gradient: the rank has a part of the output's gradient.
    """

    x: bool = False
    weight: bool = False
    gradient: bool = False


WHOLE = OperandParts()
COLUMN = OperandParts(weight=True, gradient=True)
"""Some output features of a whole input."""
ROW = OperandParts(x=True, weight=True)
"""Some input features; the outputs are summed, and all ranks have that sum's gradient."""
FEEDING = OperandParts(gradient=True)
"""A whole weight and input; a rank uses some of the output, or computes a partial gradient of it."""
SUMMAND = OperandParts(x=True)
"""A whole weight; its input is a partial sum, and so is its output."""
