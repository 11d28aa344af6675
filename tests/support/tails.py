"""What people's models do to their logits behind the head: ways that can be done to a piece, and ways that cannot."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.users import VOCABULARY, User

ROWS, SEQ = 4, 6
Treatment = Callable[["Tailed", Tensor], Tensor]


class Tailed(User):
    """A model with one of the treatments below, and what these read of it."""

    def __init__(self, name: str):
        super().__init__()
        self.config.treatment = name  # what equal models are known by
        self.treatment = {**CARRIED, **OVER_THE_VOCABULARY, **REFUSED}[name]
        self.temperature = 1.5
        self.unused = nn.Parameter(torch.tensor([0.7]), requires_grad=False)
        self.register_buffer("banned", torch.arange(VOCABULARY) > 40)
        self.register_buffer("prior", torch.linspace(-1, 1, VOCABULARY))

    def logits(self, x: Tensor) -> Tensor:
        return self.treatment(self, super().logits(x))


def written(write: Callable[[Tailed, Tensor], object]) -> Treatment:
    """Return what writes into the logits, as a treatment."""

    def treated(model: Tailed, y: Tensor) -> Tensor:
        write(model, y)
        return y

    return treated


def put(key: object, value: object) -> Treatment:
    return written(lambda model, y: y.__setitem__(key, value(model, y) if callable(value) else value))


def without_gradient(model: Tailed, y: Tensor) -> Tensor:
    with torch.no_grad():
        y[..., 3] = 0
    return y


def of_a_copy(model: Tailed, y: Tensor) -> Tensor:
    z = y * 2
    y.add_(1)
    return z


class Doubled(torch.autograd.Function):
    """The very tensor, and twice its gradient."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def hooked(model: Tailed, y: Tensor) -> Tensor:
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 2)
    return y


def written_behind(make: Callable[[Tailed], Tensor], use: Callable[[Tensor, Tensor], Tensor]) -> Treatment:
    """Return a treatment by a tensor that is written to once it was used."""

    def treated(model: Tailed, y: Tensor) -> Tensor:
        beside = make(model)
        y = use(y, beside)
        beside.zero_()
        return y

    return treated


def put_beside(y: Tensor, value: Tensor) -> Tensor:
    y[..., [1, 2]] = value
    return y


def by_lists(model: Tailed, y: Tensor) -> Tensor:
    torch._foreach_mul_([y], 2.0)
    return y


def one_token_kept(model: Tailed, y: Tensor) -> Tensor:
    model.__dict__["last"] = y[:, -1].detach()
    return y * 2


def one_token_written(model: Tailed, y: Tensor) -> Tensor:
    y[:, 1:].mul_(3)
    return y


