"""Outputs that are views, or written to in place, under FSDP2 and DDP: equal to one process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from support.users import DIM, VOCABULARY, User
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright import Layout, UnsupportedError, parallelize
from meshwright.distributed.mesh import data_position

FP64 = {"precision": {"master": "float64", "compute": "float64", "reduce": "float64"}}


class WithBias(User):
    """A head with a bias gives a view of a product, into which the model writes."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(DIM, VOCABULARY)
        self.config.written = type(self).__name__

    def forward(self, tokens):
        logits = super().forward(tokens)
        logits[:, :, 7] = 0.5
        return logits


class InAnObject(WithBias):
    def forward(self, tokens):
        return SimpleNamespace(logits=super().forward(tokens))


class AddedInPlace(User):
    """Blocks give views, to which the model adds."""

    class Up(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(DIM, 24), nn.Linear(24, DIM)

        def forward(self, x):
            return self.down(F.gelu(self.up(x)))

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([self.Up() for _ in range(3)])
        self.config.written = "AddedInPlace"

    def forward(self, tokens):
        x = self.embedded(tokens)
        for layer in self.layers:
            y = layer(x)
            y += x
            x = y
        return self.logits(x)


class ViewOfInput(AddedInPlace):
    """What a block returns is a view of its input too, and a write into it is one into the input."""

    class Up(AddedInPlace.Up):
        def forward(self, x):
            return super().forward(x.clone()), x.view(*x.shape)

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([self.Up() for _ in range(3)])
        self.config.written = "ViewOfInput"

    def forward(self, tokens):
        x = self.embedded(tokens) * 1.0
        for layer in self.layers:
            y, same = layer(x)
            same *= 0.5
            x = x + y
        return self.logits(x)


class PassedOver(WithBias):
    """A block that some batches pass over, by a mean of all rows."""

    def forward(self, tokens):
        x = self.embedded(tokens)
        for number, layer in enumerate(self.layers):
            if number == 1 and bool(tokens[:, 0].float().mean() < 4):
                continue
            x = layer(x)
        return torch.tanh(self.logits(x))


def apart(kind, sizes, techniques):
    torch.manual_seed(0)
    reference = kind().double()
    torch.manual_seed(0)
    model = parallelize(kind().double(), Layout(**sizes), techniques=FP64 | techniques)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (reference, model)]
    rank, ranks = data_position(model.mesh)
    found = {}
    for step in range(3):
        tokens = torch.randint(4, VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(step))
        tokens[:, 0] = 3 if step == 1 else 5
        given = {"tokens": tokens, "labels": tokens.roll(-1, 1)}
        output = reference(tokens)
        logits = output if isinstance(output, torch.Tensor) else output.logits
        loss = F.cross_entropy(logits.flatten(0, 1), given["labels"].flatten())
        optimizers[0].zero_grad()
        loss.backward()
        optimizers[0].step()
        found[step] = abs(
            float(model.forward_backward({k: v.chunk(ranks)[rank] for k, v in given.items()}).loss - loss)
        )
        model.optimizer_step(optimizers[1])
    expected = dict(reference.named_parameters())
    for name, p in model.named_parameters():
        whole = p.full_tensor() if isinstance(p, DTensor) else p
        found[name] = float((whole - expected[name]).norm() / expected[name].norm())
    return {name: error for name, error in found.items() if not error <= 1e-10}


SHARDED, REPLICATED = {"dp_shard": 2}, {"dp_shard": 1, "dp_replicate": 2}
CASES = [
    (WithBias, SHARDED, {}),
    (WithBias, SHARDED, {"loss_chunks": 2}),
    (WithBias, SHARDED, {"activation_checkpointing": "full"}),
    (WithBias, {"dp_shard": 1, "cp": 2}, {}),
    (WithBias, REPLICATED, {"loss_chunks": 2}),
    (InAnObject, SHARDED, {}),
    (AddedInPlace, SHARDED, {}),
    (AddedInPlace, SHARDED, {"activation_checkpointing": "full"}),
]


@pytest.mark.parametrize(("kind", "sizes", "techniques"), CASES)
def test_outputs_that_are_written_to(kind, sizes, techniques, spmd):
    for found in spmd(2, apart, kind, sizes, techniques):
        assert found == {}


def raised(kind):
    try:
        return apart(kind, SHARDED, {})
    except (RuntimeError, UnsupportedError) as error:
        return str(error)


def test_a_block_that_a_mean_of_all_rows_passes_over_is_refused(spmd):
    for found in spmd(2, raised, PassedOver):
        assert "PassedOver decides by the values of all rows of a batch" in found


def test_a_write_into_a_blocks_input_by_its_output_stays_torchs_error(spmd):
    """A view of the input is no tensor of its own: as one, the input would change behind autograd's back."""
    for found in spmd(2, raised, ViewOfInput):
        assert "is a view and is being modified inplace" in found
