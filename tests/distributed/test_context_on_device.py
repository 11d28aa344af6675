"""Cut rows on an accelerator: equal to one process with plain torch, and no decision waits for the device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import families, pretend_gpu
from support.mixing import VOCABULARY, Model, causal
from test_context_doors import fsdp2
from torch import Tensor, nn

from meshwright import Layout, parallelize
from meshwright.core.devices import current_device, to_device
from meshwright.core.errors import UnsupportedError
from meshwright.core.losses import IGNORED
from meshwright.core.names import clean
from meshwright.distributed import DistributedConfig, context_parallel_rows, init_distributed
from meshwright.distributed.context import rows as reaches
from meshwright.distributed.context.rows import PLACES, Reaches, cut_batch, cut_rows, kept_on, of_whole_rows, on_host
from meshwright.distributed.exchange import on_threads
from meshwright.distributed.process.agree import Verdicts
from meshwright.distributed.process.world import get_world_info
from meshwright.distributed.weights.shards import whole_on_first
from meshwright.introspection.mixing import masks
from meshwright.introspection.mixing.masks import dense, within
from meshwright.introspection.signature import Signature, logits_of
from meshwright.models.decoder import Decoder
from meshwright.models.decoder_config import DecoderConfig

LENGTH, ROWS, RATE = 13, 2, 0.1
CPU = torch.device("cpu")
Batch = dict[str, Tensor]


class Shift(nn.Module):
    """Mixes tokens by a way of its own: half of the features are the token's before."""

    def forward(self, x: Tensor) -> Tensor:
        old = F.pad(x, (0, 0, 1, 0))[:, :-1]
        half = x.shape[-1] // 2
        return torch.cat((x[..., :half], old[..., half:]), dim=-1)


def decoder() -> nn.Module:
    return Decoder(DecoderConfig(VOCABULARY, 16, 1, n_heads=4, n_kv_heads=4, hidden_dim=12, max_seq_len=16))


def windows() -> nn.Module:
    sizes = {"sliding_window": 4, "vocab_size": VOCABULARY, "num_hidden_layers": 1}
    return families.on_cpu(families.config_of("mistral", use_cache=False, **sizes))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "decoder": decoder,
    "windows": windows,
    "mixer": lambda: Model(causal, Shift()),
}


