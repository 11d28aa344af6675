"""Pairs of answers on every layout against each answer alone, in one process with plain torch: losses and gradients of
two steps, the second away from the reference.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.oracle import build, relative_errors
from support.problems import DDP2, FSDP2, ONE, Problem, Way, share
from support.ranks import ranks
from support.train import gradients, lay_out
from torch.distributed.tensor import DTensor

from meshwright import ConfigError, Layout, Loss, UnsupportedError
from meshwright.core import losses
from meshwright.core.losses import PreferenceLoss
from meshwright.data.corpus import Pairs
from meshwright.distributed.exchange import linear_map
from meshwright.distributed.loss import preference
from meshwright.distributed.process.world import get_world_info
from meshwright.distributed.step import batch as step_batch
from meshwright.distributed.step.opening import StepOpening
from meshwright.distributed.tensor import loss as tensor_loss
from meshwright.models.decoder_config import DecoderConfig, MoEConfig

EXACT = 1e-10
SEQ, RATE, BETA, SMOOTHING = 12, 0.5, 0.3, 0.1
DECODER = DecoderConfig(257, 16, 2, n_heads=4, n_kv_heads=2, hidden_dim=20, max_seq_len=16)
DENSE, ROUTED = Problem(DECODER), Problem(replace(DECODER, moe=MoEConfig(n_experts=4, top_k=2, hidden_dim=6)))
WAYS = {
    "one": Way(ONE),
    "ddp 2": Way(DDP2),
    "fsdp 2, microbatches": Way(FSDP2, microbatches="rows"),
    "fsdp 2 x tp 2": Way(Layout(dp_shard=2, tp=2)),
    "pp 2": Way(Layout(dp_shard=1, pp=2), microbatches="rows"),
    "pp 2, rows by default": Way(Layout(dp_shard=1, pp=2)),
    "pp 2 x tp 2": Way(Layout(dp_shard=1, pp=2, tp=2), microbatches="list"),
    "ep 2": Way(Layout(dp_shard=2, ep=2)),
    "cp 2": Way(Layout(dp_shard=1, cp=2)),
    "fsdp 2 x cp 2": Way(Layout(dp_shard=2, cp=2)),
    "cp 2 x tp 2": Way(Layout(dp_shard=1, cp=2, tp=2)),
    "pp 2 x cp 2": Way(Layout(dp_shard=1, pp=2, cp=2), microbatches="list"),
}


def pairs() -> Pairs:
    """Eight pairs of answers of 1 to 6 tokens to prompts of 1 to 5 tokens."""
    draw = np.random.default_rng(3)
    documents, learnt = [], []
    for _ in range(8):
        prompt = draw.integers(0, 256, size=draw.integers(1, 6))
        for size in draw.integers(1, 7, size=2):
            documents.append(np.concatenate([prompt, draw.integers(0, 256, size=size)]))
            learnt.append(np.arange(len(documents[-1])) >= len(prompt))
    offsets = np.cumsum([0, *map(len, documents)])
    return Pairs("training", np.concatenate(documents), offsets, np.concatenate(learnt).astype(np.uint8), padding=256)


def rows() -> dict[str, torch.Tensor]:
    """All of them; the third pair has no label, and counts for nothing."""
    batch = {key: torch.from_numpy(value) for key, value in pairs().rows(np.arange(16), SEQ).items()}
    batch["labels"][4:6] = -100
    return batch


def one_by_one(problem: Problem) -> tuple[list[float], dict[str, torch.Tensor], list[dict[str, float]]]:
    """Losses of two steps, gradients and figures of the second, and those of ``turned``: each answer by itself."""
    model, split = build(problem).train(), pairs()
    reference = copy.deepcopy(model).requires_grad_(False)

    def log_prob(of, document: int) -> torch.Tensor:
        begin, end = split.offsets[document], split.offsets[document + 1]
        ids = torch.from_numpy(np.asarray(split.tokens[begin:end]))
        learnt = torch.from_numpy(split.is_learnt[begin + 1 : end].astype(bool))
        chosen = of(ids[None, :-1])[0].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        return chosen[learnt].sum()

    found = []
    for step in range(2):
        model.zero_grad()
        terms, rewards = [], []
        for pair in (0, 1, 3, 4, 5, 6, 7):
            better, worse = (log_prob(model, 2 * pair + n) - log_prob(reference, 2 * pair + n) for n in (0, 1))
            margin = BETA * (better - worse)
            rewards.append((pair, (BETA * better.item(), BETA * worse.item())))
            terms.append(-(1 - SMOOTHING) * F.logsigmoid(margin) - SMOOTHING * F.logsigmoid(-margin))
        loss = torch.stack(terms).mean()
        loss.backward()
        found.append(float(loss))
        if step == 0:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= RATE * parameter.grad
    evens = [reward[::-1] if pair % 2 == 0 else reward for pair, reward in rewards]
    told = [figures([reward for _, reward in rewards]), figures(evens)]
    return found, {name: p.grad for name, p in model.named_parameters()}, told


def figures(rewards: list[tuple[float, float]]) -> dict[str, float]:
    chosen, rejected = (sum(column) / 7 for column in zip(*rewards, strict=True))
    found = {"rewards/chosen": chosen, "rewards/rejected": rejected, "rewards/margins": chosen - rejected}
    return found | {"rewards/accuracies": sum(better > worse for better, worse in rewards) / 7}


def turned(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each second pair the wrong way round, so that not every chosen answer is the likelier one."""
    order = torch.arange(len(batch["tokens"])).view(-1, 4)[:, [1, 0, 2, 3]].flatten()
    return {key: value[order] for key, value in batch.items()}