E, ALL = Ellipsis, slice(None)
CARRIED: dict[str, Treatment] = {
    "nothing": lambda model, y: y,
    "soft cap": lambda model, y: 30 * torch.tanh(y / 30),
    "scale": lambda model, y: y * 3,
    "float": lambda model, y: y.float().double(),
    "run of ids": put((E, slice(33, None)), -1e9),
    "one id": put((ALL, ALL, 7), 0.5),
    "run times": written(lambda model, y: y[..., :5].mul_(3)),
    "narrow": written(lambda model, y: y.narrow(-1, 3, 9).fill_(0.1)),
    "every third": put((E, slice(1, None, 3)), 0.0),
    "run of a run": written(lambda model, y: y[..., 10:].__setitem__((E, slice(3, 7)), 0.0)),
    "list of ids": put((E, [1, 5, 36, -1]), -9.0),
    "mask of ids": put((E, torch.arange(VOCABULARY) % 7 == 0), -9.0),
    "index_fill": lambda model, y: y.index_fill(-1, torch.tensor([4, 50]), 0.1),
    "where they are large": written(lambda model, y: y.clamp_(max=0.5)),
    "masked_fill": lambda model, y: y.masked_fill(model.banned, -1e9),
    "masked_fill_": written(lambda model, y: y.masked_fill_(model.banned, -1e9)),
    "by a mask of logits": written(lambda model, y: y.__setitem__(y > 0.5, 0.5)),
    "torch.where": lambda model, y: torch.where(model.banned, torch.full_like(y, -5.0), y),
    "prior": lambda model, y: y + model.prior,
    "run of a prior": written(lambda model, y: y[..., 20:].add_(model.prior[20:])),
    "prior put": put((E, slice(20, None)), lambda model, y: model.prior[20:]),
    "by position": lambda model, y: y * torch.linspace(1, 2, y.shape[1]).double()[:, None],
    "fewer ids": lambda model, y: y[..., :47],
    "ids behind the first": lambda model, y: y[..., :50][..., 0:49],
    "one id of itself": put((E, 7), lambda model, y: y[..., 7] * 2 + 1),
    "flattened": lambda model, y: y.view(-1, VOCABULARY).mul(2).view_as(y),
    "no gradient": without_gradient,
    "written behind": of_a_copy,
    "less a constant": lambda model, y: y - y.detach().clamp(min=0.2),
    "new tensor": lambda model, y: y + y.new_zeros(VOCABULARY).index_fill(0, torch.tensor([3]), -4.0),
    "in training": lambda model, y: y * 3 if model.training else y,
    "in evaluation": lambda model, y: y if model.training else y * 3,
    "by length": lambda model, y: y / y.shape[1] ** 0.5,
    "if long": lambda model, y: y * 2 if y.shape[1] > 4 else y,
    "temperature": lambda model, y: y / model.temperature,
    "number of a parameter": lambda model, y: y * float(model.unused),
    "number of the head": lambda model, y: y * float(model.prior.abs().sum()),
    "keeps one token": one_token_kept,
    "reads the best": lambda model, y: (y.argmax(-1), y * 2)[1],
}
OVER_THE_VOCABULARY: dict[str, Treatment] = {
    "log_softmax": lambda model, y: F.log_softmax(y, -1),
    "centred": lambda model, y: y - y.mean(-1, keepdim=True),
    "less logsumexp": lambda model, y: y - y.logsumexp(-1).unsqueeze(-1),
    "the best five": lambda model, y: y.masked_fill(y < y.topk(5)[0][..., -1:], -30.0),
    "normed": lambda model, y: F.normalize(y, dim=-1),
    "padded": lambda model, y: F.pad(y, (0, 3), value=-9.0),
    "joined": lambda model, y: torch.cat([y[..., :50], y.new_full((*y.shape[:2], 3), -9.0)], -1),
    "other order": lambda model, y: y[..., torch.arange(VOCABULARY - 1, -1, -1)],
}
"""Carried by tokens; of a vocabulary that ranks share, the whole is gathered."""
REFUSED: dict[str, Treatment] = {
    "own derivative": lambda model, y: Doubled.apply(y),
    "hook": hooked,
    "mean over tokens": lambda model, y: y - y.mean(1, keepdim=True),
    "mean of all": lambda model, y: y - y.mean(),
    "read": lambda model, y: y / float(y.detach().max()),
    "asked": lambda model, y: y * 2 if bool((y > 0).any()) else y,
    "dropped": lambda model, y: F.dropout(y, 0.5, model.training),
    "turned round": lambda model, y: y.flip(1),
    "some tokens": one_token_written,
    "by lists": by_lists,
    "beside what changes": written_behind(lambda model: model.prior.clone(), torch.add),
    "beside a number that changes": written_behind(lambda model: torch.tensor(2.0).double(), torch.mul),
    "beside an element that changes": written_behind(lambda model: torch.tensor([0.5]).double(), put_beside),
    "beside an order that changes": written_behind(
        lambda model: torch.arange(VOCABULARY - 1, -1, -1), lambda y, order: y[..., order]
    ),
    "beside columns that change": written_behind(
        lambda model: torch.full((1, 1, 3), -9.0).double(),
        lambda y, columns: torch.cat([y[..., :50], columns.expand(*y.shape[:2], 3)], -1),
    ),
}
"""Not done piece by piece; without ``loss_chunks`` equal to one process, where randomness allows a comparison."""
