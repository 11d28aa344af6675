"""Define a problem, what one process and a layout compute, and shrink a model to one that fits anywhere."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from meshwright.comparison.equality import HALVES
from meshwright.core.errors import ConfigError, import_object
from meshwright.core.losses import PADDING
from meshwright.distributed.optimizer.muon import optimizer_class
from meshwright.distributed.optimizer.parameter_groups import split_by_role
from meshwright.introspection.blocks import Hints, built_with
from meshwright.introspection.facts import ModelFacts
from meshwright.introspection.images import (
    IMAGE_KEYS,
    ImageArguments,
    ImageSize,
    length_for,
    pictured,
    rows_of,
    sizes_of,
)
from meshwright.introspection.module_kinds import DROPOUTS
from meshwright.introspection.signature import IMAGES_PER_ROW
from meshwright.introspection.source import CausalLM, builder_of, is_config, with_adapters
from meshwright.models.decoder_config import DecoderConfig
from meshwright.planning.optimizer import kind_of
from meshwright.planning.techniques import as_techniques

# --- shrink a model to one of the same structure that fits anywhere

HEAD_DIM = 8
LAYERS = 2
VOCABULARY = 307


def shrunk(config: DecoderConfig) -> DecoderConfig:
    """Shrink a decoder to a small one of the same structure.

    The ratio of query to key heads, ties, norms, rotary scaling and the number of experts stay. Small values stay
    too: at most 2 key heads, heads of 8, 2 blocks (one of them dense if some are), 307 token ids.
    """
    group = config.n_heads // config.n_kv_heads
    n_kv_heads = min(config.n_kv_heads, 2)
    head_dim = min(config.head_dim, HEAD_DIM)
    dim = n_kv_heads * group * head_dim
    n_layers = min(config.n_layers, LAYERS)
    moe = config.moe
    if moe is not None:
        width = max(1, round(moe.hidden_dim * dim / config.dim)) if moe.hidden_dim else 0
        moe = dataclasses.replace(moe, hidden_dim=width, first_dense=min(moe.first_dense, n_layers - 1))
    return dataclasses.replace(
        config,
        vocab_size=min(config.vocab_size, VOCABULARY),
        dim=dim,
        n_layers=n_layers,
        n_heads=n_kv_heads * group,
        n_kv_heads=n_kv_heads,
        hidden_dim=max(1, round(config.hidden_dim * dim / config.dim)),
        moe=moe,
    )


# --- define a problem

Batch = Mapping[str, Tensor]


class BatchFactory(Protocol):
    """A function that returns the global batch of a step: tensors of shape (rows, seq), the same in every process."""

    def __call__(self, step: int) -> Batch: ...


SCALE = 1024.0
"""Loss scale in float16: gradients of the small models that are verified neither vanish nor overflow."""
OF_WEIGHTS = ("adapters", "freeze", "quantize_frozen")
"""The techniques that decide which weights a model has, which are trained and to what they are rounded."""
FLOAT8 = ("float8", "float8_filter")
"""The techniques that decide which products are in float8."""
GAP = 3
"""Numbers that positions (which begin at 0 to 2) skip inside a document, so that a model that ignores them shows."""


@dataclass(frozen=True)
class RandomBatches:
    """Random batches that bring out faults.

    Rows have unequal lengths and several documents; some tokens and one row have no loss. ``keys`` names the model's
    inputs besides tokens: ``positions``, ``document_ids``. Positions stay below ``seq_len + GAP + 3``.
    """

    vocab_size: int
    rows: int = 8
    seq_len: int = 16
    keys: tuple[str, ...] = ("positions", "document_ids")
    seed: int = 0

    def __call__(self, step: int) -> Batch:
        g = torch.Generator().manual_seed(1000 * self.seed + step)
        shape = (self.rows, self.seq_len)
        tokens = torch.randint(0, self.vocab_size, shape, generator=g)
        labels = torch.randint(0, self.vocab_size, shape, generator=g)
        place = torch.arange(self.seq_len).expand(shape)
        lengths = torch.randint(max(1, self.seq_len // 3), self.seq_len + 1, (self.rows, 1), generator=g)
        is_real = place < lengths
        is_padding = ~is_real
        # a row without a loss has nothing to average, alone in its microbatch or on its rank
        is_real[self.rows // 2] &= self.rows == 1
        loss_mask = torch.rand(shape, generator=g) > 0.15
        loss_mask[:, 0] = True
        second = torch.randint(1, max(2, self.seq_len), (self.rows, 1), generator=g)  # begin of the second document
        ids = (place >= second).long()
        own = place - second * ids
        ids = ids.masked_fill(is_padding, PADDING)
        positions = own + GAP * (own > 1) + torch.randint(0, 3, (self.rows, 1), generator=g)
        extra = {"positions": positions, "document_ids": ids}
        batch = {"tokens": tokens, "labels": labels.masked_fill(~is_real, -100), "loss_mask": loss_mask}
        return batch | {key: extra[key] for key in self.keys}


@dataclass(frozen=True)
class Problem:
    """Some steps of training, independent of what computes them.

    Attributes:
        model: a model config, "package.module:factory", or a function (importable by name) that returns a module.
        batches: the global batch of a step.
        steps: number of optimizer steps.
        seed: seed of the initial weights of a model on meta.
        dtype: float64 or float32 for everything; or bfloat16 or float16 for forward and backward from float32
            weights.
        optimizer: word of ``planning/optimizer``; SGD where rounding must not be amplified.
        max_norm: norm that gradients are clipped to; None: no clipping.
        techniques: the layout's techniques besides dtype; a plain dict of Techniques.
        microbatch_rows: rows per forward on each rank; 0: all at once.
        evaluating: compute in evaluation mode, since the model draws random numbers in training outside dropout
            layers.
        microbatches: for each row of a batch, the number of its microbatch on a layout, where a loss depends on that.
        means: data ranks whose mean losses are averaged, as torch's wrappers do; 0: the loss is the mean over all
            tokens.
        hints: facts about a model that measurement cannot read.
    """

    model: Any
    batches: BatchFactory
    steps: int = 3
    seed: int = 0
    dtype: str = "float64"
    optimizer: str = "adamw"
    max_norm: float | None = 1.0
    techniques: dict[str, Any] = field(default_factory=dict)
    microbatch_rows: int = 0
    evaluating: bool = False
    microbatches: tuple[int, ...] = ()
    means: int = 0
    hints: Hints | None = None

    @property
    def master(self) -> str:
        """dtype of weights, summed gradients and optimizer state."""
        return "float32" if self.dtype in HALVES else self.dtype

    @property
    def requested(self) -> dict[str, Any]:
        """All techniques, as a plain dict of Techniques."""
        scale = {"loss_scale": self.loss_scale} if self.dtype == "float16" else {}
        others = {key: value for key, value in self.techniques.items() if key != "adapters"}  # the model has them
        return {**others, "precision": {"master": self.master, "compute": self.dtype, **scale}}

    @property
    def loss_scale(self) -> float:
        """Factor on the loss for the backward."""
        return SCALE if self.dtype == "float16" else 1.0

    @property
    def rounds_to(self) -> str:
        """The dtype in which everything is compared: the one that rounds most."""
        return "float8" if self.techniques.get("float8", "none") != "none" else self.dtype

    @property
    def sees_products(self) -> bool:
        """Whether products in float8 can be counted: compiled ones cannot."""
        return self.rounds_to == "float8" and not self.techniques.get("compile")

    def of_one_process(self) -> Problem:
        """Return the part that one process computes, which problems that differ only in their layout share."""
        keys = (*OF_WEIGHTS, *FLOAT8) if self.rounds_to == "float8" else OF_WEIGHTS
        kept = {key: self.techniques[key] for key in keys if self.techniques.get(key)}
        return replace(self, techniques=kept, microbatch_rows=0)

    def source(self) -> Any:
        """Return the model config or factory."""
        model = import_object(self.model) if isinstance(self.model, str) else self.model
        model = CausalLM(model) if is_config(model) else model
        if isinstance(model, CausalLM) and self.dtype == "float64":
            # grouped kernels take no float64; in other dtypes as training computes
            model = replace(model, experts="eager")
        elif self.hints is not None and callable(model):
            model = partial(built_with, self.hints, model)
        asked = {key: value for key, value in self.techniques.items() if key == "adapters" and value is not None}
        return with_adapters(model, as_techniques(asked).adapters)

    def batch(self, step: int) -> dict[str, Tensor]:
        """Return the global batch of a step; ConfigError where the factory returns no valid batch."""
        batch = dict(self.batches(step))
        apart = IMAGE_KEYS if IMAGES_PER_ROW in batch else ()
        lengths = {len(value) for key, value in batch.items() if key not in apart}
        if not {"tokens", "labels"} <= set(batch) or len(lengths) != 1:
            raise ConfigError(
                f"the batch of step {step} must be a dict of tensors of equal numbers of rows, tokens and labels"
                f" among them; beside {IMAGES_PER_ROW}, (rows,) int64, those of images have one entry for each"
            )
        return batch

    def make_optimizer(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]], matrices: Iterable[str]
    ) -> torch.optim.Optimizer:
        """Make the optimizer of trained parameters; ``matrices``: names of the hidden ones."""
        named = list(named_parameters)
        groups: list[dict[str, Any]] = [{"params": [p for _, p in named if p.requires_grad]}]
        row = kind_of(self.optimizer)
        if row.by_role:
            groups = split_by_role(groups, named, matrices)
        return optimizer_class(row)(groups, **dict(row.verified_with))


def without_dropout(model: nn.Module) -> nn.Module:
    """Switch off the model's dropout layers: their random draws are not compared."""
    for module in model.modules():
        if isinstance(module, DROPOUTS):
            module.p = 0.0
    return model


