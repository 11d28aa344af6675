"""Describe the calls by which a model's tokens see each other."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .interception import AttentionCall
from .masks import MaskFunction, causal, everything, in_chunks, shorter_than, within


@dataclass(frozen=True)
class Sizes:
    """The sizes of one call of attention: heads, and features of one head."""

    heads: int
    key_heads: int
    key_features: int
    value_features: int

    @classmethod
    def of(cls, call: AttentionCall) -> Sizes:
        return cls(call.query.shape[1], call.key.shape[1], call.key.shape[3], call.value.shape[3])


@dataclass(frozen=True)
class MaskRule:
    """A mask by places.

    Attributes:
        causal: a token attends to itself and earlier tokens only.
        window: number of tokens that a token attends to, itself included; 0: all.
        chunk: tokens attend within runs of this many places; 0: within the whole row.
        documents: tokens attend within their document only, by the batch's ``document_ids``.
    """

    causal: bool = True
    window: int = 0
    documents: bool = False
    chunk: int = 0

    @property
    def places(self) -> MaskFunction:
        """The rule without documents."""
        made = causal if self.causal else everything
        made = shorter_than(made, self.window) if self.window else made
        return in_chunks(made, self.chunk) if self.chunk else made

    @property
    def reach(self) -> int:
        """How many tokens before itself a token attends to at most, itself included; 0: the whole row."""
        return self.window or self.chunk if self.causal else 0

    def first(self, place: int) -> int:
        """Return the place of the first key that the query at a place sees in a row without documents."""
        if not self.causal:
            return 0
        start = place - place % self.chunk if self.chunk else 0
        return max(start, place - self.window + 1) if self.window else start

    def function(self, documents: Tensor | None) -> MaskFunction:
        """Return the rule as a function of places, for a batch with these (rows, length) documents."""
        return within(self.places, documents) if self.documents and documents is not None else self.places

    def __str__(self) -> str:
        kind = "causal" if self.causal else "full"
        kind += f" window {self.window}" if self.window else f" in chunks of {self.chunk}" if self.chunk else ""
        return f"{kind} per document" if self.documents else kind


@dataclass(frozen=True)
class Arithmetic:
    """The softmax of scaled products, and what is done beside it.

    Attributes:
        cap: name of the argument with the soft cap of scores (Gemma 2, arXiv 2408.00118); "": none.
        sinks: name of the argument with one more score per head, whose share goes to no value (arXiv 2309.17453); "":
            none.
    """

    cap: str = ""
    sinks: str = ""


@dataclass(frozen=True)
class Caller:
    """A module whose forward calls attention.

    Attributes:
        path: the module.
        sizes: of one call.
        interface: called through transformers' interface, which gives the mask as a function of places; else
            ``F.scaled_dot_product_attention`` is called.
        rule: of the mask. Of a call through the interface the rule tells how far the mask reaches, and no more; None:
            the mask reaches by no rule that is known.
        is_dense: the model gives the mask as a tensor, and does not state its rule (``mask_rule`` of the module, in the
            words of ``MaskRule``): in longer rows than those that were measured it may follow another one.
        arithmetic: how scores become an output; None: in a way of its own.
        flex: ``flex_attention`` is called, whose mask is a function of places too; ``rule`` tells how far that
            reaches, and no more.
    """

    path: str
    sizes: Sizes
    interface: bool
    rule: MaskRule | None = MaskRule()
    is_dense: bool = False
    arithmetic: Arithmetic | None = None
    flex: bool = False


@dataclass(frozen=True)
class Mixing:
    """The calls by which a model's tokens see each other.

    Attributes:
        callers: modules that call attention, in the order of their calls.
        implementation: the name of transformers' implementation that computes them; "" for other models.
        packed: whether each mask of a forward, in the order in which transformers makes them, keeps runs of positions
            apart.
    """

    callers: tuple[Caller, ...]
    implementation: str = ""
    packed: tuple[bool, ...] = ()

    @property
    def keeps_documents_apart(self) -> bool:
        """No call sees from one document of a packed row to another."""
        if self.implementation:
            return bool(self.packed) and all(self.packed) and all(caller.interface for caller in self.callers)
        return all(caller.rule is not None and caller.rule.documents for caller in self.callers)
