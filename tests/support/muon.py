"""Muon in one process, from the papers and in plain torch; and runs of ours on a layout, whole or broken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright import Layout, ParallelModel, parallelize
from meshwright.distributed.optimizer import muon, owners
from meshwright.distributed.optimizer.owners import MatrixOwners
from meshwright.distributed.process.absent_peers import WireCounter
from meshwright.distributed.torch_private import local_part
from meshwright.distributed.weights.shards import whole_on_first
from meshwright.models.decoder_config import DecoderConfig
from meshwright.planning.collectives import step_traffic
from meshwright.planning.memory import plan_memory
from meshwright.planning.optimizer_collectives import sent_elements
from meshwright.planning.values import Batch
from meshwright.training.optimizer import make_optimizer

from .laid_out import own_rows
from .problems import SEED, Data, Problem
from .states import bytes_of_state

LR, MOMENTUM, DECAY, BETAS, EPS, MAX_NORM = 0.02, 0.9, 0.1, (0.8, 0.95), 1e-6, 0.3
MATRICES = ("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down")
"""Parts of the names of all hidden matrices of the decoder; its router, norms, embedding and head have none of them."""
WHOLE = {"precision": dict.fromkeys(("master", "compute", "reduce"), "float64"), "optimizer": "muon"}


def problem_of(model: DecoderConfig, steps: int) -> Problem:
    return Problem(model=model, data=Data(rows=8, seq=8, vocab=model.vocab_size), steps=steps, max_norm=MAX_NORM)


def orthogonal(matrix: Tensor) -> Tensor:
    """Five steps of Keller Jordan's quintic iteration."""
    if matrix.shape[0] > matrix.shape[1]:
        return orthogonal(matrix.T).T
    x = matrix / matrix.norm()
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x


class PlainMuon(torch.optim.Optimizer):
    """Algorithm 1 of arXiv 2502.16982 for hidden matrices, each expert one, with Nesterov's momentum; AdamW for the
    rest.
    """

    def __init__(
        self,
        model: nn.Module,
        hidden: tuple[str, ...] = MATRICES,
        betas: tuple[float, float] = BETAS,
        eps: float = EPS,
        decay_of_vectors: float = 0.0,
    ):
        named = list(model.named_parameters())
        self.hidden = [p for name, p in named if set(name.split(".")) & set(hidden) and p.dim() > 1]
        others = [p for _, p in named if not any(p is matrix for matrix in self.hidden)]
        groups = [{"params": [p for p in others if p.dim() == 1], "weight_decay": decay_of_vectors}]
        groups += [{"params": [p for p in others if p.dim() > 1], "weight_decay": DECAY}]
        self.adamw = torch.optim.AdamW(groups, lr=LR, betas=betas, eps=eps)
        super().__init__(self.hidden, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.adamw.step()
        for w in self.hidden:
            state = self.state[w]
            state["m"] = MOMENTUM * state.get("m", torch.zeros_like(w)) + (1 - MOMENTUM) * w.grad
            ahead = MOMENTUM * state["m"] + (1 - MOMENTUM) * w.grad
            scale = 0.2 * max(w.shape[-2:]) ** 0.5
            update = torch.stack([orthogonal(m) for m in ahead]) if w.dim() == 3 else orthogonal(ahead)
            w.copy_(w - LR * (scale * update + DECAY * w))

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.adamw.zero_grad(set_to_none)


@dataclass
class Run:
    """Parameters behind the last step, whole on rank 0; elements sent in that step's all-to-alls and their number, and
    what the plan says of this rank, of all all-to-alls of the one that sends most, and of their number; bytes of state,
    held and planned of the first rank.
    """

    parameters: dict[str, Tensor]
    sent: float
    messages: int
    planned: int
    most: float
    planned_messages: int
    held: int
    planned_bytes: int


def optimizer_of(model: ParallelModel, matrices: tuple[str, ...] = ()) -> torch.optim.Optimizer:
    plan = model.plan.optimizer
    groups = model.make_parameter_groups(weight_decay=DECAY)
    options: dict[str, Any] = {"momentum": MOMENTUM, "betas": BETAS, "eps": EPS}
    plan, named = replace(plan, matrices=(*plan.matrices, *matrices)), model.named_parameters()
    return make_optimizer(groups, lr=LR, plan=plan, named_parameters=named, **options).optimizer


def train(layout: Layout, problem: Problem, mutant: str = "") -> Run:
    """Steps on a layout."""
    assert isinstance(problem.model, DecoderConfig)
    model = parallelize(problem.model, layout, techniques=WHOLE, seed=SEED)
    also = ("embedding.weight",) if mutant == "embedding_by_muon" else ()
    optimizer = optimizer_of(model, also)
    with mutated(mutant):
        for batch in problem.data.steps(problem.steps):
            model.forward_backward(own_rows(model, batch))
            with WireCounter() as wire:
                model.optimizer_step(optimizer, problem.max_norm)
    model.audit(optimizer)
    found = [one for one in wire.sent if one.op == "all_to_all"]
    named = dict(model.named_parameters())
    of_rank = [p for p in model.facts.parameters if p.name in named]
    elements, messages = sent_elements(model.plan, of_rank)
    rank = (dist.get_rank() if dist.is_initialized() else 0) % len(elements)  # the pipeline's axis is the outermost
    rows, seq = problem.data.rows, problem.data.seq
    most = sum(t.bytes for t in step_traffic(model.plan, Batch(rows, seq)) if t.op == "all_to_all") / 8
    whole = whole_on_first({name: p.detach() for name, p in named.items()}, differ=model.plan.pipeline is not None)
    memory = bytes_of_state(optimizer), plan_memory(model.plan, pipeline_rank=0).optimizer
    return Run(whole, sum(one.bytes for one in found) / 8, len(found), elements[rank], most, messages, *memory)


# --- mutants: what must not go unseen


def mutated(name: str) -> AbstractContextManager[Any]:
    if name in ("", "embedding_by_muon"):
        return nullcontext()
    return globals()[name]()


def shards_alone() -> Any:
    """Each rank orthogonalises its own part."""

    def compute(self, tensors, functions):
        for tensor, function in zip(tensors, functions, strict=True):
            local = local_part(tensor)
            for matrix in local if local.dim() == 3 else [local]:
                matrix.copy_(function(matrix))

    return patch.object(MatrixOwners, "compute", compute)


@contextmanager
def one_rank_gets_nothing() -> Iterator[None]:
    """The last rank receives zeros."""
    whole = owners._Message.send

    def send(self, ranks, part_of, like):
        found = whole(self, ranks, part_of, like)
        return {key: part * 0 for key, part in found.items()} if ranks.rank == ranks.size - 1 else found

    with patch.object(owners._Message, "send", send):
        yield


def stale_momentum() -> Any:
    """The step does not look a gradient ahead."""
    return patch.object(muon, "foreach_between", lambda gradients, means, decay: [mean.clone() for mean in means])


def scaled_by_rows() -> Any:
    """The scale follows the first dim alone."""
    return patch.object(muon, "max", min, create=True)