def batch_of(kind: str, model: str) -> Batch:
    """Make a batch of one kind, with other documents in each row."""
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens, "labels": tokens.roll(-1, 1)}
    sizes = ([4, 9], [7, 6])
    if kind == "packed":
        ids = torch.stack([torch.repeat_interleave(torch.arange(2), torch.tensor(of_row)) for of_row in sizes])
        positions = torch.stack([torch.cat([torch.arange(size) for size in of_row]) for of_row in sizes])
        batch |= {"positions": positions} if model == "windows" else {"positions": positions, "document_ids": ids}
    if kind == "again":  # the first document goes on behind the second
        batch["document_ids"] = torch.tensor([0, 1, 0]).repeat_interleave(torch.tensor([4, 5, 4])).expand(ROWS, -1)
    if kind == "padded":
        mask = torch.ones_like(tokens)
        mask[1, -4:] = 0
        batch |= {"attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, IGNORED)}
    return {key: value.contiguous() for key, value in batch.items()}


def own_part(batch: Batch) -> Batch:
    """Bring every other token, with its place."""
    rank, _, ranks = get_world_info()
    whole = batch | {PLACES: torch.arange(LENGTH).expand(ROWS, -1)}
    return {key: value[:, rank::ranks].contiguous() for key, value in whole.items()}


@dataclass
class Case:
    """A model and a method.

    Attributes:
        kinds: of batches, one step each.
    """

    model: str = "decoder"
    method: str = "auto"
    kinds: tuple[str, ...] = ("plain", "packed")
    ranks: int = 2
    techniques: dict[str, Any] = field(default_factory=dict)
    bound: float = 1e-10


CASES = {
    "auto": Case(kinds=("plain", "packed", "again"), techniques={"activation_checkpointing": "full"}),
    "all_gather": Case(method="all_gather", kinds=("plain", "packed", "parts")),
    "ring, recomputed": Case(method="ring", techniques={"activation_checkpointing": "selective_op"}),
    "ulysses": Case(method="ulysses"),
    "ulysses_ring": Case(method="ulysses_ring", ranks=4),
    "halo": Case(method="halo"),
    "windows": Case("windows", kinds=("plain", "packed", "padded"), bound=1e-6),
    "windows, ring": Case("windows", "ring", ("packed", "padded"), bound=1e-6),
    "mixer": Case("mixer", kinds=("plain",)),
}


@dataclass
class Found:
    """What one rank found.

    Attributes:
        error: largest relative error of a parameter after all steps, on rank 0.
        everywhere: lines where the host waited for the device.
        reads: those of them inside context parallelism.
    """

    error: float
    everywhere: list[str]
    reads: list[str]
    faults: list[str]


def as_one_process(model: nn.Module, batches: list[Batch]) -> dict[str, Tensor]:
    for batch in batches:
        logits = logits_of(model(**Signature.of(model).inputs(batch, CPU)))
        F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= RATE * parameter.grad
                parameter.grad = None
    return {clean(name): parameter.detach() for name, parameter in model.named_parameters()}


def trained(case: Case, broken: str = "") -> Found:
    """Take a step on a batch of each kind; every one is watched from the first on."""
    torch.manual_seed(0)
    model = MODELS[case.model]().double()
    batches = [batch_of(kind, case.model) for kind in case.kinds]
    with pytest.MonkeyPatch.context() as patch:
        techniques = {"precision": {"master": "float64"}, "context_parallel_method": case.method} | case.techniques
        laid_out = parallelize(copy.deepcopy(model), Layout(dp_shard=1, cp=case.ranks), techniques=techniques)
        assert laid_out.device.type == pretend_gpu.DEVICE_TYPE
        MUTANTS.get(broken, lambda patch: None)(patch)
        optimizer = torch.optim.SGD(laid_out.parameters(), lr=RATE)
        with pretend_gpu.watching() as seen:
            for batch, kind in zip(batches, case.kinds, strict=True):
                laid_out.forward_backward(own_part(batch) if kind == "parts" else batch)
                laid_out.optimizer_step(optimizer)
        found = whole_on_first(dict(laid_out.named_parameters()))
    error = 0.0
    if get_world_info()[0] == 0:
        expected = as_one_process(model, batches)
        assert found.keys() == expected.keys()
        error = max(float((found[name].cpu() - expected[name]).norm() / expected[name].norm()) for name in expected)
    reads = list(map(str, seen.host_reads))
    return Found(error, reads, [read for read in reads if "distributed/context/" in read], seen.faults())


@pytest.mark.first("ulysses")
@pytest.mark.parametrize("name", CASES)
def test_cut_rows_on_a_device_are_equal_and_nothing_waits(on_device, name):
    case = CASES[name]
    found = on_device(case.ranks, trained, case)
    assert found[0].error < case.bound
    assert [rank.reads for rank in found] == [[]] * case.ranks
    assert [rank.faults for rank in found] == [[]] * case.ranks


# --- a read put back is found, with its line


def read_of_bounds(patch: pytest.MonkeyPatch) -> None:
    from meshwright.distributed.context import kernels

    correct = kernels.kept_on

    def reading(values: Tensor, device: torch.device) -> Tensor:
        copied = correct(values, device)
        copied.max().item()
        return copied

    patch.setattr(kernels, "kept_on", reading)


def places_on_the_device(patch: pytest.MonkeyPatch) -> None:
    from meshwright.distributed.context import rows

    correct = rows.Numbers.of.__func__
    patch.setattr(rows.Numbers, "of", classmethod(lambda cls, index: correct(cls, index.to(pretend_gpu.DEVICE_TYPE))))


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "an item in the kernel": read_of_bounds,
    "places on the device": places_on_the_device,
}


@pytest.mark.parametrize(
    ("broken", "line"),
    [("an item in the kernel", "copied.max().item()"), ("places on the device", "diff() != 1).nonzero()")],
)
def test_a_read_is_found_with_its_line(on_device, broken, line):
    found = on_device(2, trained, Case(method="all_gather", kinds=("plain",)), broken)
    assert all(any(line in read for read in rank.everywhere) for rank in found)


# --- checks that a device computes


def checked(holds: bool) -> list[str]:
    """The words that are raised where a check is made, and once it's known."""
    verdicts, said = Verdicts(), []
    for ask in (
        lambda: verdicts.expect(torch.tensor(True, device=pretend_gpu.DEVICE_TYPE), ValueError("another mask")),
        lambda: verdicts.expect(torch.tensor(holds, device=pretend_gpu.DEVICE_TYPE), ValueError("another mask")),
        lambda: verdicts.expect(torch.tensor(True, device=pretend_gpu.DEVICE_TYPE), ValueError("another mask")),
        verdicts.raise_known,
        verdicts.raise_known,
    ):
        try:
            ask()
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