def steps(problem: Problem, way: Way, mutant: str = ""):
    """The losses of two steps, and the second's gradients (of all ranks on rank 0, or this rank's own) and figures."""
    with pytest.MonkeyPatch.context() as patch:
        if mutant:
            MUTANTS[mutant](patch)
        return two_steps(problem, way)


def two_steps(problem: Problem, way: Way):
    model = lay_out(problem, way, loss_fn=PreferenceLoss(BETA, SMOOTHING))
    ranks = way.layout.dp_replicate * way.layout.dp_shard
    batch = share(rows(), get_world_info()[0] // (way.layout.tp * way.layout.cp) % ranks, ranks)
    batch["reference_log_probs"] = model.row_log_probs(batch)
    brought = batch
    if way.microbatches == "list":
        brought = [{key: value[a:b] for key, value in batch.items()} for a, b in ((0, 2), (2, 8), (8, 16))]
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    found = [float(model.forward_backward(brought))]
    model.optimizer_step(optimizer)
    second = model.forward_backward(brought)
    found.append(float(second))
    own = {name: p.grad for name, p in model.named_parameters() if p.grad is not None and not isinstance(p, DTensor)}
    told = [second, model.evaluate(turned(batch))]
    result = found, own | gradients(model), [{k: float(v) for k, v in loss.figures.items()} for loss in told]
    assert float(model.evaluate(brought)) == pytest.approx(found[1], rel=EXACT)
    return result


def everything(results) -> dict[str, torch.Tensor]:
    return {name: value for _, found, _ in results for name, value in found.items()}


@pytest.mark.parametrize("name", WAYS)
def test_pairs_teach_what_each_answer_alone_teaches(spmd, name):
    way = WAYS[name]
    problem = ROUTED if way.layout.ep > 1 else DENSE
    expected, gradient, told = spmd(1, one_by_one, problem)[0]
    results = spmd(way.layout.world, steps, problem, way)
    assert all(found == results[0][0] and ours == results[0][2] for found, _, ours in results)
    for ours, theirs in zip(results[0][2], told, strict=True):
        assert ours == pytest.approx(theirs, rel=EXACT)
    assert 0 < told[1]["rewards/accuracies"] < 1 and told[0]["rewards/margins"] > 0
    assert results[0][0] == pytest.approx(expected, rel=EXACT) and expected[0] == pytest.approx(np.log(2), rel=EXACT)
    errors = relative_errors(everything(results), gradient)
    assert max(errors.values()) <= EXACT, errors


def called(patch: pytest.MonkeyPatch, change) -> None:
    """Change what the loss of pairs is called with: (log_probs, reference)."""
    right = PreferenceLoss.__call__
    patch.setattr(
        PreferenceLoss, "__call__", lambda self, mine, reference, labels: right(self, *change(mine, reference), labels)
    )


def mean_of_a_row(patch: pytest.MonkeyPatch) -> None:
    right = losses.row_log_probs
    mean = lambda logits, labels: right(logits, labels) / (labels != -100).sum(1).clamp(min=1)  # noqa: E731
    patch.setattr(preference, "row_log_probs", mean)


def same_slope_for_all_tokens(patch: pytest.MonkeyPatch) -> None:
    right = tensor_loss._CrossEntropy.backward
    alike = staticmethod(lambda ctx, slope: right(ctx, slope.mean() if slope.dim() else slope))
    patch.setattr(tensor_loss._CrossEntropy, "backward", alike)


def flipped(pairs: torch.Tensor) -> torch.Tensor:
    return pairs.view(-1, 2).flip(1).flatten()


MUTANTS = {
    "swapped": lambda patch: called(patch, lambda mine, reference: (flipped(mine), flipped(reference))),
    "without_reference": lambda patch: called(patch, lambda mine, reference: (mine, reference * 0)),
    "reference_of_now": lambda patch: called(patch, lambda mine, reference: (mine, mine.detach())),
    "mean_of_tokens": lambda patch: patch.setattr(preference, "count", step_batch.count),
    "blank_pairs_count": lambda patch: patch.setattr(
        preference, "have_labels", lambda labels: torch.ones(len(labels) // 2).bool()
    ),
    "mean_of_a_row": mean_of_a_row,
    "same_slope_for_all_tokens": same_slope_for_all_tokens,
    # each rank of cut rows takes the mean's gradient for its own
    "gradient_of_own_tokens": lambda patch: patch.setattr(
        preference, "linear_map", lambda x, forward, transposed: linear_map(x, forward, lambda gradient: gradient)
    ),
    # answers are compared by the tokens of one rank
    "answers_of_own_tokens": lambda patch: patch.setattr(
        preference, "over_whole_rows", lambda log_probs, labels, group: (log_probs, labels)
    ),
    # each rank of cut rows counts the pairs of which it has a label
    "pairs_of_every_rank": lambda patch: patch.setattr(
        StepOpening, "_pairs", lambda self, pieces, is_part: preference.count(pieces)
    ),
}
OF_CUT_ROWS = dict.fromkeys(("gradient_of_own_tokens", "answers_of_own_tokens", "pairs_of_every_rank"), "cp 2")


@pytest.mark.kills("pairs", "mutant")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_mutant_is_caught(spmd, mutant):
    way = WAYS[{"same_slope_for_all_tokens": "fsdp 2 x tp 2", **OF_CUT_ROWS}.get(mutant, "one")]
    _, gradient, _ = spmd(1, one_by_one, DENSE)[0]
    results = spmd(way.layout.world, steps, DENSE, way, mutant)
    assert max(relative_errors(everything(results), gradient).values()) > 1e6 * EXACT


def bring(changed: str, value: torch.Tensor | int | None) -> None:
    """A step of pairs with one value of the batch changed, or with its first rows alone."""
    model = lay_out(DENSE, Way(ONE), loss_fn=PreferenceLoss())
    batch = {**rows(), "reference_log_probs": torch.zeros(16)}
    if changed == "rows":
        batch = {key: tensor[:value] for key, tensor in batch.items()}
    elif value is None:
        del batch[changed]
    else:
        batch[changed] = value
    model.forward_backward(batch)


@pytest.mark.first("reference_log_probs-value2-a finite log-probability for each of 16 rows")
@pytest.mark.parametrize(
    ("changed", "value", "words"),
    [
        ("reference_log_probs", None, r"no 'reference_log_probs' \(16,\), .*row_log_probs\(batch\) gave for them"),
        ("reference_log_probs", torch.zeros(8), r"has shape \(8,\) .* a finite log-probability for each of 16 rows"),
        ("reference_log_probs", torch.full((16,), torch.nan), r"a finite log-probability for each of 16 rows"),
        ("rows", 5, r"compares each two rows, and a microbatch has 5: bring whole pairs"),
    ],
)
def test_a_batch_that_holds_no_pairs_is_refused(changed, value, words):
    with pytest.raises(ConfigError, match=words):
        bring(changed, value)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ("places", "PreferenceLoss counts pairs of whole rows: bring these"),
        ("tokens", "brought different rows"),
        ("log_probs", "brought different rows"),
    ],
)
@ranks(2)
def test_ranks_of_cut_rows_bring_the_same_whole_rows(changed, words):
    model = lay_out(DENSE, Way(Layout(dp_shard=1, cp=2)), loss_fn=PreferenceLoss())
    batch = {**rows(), "reference_log_probs": torch.zeros(16)}
    if changed == "places":
        batch["places"] = torch.arange(SEQ).expand(16, SEQ).contiguous()
    elif get_world_info()[0]:
        batch["tokens"] = batch["tokens"].flip(1)
    with pytest.raises(ConfigError) as caught:
        (model.row_log_probs if changed == "log_probs" else model.forward_backward)(batch)
    assert words in str(caught.value)


