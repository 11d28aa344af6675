"""Models that take no token ids, or give no logits of tokens, with a batch and a plain-torch loss for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, CLASSES = 8, 5
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(**SMALL, **STILL, image_size=8, patch_size=4, num_labels=CLASSES))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"vocab_size": 32, "max_position_embeddings": 16, "num_labels": CLASSES}
    return BertForSequenceClassification(BertConfig(**SMALL, **STILL, **sizes))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0))


class ConditionedBlock(nn.Module):
    """Attention and MLP whose norms are modulated by a condition, as in DiT (arXiv 2212.09748)."""

    def __init__(self, dim: int):
        super().__init__()
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.modulation = nn.Linear(dim, 6 * dim)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift, gate, scale_2, shift_2, gate_2 = self.modulation(F.silu(condition)).unsqueeze(1).chunk(6, -1)
        q, k, v = self.qkv(self.norm(x) * (1 + scale) + shift).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + gate * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + gate_2 * self.mlp(self.norm(x) * (1 + scale_2) + shift_2)


class DiffusionTransformer(nn.Module):
    """Images, timesteps and classes -> the predicted noise."""

    def __init__(self, dim: int = 16):
        super().__init__()
        self.patch, self.time, self.label = nn.Linear(12, dim), nn.Linear(1, dim), nn.Embedding(4, dim)
        self.blocks = nn.ModuleList(ConditionedBlock(dim) for _ in range(2))
        self.out = nn.Linear(dim, 12)

    def forward(self, images: Tensor, timesteps: Tensor, classes: Tensor) -> Tensor:
        patches = images.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        condition = self.time(timesteps[:, None]) + self.label(classes)
        x = self.patch(patches)
        for block in self.blocks:
            x = block(x, condition)
        return (
            self.out(x).unflatten(1, (4, 4)).unflatten(-1, (3, 2, 2)).permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)
        )


class ConvNet(nn.Module):
    """A classifier of images. ``norm``: "group", "batch", or "rows" for a mean over the batch that is no module."""

    def __init__(self, norm: str = "group"):
        super().__init__()
        self.mixes = norm == "rows"
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8) if norm == "batch" else nn.GroupNorm(2, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.second(F.relu(self.norm(self.first(images)))).mean((2, 3))
        return self.head(x - x.mean(0) if self.mixes else x)


@dataclass
class Scores:
    """An output that torch does not look into."""

    scores: Tensor
    depth: Tensor


class TwoHeads(nn.Module):
    """Features -> classes and a number for each row, in a tuple, a dict or an object; or its own mean loss alone."""

    def __init__(self, returns: str = "tuple"):
        super().__init__()
        self.returns = returns
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.classes, self.depth = nn.Linear(6, CLASSES), nn.Linear(6, 1)

    def forward(self, features: Tensor, labels: Tensor | None = None) -> Any:
        for layer in self.layers:
            features = features + layer(features).tanh()
        scores, depth = self.classes(features), self.depth(features)[:, 0]
        if self.returns == "loss":
            return F.cross_entropy(scores, labels)
        made = {"tuple": lambda: (scores, depth), "dict": lambda: {"scores": scores, "depth": depth}}
        return made.get(self.returns, lambda: Scores(scores, depth))()


def scores_of(output: Any) -> tuple[Tensor, Tensor]:
    if isinstance(output, tuple):
        return output
    return (output["scores"], output["depth"]) if isinstance(output, dict) else (output.scores, output.depth)


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ids(seed: int, high: int, *shape: int) -> Tensor:
    return torch.randint(1, high, shape, generator=torch.Generator().manual_seed(seed))


def row_labels() -> Tensor:
    """One for each row; some have none, other numbers of them on each rank and in each microbatch."""
    labels = ids(1, CLASSES, ROWS)
    labels[[1, 2, 6]] = -100
    return labels


def squares(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """The weighted squared error of each image, summed."""
    return ((output - batch["noise"]) ** 2).mean((1, 2, 3)).mul(batch["weights"]).sum()


@dataclass(frozen=True)
class Kind:
    """``loss``: (model, whole batch) -> the mean of one process with plain torch."""

    make: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Tensor]]
    loss: Callable[[nn.Module, dict[str, Tensor]], Tensor]


def _words() -> dict[str, Tensor]:
    mask = torch.ones(ROWS, 6, dtype=torch.int64)
    mask[3, 4:] = 0
    return {"input_ids": ids(2, 32, ROWS, 6), "attention_mask": mask, "labels": row_labels()}


def _translated() -> dict[str, Tensor]:
    labels = ids(3, 32, ROWS, 5)
    labels[0, 2:] = labels[5, 1:] = -100
    return {"input_ids": ids(2, 32, ROWS, 6), "labels": labels}


def _noisy() -> dict[str, Tensor]:
    batch = {"images": random(1, ROWS, 3, 8, 8), "timesteps": random(2, ROWS), "classes": ids(4, 4, ROWS)}
    return batch | {"noise": random(3, ROWS, 3, 8, 8), "weights": random(5, ROWS).abs()}


def _classified(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    output = model(**{key: value for key, value in batch.items() if key != "labels"})
    return F.cross_entropy(output if isinstance(output, Tensor) else output.logits, batch["labels"])


def _denoised(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return squares(model(batch["images"], batch["timesteps"], batch["classes"]), batch) / batch["weights"].sum()


def _both(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    scores, depth = scores_of(model(batch["features"]))
    return F.cross_entropy(scores, batch["labels"]) + 0.3 * F.mse_loss(depth, batch["far"])


KINDS = {
    "vit": Kind(vit, lambda: {"pixel_values": random(1, ROWS, 3, 8, 8), "labels": row_labels()}, _classified),
    "dit": Kind(DiffusionTransformer, _noisy, _denoised),
    "bert": Kind(bert, _words, _classified),
    "t5": Kind(t5, _translated, lambda model, batch: model(**batch).loss),
    "conv": Kind(ConvNet, lambda: {"images": random(1, ROWS, 3, 8, 8), "labels": row_labels()}, _classified),
    "heads": Kind(
        TwoHeads, lambda: {"features": random(1, ROWS, 6), "labels": row_labels(), "far": random(2, ROWS)}, _both
    ),
}


def built(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def computed(kind: Kind, make: Callable[[], nn.Module] | None = None) -> dict[str, Tensor]:
    """The oracle: the loss and the gradients of one process with plain torch."""
    model = built(make or kind.make)
    loss = kind.loss(model, kind.batch())
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
