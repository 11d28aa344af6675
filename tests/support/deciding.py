"""Models whose code decides by the values of a row's tokens, as people write them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .users import DIM, Block, User


class Decides(User):
    """Changes the embedded tokens where ``changed`` decides so."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.config.deciding = type(self).__name__

    def embedded(self, tokens: Tensor) -> Tensor:
        return self.changed(self.embed(tokens), tokens)

    def changed(self, y: Tensor, tokens: Tensor) -> Tensor:
        raise NotImplementedError


class OfLargest(Decides):
    def changed(self, y, tokens):
        if tokens.max() > 5:
            y = y * 2
        return y


class OfSmallest(Decides):
    def changed(self, y, tokens):
        return y * 2 if tokens.min().item() < 2 else y


class OfAnId(Decides):
    def changed(self, y, tokens):
        if (tokens == 7).any():
            return y * 2
        return y


class OfARareId(Decides):
    """No token of a small row has it, perhaps."""

    def changed(self, y, tokens):
        if bool(torch.any(tokens == 52)):
            return y * 2
        return y


class OfAll(Decides):
    def changed(self, y, tokens):
        if (tokens != 0).all():
            return y * 2
        return y


class OfSum(Decides):
    def changed(self, y, tokens):
        if tokens.sum() > 400:
            return y * 2
        return y


class OfCount(Decides):
    def changed(self, y, tokens):
        many = int((tokens > 20).sum())
        if many > 8:
            return y * 2
        return y


class OfMean(Decides):
    def changed(self, y, tokens):
        if tokens.float().mean() > 21.0:
            return y * 2
        return y


class OfLargeFeatures(Decides):
    """No row that is tried is so large."""

    def changed(self, y, tokens):
        if y.norm() > 1e4:
            return y * 2
        return y


class OfSmallFeatures(Decides):
    """All rows that are tried are so small."""

    def changed(self, y, tokens):
        if y.abs().max() < 1e4:
            return y * 2
        return y


class OfEqual(Decides):
    def changed(self, y, tokens):
        if torch.equal(tokens[:, 0], tokens[:, -1]):
            return y * 2
        return y


class OfDifferentIds(Decides):
    def changed(self, y, tokens):
        if len(tokens.unique()) > 10:
            return y * 2
        return y


class ByLargest(Decides):
    """A number that is read, and no decision."""

    def changed(self, y, tokens):
        return y * (1 + tokens.max().item())


class WithoutReading(Decides):
    """Nothing is read: tensors decide."""

    def changed(self, y, tokens):
        return torch.where((tokens == 7).any(), y * 2, y)


class InABlock(User):
    class Decides(Block):
        def forward(self, x):
            x = super().forward(x)
            if x.abs().max() > 50:
                x = x / 2
            return x

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(self.Decides)
        self.config.deciding = type(self).__name__


class Masked(Decides):
    """Decides by a mask of padding."""

    def forward(self, tokens, attention_mask=None):
        x = self.embed(tokens)
        if attention_mask is not None and (attention_mask == 0).any():
            x = x * 2
        for layer in self.layers:
            x = layer(x)
        return self.logits(x)


REFUSED = (
    OfLargest,
    OfSmallest,
    OfAnId,
    OfARareId,
    OfAll,
    OfSum,
    OfCount,
    OfMean,
    OfLargeFeatures,
    OfSmallFeatures,
    OfEqual,
    OfDifferentIds,
    ByLargest,
    InABlock,
)
BY_TENSORS = WithoutReading


# --- decisions that change nothing for other tokens


class Checks(Decides):
    def changed(self, y, tokens):
        if tokens.max() >= self.embed.num_embeddings:
            raise ValueError("an id is too large")
        if not torch.isfinite(y).all():
            raise ValueError("not finite")
        return y


class Clamps(Decides):
    def changed(self, y, tokens):
        if y.abs().max() > 1e4:
            y = y.clamp(-1e4, 1e4)
        return y


class Skips(Decides):
    """Nothing is left out where no token is concerned."""

    def changed(self, y, tokens):
        concerned = tokens == 7
        if concerned.any():
            y = torch.where(concerned.unsqueeze(-1), y * 2, y)
        return y


class Experts(Decides):
    """A list of experts, each for its own tokens, if any."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(4)])

    def changed(self, y, tokens):
        found = torch.zeros_like(y)
        for number, expert in enumerate(self.experts):
            mine = tokens % 4 == number
            if mine.sum() == 0:
                continue
            found[mine] = expert(y[mine])
        return found


class ExpertsByAny(Experts):
    def changed(self, y, tokens):
        for number, expert in enumerate(self.experts):
            mine = tokens % 4 == number
            if mine.any():
                y = torch.where(mine.unsqueeze(-1), expert(y), y)
        return y


CARRIED = (Checks, Clamps, Skips, Experts, ExpertsByAny)