def refused(layout: Layout, **techniques) -> str:
    with pytest.raises(UnsupportedError) as caught:
        lay_out(DENSE, Way(layout, tuple(techniques.items())), loss_fn=PreferenceLoss())
    return str(caught.value)


def test_values_and_layouts_that_cannot_be_are_refused(spmd):
    for wrong in ({"beta": 0.0}, {"beta": float("nan")}, {"label_smoothing": 0.5}, {"label_smoothing": -0.1}):
        with pytest.raises(ConfigError, match=r"beta must be above 0, and label_smoothing 0 or more and below 0.5"):
            PreferenceLoss(**wrong)
    assert "loss_chunks = 4 computes a loss with its gradients in chunks" in refused(ONE, loss_chunks=4)
    beside = {"mean": Loss(F.cross_entropy, reduction="mean"), "pairs": PreferenceLoss()}
    with pytest.raises(ConfigError, match=r"loss_fn\['pairs'\] is a PreferenceLoss, .*: give it alone"):
        lay_out(DENSE, Way(ONE), loss_fn=beside)
    with pytest.raises(ConfigError, match=r"batch\['reference_log_probs'\] is not an argument of the model's forward"):
        lay_out(DENSE, Way(ONE)).forward_backward({**rows(), "reference_log_probs": torch.zeros(16)})