def count(batch: Batch) -> int:
    """Count the tokens that have a loss, at least 1."""
    return max(int((labels_of(batch) != -100).sum()), 1)


def divisors(batch: Batch, means: int) -> Tensor:
    """Return the divisors of the sums of each row's losses: (rows,) float64."""
    ranks = max(means, 1)
    return (
        torch.tensor([ranks * count(share(batch, rank, ranks)) for rank in range(ranks)])
        .double()
        .repeat_interleave(len(batch["tokens"]) // ranks)
    )


def labels_of(batch: Batch) -> Tensor:
    """Return the (rows, seq) labels, -100 where there is no loss."""
    mask = batch.get("loss_mask")
    return batch["labels"] if mask is None else batch["labels"].masked_fill(~mask.bool(), -100)


def share(batch: Batch, rank: int, ranks: int) -> dict[str, Tensor]:
    """Return the rows of one of ``ranks``, with their images."""
    rows = len(batch["tokens"]) // ranks
    return rows_of(batch, rank * rows, (rank + 1) * rows)


def digests(problem: Problem) -> list[tuple[str, str]]:
    """Hash the batch of each step, at a first and at a second request."""
    found: list[list[str]] = [[], []]
    for request, step in itertools.product(found, range(problem.steps)):
        digest = hashlib.blake2b(digest_size=16)
        for key, value in sorted(problem.batch(step).items()):
            digest.update(f"{key} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        request.append(digest.hexdigest())
    return list(zip(*found, strict=True))


Parallelize = Callable[..., nn.Module]
"""(module with weights, on the CPU; mesh with our axis names, None for one rank) → the module, laid out.

Ranks along dp_replicate and dp_shard are given different rows, those along the other axes the same."""


# --- make random batches of rows with images, unequally many in each row, for a model that takes them

COUNTS = (2, 0, 1, 0)
"""Images of the rows of a half of the batch, in turn; the other half has none, so that ranks have none."""
TEXT = 6
"""The least number of tokens of a row beside its images."""

NONE = ImageArguments(0, ())


@dataclass(frozen=True)
class PicturedBatches(RandomBatches):
    """Random batches in which some rows have images: in even steps those of the first half alone, else the others."""

    images: ImageArguments = NONE
    sizes: tuple[ImageSize, ...] = ()

    def __call__(self, step: int) -> Batch:
        batch = dict(super().__call__(step))
        half = -(-self.rows // 2)
        counts = [COUNTS[row % half % len(COUNTS)] * ((row < half) == (step % 2 == 0)) for row in range(self.rows)]
        generator = torch.Generator().manual_seed(2000 * self.seed + step)
        batch |= pictured(batch["tokens"], counts, self.images, self.sizes, generator)
        batch["labels"] = batch["labels"].masked_fill(batch["tokens"] == self.images.token, -100)
        return batch


def with_images(batches: RandomBatches, module: nn.Module, facts: ModelFacts) -> RandomBatches:
    """Return batches with images for a model that takes them; others as they are.

    A model on meta is built once more with weights where only its code tells an image's tokens.
    """
    images = facts.images
    if images is None:
        return batches
    sizes = sizes_of(module, images)
    if not sizes and (build := builder_of(module)) is not None:
        sizes = sizes_of(build(), images)
    if not sizes:
        raise ConfigError(f"{facts.kind} takes images in a way that is not known here: give a batch_factory with some")
    needed = length_for(COUNTS, sizes) + TEXT
    if facts.max_seq_len is not None and needed > facts.max_seq_len:
        raise ConfigError(
            f"two images of {facts.kind} take {needed} tokens with {TEXT} of text, more than its longest row of"
            f" {facts.max_seq_len}: give a batch_factory, or a config with smaller images (vision_config.image_size)"
        )
    known: dict[str, Any] = {key: getattr(batches, key) for key in ("vocab_size", "rows", "seed")}
    return PicturedBatches(**known, seq_len=max(batches.seq_len, needed), keys=(), images=images, sizes=sizes)
