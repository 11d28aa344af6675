"""Turn a published row into a job of the forecast, or say by which rule it is left out."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal

from meshwright.planning.layout import Layout
from meshwright.simulation.cards import AttentionSpeed, Device, Machines, device, link, paired, sheets
from meshwright.simulation.job import Architecture, BlockShape, Execution, Job, MixtureRun, blocks_of_size
from meshwright.simulation.step_memory import SavedBytes, StepMemory, rank_memory, step_memory

from .recipes import with_recipe
from .shapes import decoder_block, public_shape

HERE = Path(__file__).parent
Row = Mapping[str, str]
CARDS = (
    *("GB300", "GB200", "B300", "B200", "H200", "H100", "H800", "A100", "A800", "V100", "L40S", "A6000", "A10G", "L4"),
    *("5090", "4090", "3090", "MI300X"),
)


COUNTED = "korthikanti"
"""The source whose bytes are counted, not measured: the figure of arXiv 2205.05198, with Megatron-LM of 2022."""


def memory_of(row: Row, job: Job) -> StepMemory:
    """Forecast the bytes of the rank whose memory a row states; of the fullest where it names none."""
    said = f"{row['mem_unit']} {row['other']}"
    return rank_memory(job, 0, SavedBytes(job)) if "logged by the first stage" in said else step_memory(job)


def same_quantity(row: Row, foreseen: StepMemory) -> tuple[float, float]:
    """Return the bytes of a GPU as foreseen and as measured, of what the row measured.

    nvidia-smi counts everything; the reserve of the allocator leaves out the driver's memory, and what is allocated the
    allocator's fragments too.
    """
    unit, size = row["mem_unit"].lower(), number(row["mem_per_gpu"])
    giga = 2**30 if "smi" in unit or "gib" in unit or "kempner" in row["source"].lower() else 1e9
    found = foreseen.total
    counted = COUNTED in row["source"].lower()
    if counted or re.search("peak|alloc|active|reserve", unit):
        found -= foreseen.context
    if counted or re.search("peak|alloc|active", unit):
        found -= foreseen.fragmented
    return found, size * giga


@dataclass(frozen=True)
class Excluded:
    """A row that is not forecast, by a rule that looks at no measured figure."""

    reason: str


def read_rows(path: Path) -> list[dict[str, str]]:
    """Read a file of published measurements."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def number(text: str, default: float = 0.0) -> float:
    """Read a number as printed: 7B, 1,024, 3.5; the default where there is none."""
    found = re.search(r"(\d[\d,]*\.?\d*)\s*([KMBT]?)", text or "")
    if not found:
        return default
    return float(found[1].replace(",", "")) * {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[found[2]]


def seq_len(row: Row) -> float:
    """Return the tokens of a row's sequences, which some sources state beside their table; 0 where none does."""
    text = f"{row['other']} {row['note']}".lower()
    found = re.search(r"seq(?:uence)?[- _]?len(?:gth)?\D{0,40}?(\d[\d,]{2,})", text)
    return number(row["seq"]) or (number(found[1]) if found else 0.0)


def words(row: Row) -> str:
    """Return what a row says of its run, in lower case."""
    return " ".join(row[key] for key in ("source", "task", "precision", "zero", "ac", "other", "note")).lower()


def job_of(row: Row) -> Job | Excluded:
    """Describe a row to the forecast."""
    if why := _left_out(row):
        return Excluded(why)
    architecture = _architecture(row)
    if architecture is None:
        return Excluded("the shape of the model is not stated, and its name is no public model's")
    machines = _machines(row)
    if machines is None:
        return Excluded("the kind of GPU is not among the cards")
    layout = _layout(row)
    if layout is None:
        return Excluded("the layout does not multiply to the number of GPUs")
    if "embedding whole on tp" in row["other"]:  # as if its rows were as many more
        architecture = replace(architecture, positions=architecture.vocab * (layout.tp - 1))
    data = layout.dp_replicate * layout.dp_shard
    microbatch = number(row["mbs"])
    rows = number(row["gbs_seqs"]) or microbatch * number(row["grad_accum"], 1) * data
    length = seq_len(row)
    if not (microbatch and rows and length):
        return Excluded("the batch is not stated")
    run = _with_model(row, _execution(row, layout), architecture)
    run = replace(run, cuts=_cuts(row, len(architecture.blocks), layout.pp * run.stages_per_rank))
    try:
        machines.device.speed(run.products)
    except ValueError:
        return Excluded(f"the card has no products in {run.products}")
    mixed = "Megatron-Bridge" in row["source"] and any(block.experts for block in architecture.blocks)
    if mixed:
        run = with_recipe(run, row, machines.device, microbatch)
    job = Job(architecture, layout, int(length), int(rows), microbatch, run, machines)
    stated = row["ac"] or mixed or re.search(f"torchtune|{COUNTED}", row["source"].lower())
    return job if stated else with_least_recomputation(job)


def _cuts(row: Row, blocks: int, stages: int) -> tuple[tuple[int, int], ...]:
    """Return how the software cuts a model whose blocks do not fill its stages; () for an even cut.

    The embedding counts as a block, and the loss, where these fill all stages (Megatron-LM's
    ``account_for_embedding_in_pipeline_split`` and its sister, DeepSpeed's ``type:transformer|embedding``). Of DeepSeek
    V3 and Kimi K2, Megatron-Bridge's layouts have stages of one size, and on the last one what is left.
    """
    if stages > 1 and "nanotron" in row["source"]:
        return _cuts_of_nanotron(row, blocks, stages)
    if stages == 1 or blocks % stages == 0:
        return ()
    if row["model"].startswith(("DeepSeekV3", "Kimi")):
        return blocks_of_size(blocks, stages)
    size, rest = divmod(blocks + 2, stages)
    return () if rest else tuple(pairwise((0, *(size * (stage + 1) - 1 for stage in range(stages - 1)), blocks)))


def _cuts_of_nanotron(row: Row, blocks: int, stages: int) -> tuple[tuple[int, int], ...]:
    """Return the stages of Nanotron, each up to the block with which its share of the products is exceeded.

    The head counts as a block, by its elements (``build_model``, ``get_block_compute_costs``).
    """
    hidden = number(row["hidden"])
    costs = [*[4 * hidden**2 + 3 * hidden * number(row["ffn"])] * blocks, hidden * number(row["vocab"])]
    ends, done, whole = [], 0.0, sum(costs)
    for block, cost in enumerate(costs[:-1]):
        done += cost
        if done > whole * (len(ends) + 1) / stages and len(ends) < stages - 1:
            ends.append(block + 1)
    return tuple(pairwise((0, *ends, *[blocks] * (stages - len(ends)))))


def with_least_recomputation(job: Job) -> Job:
    """Return the job with the least recomputation that fits, for a row that does not state any."""
    for mode in ("none", "modules", "full"):
        found = job.with_execution(recompute=mode)
        if step_memory(found).total <= job.machines.device.memory_bytes:
            return found
    return job


def _left_out(row: Row) -> str:
    text = " ".join((row["model"], row["other"], row["note"], row["task"])).lower()
    if re.search(r"nemotron.?(3|h)|mamba|jamba|hybrid", row["model"].lower()):
        return "blocks of state-space layers, which the forecast does not know"
    if "-dq" in text or "bnb.int8" in text:
        return "frozen weights in a quantised storage that the library does not have"
    if "unpadded" in text:
        return "the lengths of the sequences are not stated (unpadded)"
    if _contradicts_itself(row):
        return "its step time and its TFLOP/s differ by more than 1.5 times, by its own formula"
    if "packed experts" in text and number(row["tp"], 1) > 1:
        return "experts that are whole on each rank of the tensor axis, which no layout here describes"
    if not seq_len(row):
        return "the length of the sequences is not stated"
    if re.search(r"o(pt|ptimizer) offl y|par offl y|offload true|cpu offload of (param|opt)", text):
        return "state or parameters in host memory, over a link that the source does not state"
    return ""


def _contradicts_itself(row: Row) -> bool:
    """Whether a row's step time and TFLOP/s (with recomputation: 8 FLOPs per parameter and token) cannot both be."""
    seconds, params, flops = number(row["step_s"]), number(row["params"]), number(row["tflops_gpu"])
    if not (seconds and params and flops and "recomputation" in row["tflops_kind"]):
        return False
    tokens = number(row["gbs_seqs"]) * number(row["seq"])
    return not 1 / 1.5 < flops * 1e12 * seconds * number(row["gpus"]) / (8 * params * tokens) < 1.5


def _architecture(row: Row) -> Architecture | None:
    layers, hidden = int(number(row["layers"])), int(number(row["hidden"]))
    params, known = number(row["params"]), public_shape(row["model"])
    if not hidden and (found := re.search(r"hidden (\d+)", row["note"])):
        hidden = int(found[1])
    if not layers and hidden and params and known is None:
        layers = round((params - 51200 * hidden) / (12 * hidden**2))
    if not (layers and hidden):
        return known
    if known is not None and (any(block.experts for block in known.blocks) or len(known.blocks) == layers):
        return known
    heads = int(number(row["heads"])) or _heads(hidden)
    kv_heads = int(number(row["kv_heads"])) or heads
    ffn = round(8 / 3 * hidden / 256 + 0.499) * 256 if "8/3" in row["ffn"] else int(number(row["ffn"]))
    ffn = ffn or 4 * hidden
    vocab = (
        int(number(row["vocab"]))
        or (known.vocab if known else 0)
        or (250880 if "balanced with emb" in row["precision"] else 51200)
    )
    old = _is_old_gpt(row) or COUNTED in row["source"].lower()
    found = []
    for gated in (False, True):
        block = decoder_block(hidden, heads, kv_heads, ffn, gated=gated, dropout=old)
        tied = not gated
        found.append(Architecture(row["model"], (block,) * layers, vocab, tied, 2048 if not gated else 0))
    if "swiglu" in row["other"].lower():
        return replace(found[1], tied=" tied" in row["other"])
    if params and ffn != 4 * hidden:
        return min(found, key=lambda model: abs(model.elements - params))
    return found[0] if ffn >= 4 * hidden else found[1]


def _heads(hidden: int) -> int:
    """Return the number of heads whose width is a whole number nearest to 128."""
    return min((n for n in range(1, hidden) if hidden % n == 0), key=lambda n: abs(hidden / n - 128))


def _is_old_gpt(row: Row) -> bool:
    """Whether the software is Megatron-LM's of 2021, with dropout and attention as separate kernels."""
    return "deepspeed" in f"{row['other']} {row['source']}".lower() or row["source"].startswith(
        ("BigScience", "vTrain")
    )


def _card(row: Row) -> str | None:
    text = row["system"].upper()
    for card in CARDS:
        if card in text:
            return "A100-40GB" if card == "A100" and ("40GB" in text or number(row["gpu_mem_gb"]) == 40) else card
    return "H100" if "HOPPER" in text else "A100" if "AMPERE" in text else None


POWER = 0.7
"""Power of a card's limit in watts that its products' speed grows with: steps take 10 to 15 % longer on an H100 of 600
than of 700 W (factryze.ai/scale-atlas/power/power-capping)."""


def limited_to(card: Device, watts: float, power: float) -> Device:
    """Return a card with a limit of ``watts`` in place of its own ``power``."""
    slower = (watts / power) ** POWER
    return replace(
        card,
        efficiency={name: slower * part for name, part in card.efficiency.items()},
        attention={k: AttentionSpeed(slower * s.forward, slower * s.backward) for k, s in card.attention.items()},
    )


def _machines(row: Row) -> Machines | None:
    card, text = _card(row), f"{row['system']} {row['where']} {row['other']}"
    if card is None:
        return None
    of = device(card)
    if (stated := number(row["gpu_mem_gb"]) * 2**30 * 0.985) > 1.1 * of.memory_bytes:  # a larger kind of the card
        of = replace(of, memory_bytes=stated)
    sheet = sheets()[of.name]
    per_node = int(number(found[1])) if (found := re.search(r"(\d+) per node", text)) else sheet["domain"]
    kind, bandwidth = "infiniband", sheet["network"]
    if "omni-path" in text.lower():
        kind, bandwidth = "omnipath", 4 * 12.5e9 / per_node
    elif found := re.search(r"(\d+) x (\d+) Gb/s", text):
        kind, bandwidth = "infiniband", int(found[1]) * int(found[2]) / 8 * 1e9 / per_node
    elif (found := re.search(r"(\d+) Gb/s per node", text)) or (found := re.search(r"(\d+) ?Gbps", text)):
        bandwidth = int(found[1]) / 8 * 1e9 / per_node
    if "roce" in text.lower():
        kind = "roce"
    inside = link("nvlink" if sheet["nvlink"] >= 100e9 else "pcie", sheet["nvlink"])
    gpus = int(number(row["gpus"], 1))
    if (found := re.search(r"(\d+) W\b", text)) and "power" in sheet:
        of = limited_to(of, float(found[1]), sheet["power"])
    if "HBM2e" in text and of.name == "H100":
        of = replace(of, bandwidth=2410e9)  # arXiv 2604.11391
    across = link(kind, bandwidth)
    return Machines(of, gpus, min(per_node, gpus), inside, across, paired=paired(of.name, per_node))


def _layout(row: Row) -> Layout | None:
    gpus, tp, pp, cp = (int(number(row[key], 1)) for key in ("gpus", "tp", "pp", "cp"))
    if gpus % (tp * pp * cp):
        return None
    data = gpus // (tp * pp * cp)
    shard = min(data, int(number(row["shard"], data)) or data)
    shard = shard if data % shard == 0 else data
    ep = int(number(row["ep"], 1)) or 1
    if "kempner" in row["source"].lower():  # its axis of experts stands beside that of shards
        shard *= ep
    return Layout(pp, data // shard, shard, cp, tp, ep)


DTYPES = (
    (r"nvfp4", "nvfp4"),
    (r"mxfp8|fp8-mx|mx\)", "mxfp8"),
    (r"fp8|float8", "float8"),
    (r"fp16|float16", "float16"),
    (r"fp32|float32|tf32", "bfloat16"),
)


def _products(row: Row) -> str:
    text = row["precision"].lower()
    if "not in the table" in text:
        return "mxfp8" if "parenthes" in row["other"] else "float8"
    for pattern, dtype in DTYPES:
        if re.search(pattern, text) and not (dtype == "bfloat16" and "bf16" in text):
            return dtype
    return "bfloat16"


def _execution(row: Row, layout: Layout) -> Execution:
    source, other = row["source"].lower(), row["other"].lower()
    run = Execution(products=_products(row), recompute=_recompute(row), fused=bool(row["compile"]), balances_ends=False)
    zero = int(number(row["zero"])) if row["zero"] else 3 if "fsdp" in other else 1
    run = replace(run, zero=zero, stops_early=False)
    if "fsdp" in other or re.search("foundry|titan|torchtune|litgpt|kempner", source):
        return _of_torch(row, run, layout)
    if _is_old_gpt(row):
        return _megatron_2021(row, run)
    if COUNTED in source:
        cuts = row["sp"].lower() in ("1", "yes", "true", "on")
        run = replace(run, attention="unfused", fused=True, copy_bytes=2.0, sequence_parallel=cuts)
        return replace(run, stages_per_rank=_stages_per_rank(row, layout))
    if "megatron" in source or "nemo" in source:
        return replace(
            run,
            fused=True,
            casts_weights=zero == 3,
            zero=3 if zero == 3 else 1,
            copy_bytes=2.0,
            hides_tensor=0.7,
            hides_experts=0.0,
            stages_per_rank=_stages_per_rank(row, layout),
            reduce_bytes=4.0 if run.products == "bfloat16" else 2.0,
            reduces_each=zero == 3,
            mixture=MixtureRun(_dispatch(row), grouped=False, weighs_inside=True),
        )
    if "internevo" in source:
        owners = int(number(found[1])) if (found := re.search(r"over (\d+) ranks", row["zero"])) else 0
        return replace(
            run,
            attention="flash2",
            copy_bytes=2.0,
            reduce_bytes=2.0,
            gradient_bytes=2.0,
            shards=owners,
            hides_gathers=False,
        )
    return replace(
        run,
        attention="flash2" if "H100" in row["system"] or "A100" in row["system"] else "fused",
        copy_bytes=2.0 if zero < 3 else 0.0,
        # a backward of nanotron's makes bf16 gradients beside the sums in fp32
        gradient_bytes=6.0 if "nanotron" in source else run.gradient_bytes,
        stages_per_rank=_stages_per_rank(row, layout),
        sequence_parallel=row["sp"].lower() not in ("0", "no", "false", "off"),
        fused="nanotron" not in source,
    )


def _of_torch(row: Row, run: Execution, layout: Layout) -> Execution:
    """Return how a system that leaves the loss to torch, and mostly FSDP, holds its state.

    Torch's cross entropy of half-precision logits has four tensors of their size at its backward's peak: the logits
    themselves, and log-probabilities and two gradients in fp32; 14 bytes a logit.
    """
    text, foundry = words(row), "foundry" in row["source"]
    reduced = 2.0 if "pure" in text else 4.0
    # llm-foundry's default loss reads half-precision logits (mpt/modeling_mpt.py: fused_crossentropy)
    copies = 1.0 if foundry else 14 / 4
    flash = "flash1" if foundry else "flash2"  # Triton's kernel of FlashAttention (attn_impl: triton)
    run = replace(run, reduce_bytes=reduced, gradient_bytes=4.0, logits_copies=copies, attention=flash)
    run = replace(run, frees_gradients=True, fused_rotary=run.fused or foundry)  # whose models have no rotary positions
    run = replace(run, reduces_each="accumulate whole" not in text and layout.pp == 1, gathers_each=layout.pp == 1)
    run = replace(run, offloads="activation offload" in text, stops_early=not foundry)
    if "kempner" in text and (layout.pp > 1 or "experts" in text):  # tensor_parallel.py: no SequenceParallel
        run = replace(run, sequence_parallel=False)
    if "kempner" in text:  # tensor_parallel.py: no two column-parallel layers share a gather; cuDNN's attention
        run = replace(run, tensor_passes=7, gathers_logits=True, attention="fused")
    if "compiled loss" in text:  # reads half-precision logits, and writes their gradient
        run = replace(run, logits_copies=1.0)
    if "cross entropy of bf16 logits" in text or "kempner" in text:  # the log-probabilities and both gradients too
        run = replace(run, logits_copies=2.0 * layout.tp)  # gathered over tp
    if re.search(r"bf16[- ](true|states)", text):  # nothing is kept in fp32
        run = replace(run, master_bytes=2.0, gradient_bytes=2.0, optimizer_bytes=4.0, casts_weights=False)
        run = replace(run, zero=0 if layout.world == 1 else run.zero)
    if "accumulate whole" in text:  # FSDP2 sums unsharded gradients in the dtype that it reduces in
        run = replace(run, gradient_bytes=max(run.gradient_bytes, 4.0))
    if re.search("8.?bit", text):
        run = replace(run, optimizer_bytes=0.0 if "paged" in text else 2.0)  # paged state is not the allocator's
    if "chunks of whole logits" in text:  # they stay in half precision, the rest is of one chunk in eight
        run = replace(run, logits_copies=(2 + 12 / 8) / 4)
    elif "in chunks" in text:
        run = replace(run, loss_chunks=8)
    return run


def _with_model(row: Row, run: Execution, model: Architecture) -> Execution:
    """Return the execution with what depends on the model: which weights are trained, and how the others rest."""
    text, experts = words(row), model.blocks[0].experts
    if "packed experts" in text and experts:  # rows padded to the fullest expert's; the page states a balance near 0
        run = replace(run, imbalance=experts.number / experts.top_k, mixture=MixtureRun(pads=True))
    if "kempner" in text and experts and run.recompute == "full":
        # each router keeps its last loss, and so what attention computed again saves: 15 hidden states, run on a CPU
        kept = 15 * number(row["mbs"]) * seq_len(row) * model.hidden * run.compute_bytes
        run = replace(run, buffers_bytes=kept * len(model.blocks))
    if run.recompute == "full" and "selective" in text:
        run = replace(run, recomputed=_recomputed_by_operators(run, model.blocks[0]))
    if "step in backward" in text:  # one gradient at a time, the largest of them the embedding's
        run = replace(run, gradient_bytes=0.0, buffers_bytes=model.embedding_elements * run.compute_bytes)
    if not re.search("lora|adapter", text):
        return run
    stated = re.search(r"trainable ([\d,]+)", text)
    run = replace(run, trained=number(stated[1]) / model.elements if stated else 0.003)
    if "nf4" in text:  # 4 bits, and an fp32 scale for 64 of them, which is itself in 8 bits where scales are quantized
        ends = model.embedding_elements + (0 if model.tied else model.head_elements)
        packed = 0.5 + (1 if "torchtune" in text else 4) / 64
        mean = (packed * (model.elements - ends) + 2 * ends) / model.elements
        run = replace(run, weight_bytes=mean, gather_bytes=mean, unpacked=1.0)
    return run


def _recomputed_by_operators(run: Execution, block: BlockShape) -> float:
    """Return the fraction of a block's bytes that torchtitan computes again where it keeps each second product.

    Kept are the block's input, queries, values, what attention gives, a gate and what the block's last product gives.
    """
    core, hidden = block.attention, block.hidden
    assert core is not None
    kept = core.heads * (core.key_dim + core.value_dim) + core.kv_heads * core.value_dim + block.width + hidden
    gates = (3 if run.fused else 4) * block.width
    saved = core.heads * (core.key_dim + core.value_dim) + core.kv_heads * (core.key_dim + core.value_dim) + gates
    return 1 - kept / (saved + 3 * hidden)


def _dispatch(row: Row) -> Literal["copies", "tokens"]:
    """Return what a mixture sends: tokens where a row names a dispatcher that does, else their copies."""
    return "tokens" if re.search(r"deep.?ep|hybrid.?ep", f"{row['other']} {row['note']}".lower()) else "copies"


def _megatron_2021(row: Row, run: Execution) -> Execution:
    """Return Megatron-DeepSpeed of 2021: no overlap, no sequence parallelism, attention in separate kernels."""
    in_bf16 = "bf16 optimizer" in row["precision"]
    return replace(
        run,
        products="float16" if not in_bf16 else "bfloat16",
        attention="unfused",
        fused=True,
        recompute="full",
        copy_bytes=2.0,
        optimizer_bytes=12.0,  # moments, and the owner's gradients in fp32
        keeps_outputs=True,
        buffers_bytes=8e9,  # buckets of 5e8 elements to reduce and to gather, and the messages' libraries
        reserved=0.05,
        gradient_bytes=6.0 if in_bf16 else 2.0,  # DeepSpeed sums in fp32, and gives each microbatch bf16 ones beside
        reduce_bytes=4.0 if in_bf16 else 2.0,
        hides_gradients=False,
        hides_gathers=False,
        exposed_sends=0.5,  # chosen on vTrain's rows
        sequence_parallel=False,
        stages_per_rank=max(1, int(number(row["vpp"], 1))),
    )


def _stages_per_rank(row: Row, layout: Layout) -> int:
    given = int(number(row["vpp"], 1)) or 1
    return given if layout.pp > 1 else 1


def _recompute(row: Row):
    text = row["ac"].lower() or ("full, by its configs" if "torchtune" in row["source"].lower() else "")
    if "full" in text or text in ("1", "yes", "true"):
        return "full"
    if "per operator" in text or ("titan" in row["source"].lower() and "selective" in text):
        return "full"  # of every second product
    return "core" if "selective" in text else "none"
