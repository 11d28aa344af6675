"""Models whose code between the embedding, the blocks and the head depends on a condition, as people write them."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from .premises import Sound

RARE = 3


def doubled(x: Tensor, tokens: Tensor) -> Tensor:
    return torch.where((tokens == RARE)[..., None], x * 2, x)


class Behind(Sound):
    """Code behind the blocks, which stages run that have no token there."""

    def between(self, x, tokens):
        if (tokens == RARE).any():
            x = torch.where((tokens == RARE)[..., None], x * 2, x)
        return x


class ByCount(Sound):
    def between(self, x, tokens):
        return doubled(x, tokens) if int((tokens == RARE).sum()) > 0 else x


class WhileTraining(Sound):
    def between(self, x, tokens):
        return doubled(x, tokens) if self.training else x


class ByAttribute(Sound):
    doubles = False

    def between(self, x, tokens):
        return doubled(x, tokens) if self.doubles else x


class Config(SimpleNamespace):
    """Of a model that can be made small."""


class BySwitch(ByAttribute):
    """Built from a config; its switch is set later."""

    def __init__(self, config=None):
        super().__init__()
        self.config = config or Config(vocab_size=48, hidden_size=16, num_hidden_layers=2)
        self.doubles = False


class ByOwnValues(Sound):
    """Asks for the largest value where a stage has no token."""

    def between(self, x, tokens):
        return x.clamp(-50, 50) if x.abs().max() > 50 else x


class Before(Sound):
    def embedded(self, x, tokens):
        return doubled(x, tokens) if (tokens == RARE).any() else x

    def forward(self, tokens):
        x = self.embedded(self.embedding(tokens), tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(self.between(x, tokens)))


class Among(Sound):
    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
            if (tokens == RARE).any():
                x = doubled(x, tokens)
        return self.head(self.norm(x))


class AmongWithoutReading(Sound):
    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = doubled(layer(x), tokens)
        return self.head(self.norm(x))


class ByMask(Sound):
    def forward(self, tokens, attention_mask=None):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        if attention_mask is not None and (attention_mask == 0).any():
            x = torch.where((attention_mask == 0)[..., None], x * 0, x)
        return self.head(self.norm(x))


class ByPositions(Sound):
    def forward(self, tokens, positions=None):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        if positions is not None:
            x = torch.where((positions == 0)[..., None], x * 2, x)
        return self.head(self.norm(x))


CARRIED = (Behind, ByCount, WhileTraining, ByAttribute, BySwitch, ByOwnValues, Before, ByMask, ByPositions)


class ReadsEarlier(Before):
    """A tensor from before the blocks, for rare tokens."""

    def embedded(self, x, tokens):
        self.kept = x
        return x

    def between(self, x, tokens):
        if (tokens == RARE).any():
            x = torch.where((tokens == RARE)[..., None], x + self.kept, x)
        return x


class ReadsEarlierWhileTraining(ReadsEarlier):
    def between(self, x, tokens):
        return x + self.kept if self.training else x
