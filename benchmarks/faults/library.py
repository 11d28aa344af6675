"""Faults in a copy of the library: of one file some text is replaced by another."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from benchmarks.survey.matrix import CUTTABLE, SIGMOID, TIED, UNTIED
from meshwright import Layout
from meshwright.models.decoder_config import DecoderConfig

PLAIN = UNTIED
CUT = replace(UNTIED, **CUTTABLE)
FEW_HEADS = replace(CUT, n_kv_heads=1)
TIE = TIED
ROUTED = replace(UNTIED, moe=SIGMOID)
"""Its first block is dense."""
DEEP = replace(UNTIED, n_layers=4)
"""Of two stages the first has three of its blocks: the other has the head."""
DEEP_TIED = replace(TIED, n_layers=4)

DDP, FSDP, HSDP = Layout(dp_replicate=2, dp_shard=1), Layout(dp_shard=2), Layout(dp_replicate=2, dp_shard=2)
TP, TP_FSDP = Layout(dp_shard=1, tp=2), Layout(dp_shard=2, tp=2)
PP, PP_FSDP = Layout(pp=2, dp_shard=1), Layout(pp=2, dp_shard=2)
EP = Layout(dp_shard=2, ep=2)
GRADIENT, LOSS, NORM = "the gradient of the parameter ", "the loss of step 1", "the gradient norm of step 1"
ATTENTION = r"layers\.0\.attention(\.wo)?"


@dataclass(frozen=True)
class Fault:
    """A fault, and where it should be placed.

    Attributes:
        what: is wrong.
        file: under src/meshwright.
        old, new: the text, which stands there once, and what replaces it.
        where: a pattern of the place that a person would have named: the module, the parameter, or the quantity that
            is computed wrongly.
        techniques: beside the layout; ``microbatch_rows`` and ``max_norm`` are given to verify.
    """

    what: str
    file: str
    old: str
    new: str
    model: DecoderConfig
    layout: Layout
    where: str
    techniques: tuple[tuple[str, Any], ...] = ()
    microbatch_rows: int = 0
    max_norm: float = 1.0


T, P = "distributed/tensor/", "distributed/pipeline/"
TENSOR = [
    Fault(
        "sequences are gathered in another order of ranks",
        "distributed/exchange.py",
        "parts.transpose(0, 1).reshape(",
        "parts.flip(0).transpose(0, 1).reshape(",
        CUT,
        TP,
        rf"output of {ATTENTION} \(forward\)",
    ),
    Fault(
        "the gradient of a column-parallel layer's input is a rank's summand",
        T + "functions.py",
        "            grad_x = sequence.reduced(grad_x)\n",
        "            grad_x = own_share(grad_x, sequence.group.rank, sequence.group.size) if sequence.cut else"
        " grad_x\n",
        CUT,
        TP,
        r"the gradient of (norm|layers\.2\.feed_forward_norm)'s output \(backward\)",
    ),
    Fault(
        "gradients of whole norms are a rank's summands",
        T + "parallel.py",
        "for p in (*sums.whole, *sums.alike) if",
        "for p in sums.alike if",
        CUT,
        TP_FSDP,
        rf"{GRADIENT}(norm|layers\.\d\.\w+_norm|layers\.\d\.attention\.[qk]_norm)\.weight",
    ),
    Fault(
        "gradients of copied key heads are not summed",
        T + "parallel.py",
        "        for parameter in sums.copied:\n            # ranks",
        "        for parameter in ():\n            # ranks",
        FEW_HEADS,
        TP,
        rf"{GRADIENT}layers\.\d\.attention\.w[kv]\.weight",
    ),
    Fault(
        "each rank shifts its logits by its own maximum",
        T + "loss.py",
        "top = top if shard.group is None else shard.group.largest(top)",
        "top = top",
        CUT,
        TP,
        LOSS,
    ),
    Fault(
        "the label's gradient is found on every rank",
        T + "loss.py",
        "-(each * is_here.unsqueeze(1))",
        "-each",
        CUT,
        TP,
        r"(head|norm)('s output \(backward\)|\.weight)",
    ),
    Fault(
        "ids of other ranks are looked up at 0 and counted",
        T + "ends.py",
        "summand = torch.where(elsewhere.unsqueeze(-1), fill.unsqueeze(-1), found)",
        "summand = found",
        CUT,
        TP,
        r"output of (embedding|layers\.0\.attention_norm) \(forward\)",
    ),
    Fault(
        "the embedding's gradient is that of the first rank's tokens",
        T + "functions.py",
        "linear_map(x, group.scatter, lambda gradient: group.gather(gradient, length))",
        "linear_map(x, group.scatter, lambda gradient: group.gather(gradient, length) * (group.rank == 0))",
        CUT,
        TP,
        rf"{GRADIENT}embedding\.weight",
    ),
    Fault(
        "a row-parallel layer gives its own summand",
        T + "functions.py",
        "            output = sequence.reduced(summand)\n",
        "            output = own_share(summand, sequence.group.rank, sequence.group.size) if sequence.cut else"
        " summand\n",
        CUT,
        TP,
        rf"output of {ATTENTION} \(forward\)",
    ),
    Fault(
        "of a loss in chunks the last one's gradient is kept",
        T + "loss.py",
        "grad_weight += slope.T @ piece",
        "grad_weight = slope.T @ piece",
        CUT,
        TP,
        rf"{GRADIENT}head\.weight",
        (("loss_chunks", 3),),
    ),
    Fault(
        "the vocabulary's shares are not torch's",
        T + "loss.py",
        "        first = min(group.rank * share, whole)\n        return",
        "        first = min((group.size - 1 - group.rank) * share, whole)\n        return",
        CUT,
        TP,
        r"output of (embedding|layers\.0\.attention_norm) \(forward\)",
    ),
]
PIPELINE = [
    Fault(
        "the gradient that comes from the next stage is halved",
        P + "run.py",
        "torch.autograd.backward(kept.left, gradient)",
        "torch.autograd.backward(kept.left, gradient if gradient is None else gradient * 0.5)",
        DEEP,
        PP,
        r"layers\.2(\.[\w.]+)?'s output \(backward\)",
    ),
    Fault(
        "both tables of a tie keep their own gradients",
        P + "run.py",
        "stack.enter_context(self._ties.summing())",
        "pass",
        DEEP_TIED,
        PP,
        rf"{GRADIENT}(embedding|head)\.weight",
    ),
    Fault(
        "a weight's gradient that was put off is forgotten",
        P + "run.py",
        "            self._deferred[step.stage].do(step.microbatch)\n",
        "            if step.microbatch:\n                self._deferred[step.stage].do(step.microbatch)\n",
        DEEP,
        PP,
        rf"{GRADIENT}layers\.\d\.\w+\.\w+\.weight",
        (("pipeline_schedule", "zbv_zero_bubble"),),
    ),
    Fault(
        "activations travel rounded to bfloat16",
        P + "run.py",
        "            sent = kept.left if is_activation else",
        "            sent = kept.left.to(torch.bfloat16).to(kept.left.dtype) if is_activation else",
        DEEP,
        PP,
        r"output of layers\.3\.attention_norm \(forward\)",
    ),
    Fault(
        "the last stage is not told of documents",
        P + "run.py",
        "left = self._objective(lambda: part.module(**self._given(part, piece))",
        "left = self._objective(lambda: part.module(**{k: v for k, v in self._given(part, piece).items() if k !="
        " 'document_ids'})",
        DEEP,
        PP,
        r"output of layers\.3\.attention(\.core)? \(forward\)",
    ),
    Fault(
        "gradients of a stage stay unreduced over its data ranks",
        P + "run.py",
        "                fully_sharded.reduce_gradients(part.module)\n",
        "                part.stage or fully_sharded.reduce_gradients(part.module)\n",
        DEEP,
        PP_FSDP,
        rf"{GRADIENT}(layers\.[23]\.\w+(\.\w+)?|norm|head)\.weight",
    ),
    Fault(
        "the norm is over a stage's own gradients",
        "distributed/optimizer/grad_clip.py",
        "    if not over:\n        return norm\n",
        "    return norm\n",
        DEEP,
        PP,
        NORM,
    ),
]
EXPERTS = [
    Fault(
        "experts' gradients are halved",
        "distributed/experts.py",
        'reduction == "mean" else 1.0\n',
        'reduction == "mean" else 0.5\n',
        ROUTED,
        EP,
        rf"{GRADIENT}layers\.\d\.feed_forward\.experts\.w_\w+",
    ),
    Fault(
        "what experts made comes back in another order",
        "distributed/experts.py",
        "index_copy(0, order, made)",
        "index_copy(0, order.flip(0), made)",
        ROUTED,
        EP,
        r"output of layers\.1\.feed_forward(\.experts)? \(forward\)",
    ),
    Fault(
        "routers get no gradient from their weights",
        "distributed/experts.py",
        "(made * weights.unsqueeze(-1))",
        "(made * weights.unsqueeze(-1).detach())",
        ROUTED,
        EP,
        rf"{GRADIENT}layers\.\d\.feed_forward\.router\.weight|feed_forward\.router's output \(backward\)"
        r"|layers\.\d\.feed_forward_norm's output \(backward\)",
    ),
    Fault(
        "rows that arrive are taken for another expert's",
        "distributed/experts.py",
        "torch.arange(own, device=rows.device).repeat(ranks)",
        "torch.arange(own, device=rows.device).flip(0).repeat(ranks)",
        ROUTED,
        EP,
        r"output of layers\.1\.feed_forward(\.experts)? \(forward\)",
    ),
    Fault(
        "gradients on their way back from experts are halved",
        "distributed/experts.py",
        "journey.begin(gradient, receives, sends)",
        "journey.begin(gradient * 0.5, receives, sends)",
        ROUTED,
        EP,
        rf"layers\.\d\.feed_forward_norm's output \(backward\)|{GRADIENT}layers\.\d\.feed_forward\.experts",
    ),
    Fault(
        "the head of a token's experts counts for all of them",
        "distributed/experts.py",
        "given = _exchange(rows[order // k], sends,",
        "given = _exchange(rows[order // k * 0 + order[:1] // k], sends,",
        ROUTED,
        EP,
        r"output of layers\.1\.feed_forward(\.experts)? \(forward\)",
    ),
]
DATA = [
    Fault(
        "replicas' gradients are halved",
        "distributed/data/replicated.py",
        "then(lambda _: summed)",
        "then(lambda _: summed / dist.get_world_size(buckets.group))",
        PLAIN,
        DDP,
        GRADIENT,
    ),
    Fault(
        "what was reduced before is reduced again with the next microbatch",
        "distributed/data/replicated.py",
        "        and dist.get_rank(wrapped.process_group) > 0\n",
        "        and False\n",
        PLAIN,
        DDP,
        GRADIENT,
        (("sync_grad_accum", True),),
        microbatch_rows=1,
    ),
    Fault(
        "FSDP divides a sum by its ranks",
        "distributed/data/fully_sharded.py",
        "            module.set_force_sum_reduction_for_comms(True)\n"
        "            module.set_gradient_divide_factor(1.0)\n",
        "            pass\n",
        PLAIN,
        FSDP,
        GRADIENT,
    ),
    Fault(
        "the hybrid mesh is its sharded half",
        "distributed/data/fully_sharded.py",
        "shards if replicas is None else",
        "shards if True else",
        PLAIN,
        HSDP,
        GRADIENT,
    ),
    Fault(
        "the last microbatch's gradients are the ones that do not travel",
        "distributed/data/fully_sharded.py",
        "[is_last if each else None for each in asked]",
        "[is_last != (number == 2) if each else None for number, each in enumerate(asked)]",
        PLAIN,
        FSDP,
        GRADIENT,
        microbatch_rows=2,
    ),
    Fault(
        "a mask of the loss is not looked at",
        "distributed/step/batch.py",
        'return batch["labels"] if mask is None else ',
        'return batch["labels"] if True else ',
        PLAIN,
        FSDP,
        LOSS,
    ),
    Fault(
        "a last short microbatch is left out",
        "distributed/step/batch.py",
        "for start in range(0, total, rows)]",
        "for start in range(0, total - rows + 1, rows)]",
        PLAIN,
        FSDP,
        r"output of embedding \(forward\)",
        microbatch_rows=3,
    ),
    Fault(
        "the norm is over a rank's own shards",
        "distributed/optimizer/grad_clip.py",
        "            squares[groups] = _summed(squares[groups], group)\n",
        "            pass\n",
        PLAIN,
        FSDP,
        NORM,
    ),
    Fault(
        "copies of key heads count twice in the norm",
        "distributed/optimizer/grad_clip.py",
        ".square() / copies\n",
        ".square()\n",
        FEW_HEADS,
        TP,
        NORM,
    ),
    Fault(
        "frozen parameters are trained",
        "distributed/order.py",
        "clean(name) not in frozen)",
        "True)",
        PLAIN,
        FSDP,
        r"embedding\.weight",
        (("freeze", ("embedding",)),),
    ),
    Fault(
        "one rank draws its shares by another seed",
        "distributed/weights/constructed.py",
        "draw_rows(piece.local, piece.offset, tuple(tensor.shape), draw, seed, name, draw_on)",
        "draw_rows(piece.local, piece.offset, tuple(tensor.shape), draw, seed"
        ' + int(name == "head.weight" and torch.distributed.is_initialized()'
        " and torch.distributed.get_rank()), name, draw_on)",
        PLAIN,
        FSDP,
        r"initial (weight|value of the parameter) head\.weight",
    ),
    Fault(
        "what is recomputed is computed without documents",
        "distributed/recompute/recompute.py",
        "region = forward\n",
        "region = (lambda *a, **k: forward(*a[:3], torch.ones_like(a[3]).tril(), *a[4:])"
        " if torch._C._current_graph_task_id() != -1 else forward(*a, **k))\n",
        PLAIN,
        FSDP,
        r"what the backward recomputes of layers\.\d\.attention(\.core)?",
        (("activation_checkpointing", "full"),),
    ),
]
FAULTS = [*TENSOR, *PIPELINE, *EXPERTS, *DATA]

SOUND = [
    (model, layout, techniques)
    for model, layouts in ((PLAIN, (DDP, FSDP, HSDP)), (CUT, (TP, TP_FSDP)), (DEEP, (PP, PP_FSDP)), (ROUTED, (EP,)))
    for layout in layouts
    for techniques in ({}, {"activation_checkpointing": "full"}, {"loss_chunks": 3}, {"freeze": ("embedding",)})
]
"""Model, layout and techniques: none of them may be called different."""