def test_a_check_that_fails_on_a_device_is_raised_once_it_is_known(on_device):
    assert on_device(1, checked, True) == [[""] * 5]
    assert on_device(1, checked, False) == [["", "", "", "another mask", ""]]


def documents_held() -> tuple[list[str], list[str]]:
    """Ask a mask that closes over the device's documents; return reads, and the words of a check that must fail."""
    whole = batch_of("packed", "decoder")
    rows, verdicts = cut_rows(whole, 2, 0, apart="ids"), Verdicts()
    held = rows.take(whole["document_ids"]).to(pretend_gpu.DEVICE_TYPE)

    def allowed(row: Any, head: Any, query: Any, key: Any) -> Tensor:
        return (key <= query) & (held[row, query] == held[row, key])

    expected = dense(within(masks.causal, whole["document_ids"]), rows.own, LENGTH, ROWS)
    with pretend_gpu.watching() as seen:
        mask = of_whole_rows(allowed, rows, verdicts.expect)
        (reach,) = on_threads(1, lambda group: Reaches(group).of(mask, rows, ROWS, held.device))
        made = reaches.on_device(mask, rows, held.device).dense(kept_on(rows.own, held.device), LENGTH, ROWS)
    mine = reach.take(rows.own)
    keys = torch.arange(LENGTH)
    assert torch.equal(((keys >= mine.lower[..., None]) & (keys < mine.upper[..., None]))[:, None], expected)
    assert torch.equal(made.cpu(), expected)
    verdicts.raise_known()
    held += 1
    of_whole_rows(lambda *places: allowed(*places), rows, verdicts.expect)
    try:
        verdicts.raise_known()
    except UnsupportedError as error:
        return list(map(str, seen.host_reads)), [str(error)]
    return list(map(str, seen.host_reads)), []


def test_documents_that_a_mask_holds_on_a_device_are_taken_from_the_host(on_device):
    ((reads, (said,)),) = on_device(1, documents_held)
    assert reads == [] and "the mask of flex_attention closes over a tensor of [2, 7]" in said


def read_of(device: str) -> list[str]:
    whole = {key: value.to(device) for key, value in batch_of("packed", "decoder").items()}
    with pretend_gpu.watching() as seen:
        values = on_host(whole | {"attention_mask": torch.ones(ROWS, LENGTH, device=device).bool()})
        rows = cut_rows(values, 2, 0, apart="ids")
        cut_batch(whole, rows)
    expected = batch_of("packed", "decoder")
    assert all(torch.equal(values[key], expected[key]) for key in ("tokens", "positions", "document_ids"))
    assert values["attention_mask"].dtype is torch.bool and values["attention_mask"].all()
    return list(map(str, seen.host_reads))


def test_a_batch_on_the_device_is_read_once(on_device):
    assert on_device(1, read_of, "cpu") == [[]]
    ((read,),) = on_device(1, read_of, pretend_gpu.DEVICE_TYPE)
    assert "torch.cat(flat).cpu()" in read


def loop_of_ones_own(device: str) -> list[list[str]]:
    """Cut rows in a loop of one's own, forward and backward; return where two steps waited for the device."""
    mesh = init_distributed(DistributedConfig(dp_shard=1, cp=2))
    model, here, found = fsdp2(decoder(), mesh), current_device(pretend_gpu.DEVICE_TYPE), []
    for kind in ("plain", "packed"):
        given = {key: value.to(device) for key, value in batch_of(kind, "decoder").items() if key != "labels"}
        with pretend_gpu.watching() as seen, context_parallel_rows(model, given) as own:
            model(**{key: to_device(value, here) for key, value in own.items()}).sum().backward()
        assert not seen.faults()
        found.append(list(map(str, seen.host_reads)))
    return found


@pytest.mark.all
def test_a_loop_of_ones_own_reads_a_batch_on_the_device_once(on_device):
    for found in on_device(2, loop_of_ones_own, "cpu"):
        assert [len(reads) for reads in found] == [0, 0], found
    for found in on_device(2, loop_of_ones_own, pretend_gpu.DEVICE_TYPE):
        assert [len(reads) for reads in found] == [1, 1], found
