"""Compare the memory estimates of random legal layouts with the memory of real runs over gloo, storage by storage.

    python benchmarks/memory_layouts.py [--layouts 80] [--seed 0] [--only NUMBER] [--rows] [--tuning] [--resident]

Each layout is drawn from models, axis sizes and techniques, kept if the rules allow it, estimated by the dry run, and
run on one, two or four processes. Found is the peak of a whole third step, optimizer included, by the account of
storages. Routers of our decoder choose experts in turn, as the estimate assumes. Exit status 1: an error above 3 %, a
median above 1 %, a layout without an estimate, or one that the rules allow and the run refuses.

Compared beside: what ``meshwright plan`` prints at the peak (the dry run with all keys of a loader), its states before
the optimizer steps (a formula), and, in print alone, whether an evaluation and a generation stay below the step.

With ``--tuning`` the steps are those of fine-tuning: adapters (LoRA, DoRA), bases in 4 bits, pairs of answers with a
reference, optimizer state in few bits or in host memory, activations and parameters in host memory, averages of the
steps, models of images and text with an image in each row. There is no teacher: plans know of none.

With ``--resident`` a larger model's estimates in a few layouts are compared with the most pages that a process had
resident: allocator, messages and temporary buffers included.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from drawn import Drawn, draw

from meshwright.distributed.process.workers import WorkerFailed, WorkerPool
from meshwright.models.decoder_config import DecoderConfig, MoEConfig
from meshwright.planning.layout import Layout
from meshwright.planning.memory import RankMemory

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # support

MEDIAN, MOST = 0.01, 0.03
VOCABULARY, SEQ = 1003, 96
WORLDS = (1, 2, 2, 4, 4, 4)
DENSE = DecoderConfig(VOCABULARY, 96, 4, n_heads=8, n_kv_heads=4, hidden_dim=200, max_seq_len=SEQ)
TUNED = ("dense", "llama", "gpt2", "llava")
"""Models of fine-tuning."""
WITH_IMAGES, IMAGE = ("llava",), 1000
"""Models of images and text, and the id of an image's tokens."""
MODELS: dict[str, Any] = {
    "dense": DENSE,
    "tied": replace(DENSE, tied_embeddings=True, qk_norm=True),
    "wide": replace(DENSE, dim=160, n_layers=6, hidden_dim=640),
    "mixture": replace(DENSE, moe=MoEConfig(n_experts=4, hidden_dim=64)),
    "shared expert": replace(DENSE, moe=MoEConfig(n_experts=8, top_k=2, hidden_dim=48, n_shared=1, first_dense=1)),
    "llama": "llama",
    "gpt2": "gpt2",
    "qwen3": "qwen3",
    "llava": "llava",
}
SWITCHES: dict[str, list[dict[str, Any]]] = {
    "precision": [{}, {}, {"precision": {"compute": "bfloat16"}}],
    "recompute": [
        *({},) * 3,
        *({"activation_checkpointing": mode} for mode in ("full", "every_n", "selective", "selective_op")),
        {"activation_checkpointing": "modules", "checkpoint_modules": ("layers.*.feed_forward",)},
    ],
    "loss": [{}, {}, {"loss_chunks": 4}],
    "shards": [
        *({},) * 3,
        {"reshard_after_forward": False},
        {"sync_grad_accum": True},
        *({"zero_stage": n} for n in (1, 2, 3)),
    ],
    "schedule": [
        {"pipeline_schedule": kind}
        for kind in ("1f1b", "gpipe", "interleaved_1f1b", "zbv_zero_bubble", "interleaved_zero_bubble", "dualpipe_v")
    ],
    "sequence": [{}, {}, {"sequence_parallel": False}, {"regather": False}],
    "method": [{"context_parallel_method": kind} for kind in ("auto", "all_gather", "ring", "ulysses")],
    "freeze": [{}, {}, {}, {"freeze": ("embedding", r"layers\.0\.")}],
    "optimizer": [{}, {}, {"optimizer": "sgd"}],
}
TUNING: dict[str, list[dict[str, Any]]] = {
    **{key: SWITCHES[key] for key in ("precision", "loss", "shards", "sequence", "schedule")},
    "recompute": [*SWITCHES["recompute"], {"activation_checkpointing": "offload"}],
    "adapters": [{}, *({"adapters": {"kind": kind, "rank": 4}} for kind in ("lora", "lora", "dora", "rslora"))],
    "base": [{}, {"quantize_frozen": "nf4"}],
    "state": [
        *({},) * 2,
        *({"optimizer_state": bits} for bits in ("8bit", "4bit")),
        *({"cpu_offload": what} for what in ("optimizer", True)),
    ],
    "optimizer": [{}, {}, {"optimizer": "schedule_free_adamw"}],
}
"""Switches of fine-tuning."""


def made(name: str) -> Any:
    """Return the config of a model."""
    model = MODELS[name]
    return family(model) if isinstance(model, str) else model


def facts_of(drawn: Drawn) -> Any:
    """Return the facts of a layout's model, with adapters where they are requested."""
    return _facts(drawn.model, drawn.techniques.get("adapters", {}).get("kind", ""))


@cache
def _facts(name: str, adapters: str) -> Any:
    from meshwright.introspection.adapter_request import Adapters
    from meshwright.introspection.facts import model_facts
    from meshwright.introspection.source import as_module, with_adapters

    request = Adapters(kind=adapters, rank=4) if adapters else None  # type: ignore[arg-type]
    return model_facts(as_module(with_adapters(made(name), request)))


def family(name: str) -> Any:
    """Return the config of a small model of transformers."""
    from transformers import AutoConfig

    from meshwright.introspection.source import CausalLM

    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 128, "hidden_size": 64, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 160}
    if name in WITH_IMAGES:
        return CausalLM(of_images(name, {**sizes, **heads}))
    if name == "gpt2":
        sizes = {"vocab_size": VOCABULARY, "n_positions": 128, "n_embd": 64, "n_layer": 4}
        heads = {"n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        heads |= {"bos_token_id": 0, "eos_token_id": 0}
    return CausalLM(AutoConfig.for_model(name, **sizes, **heads))


def of_images(name: str, text: dict[str, Any]) -> Any:
    """Return the config of a model of images and text, whose images have 16 patches."""
    from transformers import AutoConfig

    text |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    tower = {"hidden_size": 96, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4}
    tower |= {"image_size": 56, "patch_size": 14}
    parts = {"text_config": {"model_type": "llama", **text}, "vision_feature_layer": -2}
    vision = {"model_type": "clip_vision_model", **tower}
    return AutoConfig.for_model(name, **parts, vision_config=vision, image_token_id=IMAGE)


# --- one rank


class Compared(NamedTuple):
    """A rank's memory, found and foreseen.

    Attributes:
        rank: the pipeline rank.
        found: what a later step holds.
        estimate: by a dry run of the very batch.
        planned: bytes at the peak, as ``meshwright plan`` prints them.
        states: bytes before the optimizer steps, found and by the plan's formula.
        forwards: most bytes of an evaluation and of a generation.
        why_not: what is not known.
    """

    rank: int
    found: RankMemory
    estimate: RankMemory
    planned: int
    states: tuple[int, int]
    forwards: dict[str, int]
    why_not: str


def keys_of(drawn: Drawn) -> tuple[str, ...]:
    """Keys of the batches beside tokens and labels; documents would decide which tokens a rank of cp has."""
    if drawn.model in WITH_IMAGES:
        return ()
    ours = isinstance(MODELS[drawn.model], DecoderConfig)
    return () if drawn.layout.cp > 1 else ("positions", "document_ids") if ours else ("positions",)


def compare(drawn: Drawn) -> Compared:
    """Run this rank's steps, and return what they held and what was foreseen."""
    from support.unhurried import Unhurried, least_of

    from meshwright.core.losses import PreferenceLoss
    from meshwright.distributed.memory.account import MemoryAccount, dims_of_logits
    from meshwright.distributed.memory.dry_run import estimate_memory
    from meshwright.distributed.mesh import get_pp_rank
    from meshwright.distributed.optimizer.parameter_groups import trained_names
    from meshwright.distributed.parallelize import parallelize
    from meshwright.models.layers import Router
    from meshwright.planning.build import plan
    from meshwright.planning.memory import plan_memory
    from meshwright.training.build import build_optimizer, estimated_memory
    from meshwright.training.config import Config

    facts = facts_of(drawn)
    planned = plan(facts, drawn.layout, techniques=drawn.beside, batch=drawn.batch)
    config = Config.from_dict(
        {"optimizer": {"kind": drawn.techniques.get("optimizer", "adamw")}, "schedule": {"kind": "constant"}}
    )

    def build(model: Any) -> torch.optim.Optimizer:
        return build_optimizer(config, model.named_parameters(), planned.optimizer, trained).optimizer

    trained, of_torchao = trained_names(facts, planned), planned.optimizer.needs_torchao
    keys = "tokens", "labels", *keys_of(drawn)
    estimate = estimate_memory(facts, planned, drawn.batch, keys=keys, build_optimizer=None if of_torchao else build)
    printed = estimated_memory(config, facts, planned, drawn.batch)
    laid = parallelize(
        made(drawn.model),
        drawn.layout if drawn.layout.world > 1 else None,
        techniques=drawn.techniques,
        microbatch_rows=drawn.rows,
        loss_fn=PreferenceLoss() if drawn.pairs else None,
    )
    optimizer = build(laid)
    batch = _own_rows(drawn)
    if drawn.pairs and laid.reference_refusal:  # without adapters, what the reference gives comes with the rows
        batch["reference_log_probs"] = torch.zeros(len(batch["tokens"]), dtype=torch.float64)
    states = 0
    with patch.object(Router, "_choose", _in_turn):
        for _ in range(2):  # DDP's buckets are in their order then
            laid.forward_backward(batch)
            states = _at_rest(laid, optimizer)
            laid.optimizer_step(optimizer)
        vocabulary = dims_of_logits(VOCABULARY, drawn.layout.tp)
        watches = [MemoryAccount(laid.parts, vocabulary, optimizer=optimizer) for _ in range(2)]
        for watch in watches:
            with Unhurried(), watch:
                laid.forward_backward(batch)
                if not of_torchao:
                    laid.optimizer_step(optimizer)
            if of_torchao:  # its compiled step does not run while operators are watched
                laid.optimizer_step(optimizer)
        forwards = {}
        for name, forward in {
            "evaluation": lambda: laid.evaluate(batch),
            "generation": lambda: _generate(laid),
        }.items():
            with Unhurried(), MemoryAccount(laid.parts, vocabulary, optimizer=optimizer) as beside:
                forward()
            forwards[name] = sum(beside.peak.values())
    rank = get_pp_rank(laid.mesh)
    m = plan_memory(planned, microbatches=drawn.microbatches, pipeline_rank=rank if planned.pipeline else None)
    here, there = RankMemory(*least_of(watches)), printed.of(rank).total
    m = m.without(printed.of(rank).idle)
    formula = m.parameters + m.gradients + m.optimizer
    return Compared(rank, here, estimate.of(rank), there, (states, formula), forwards, estimate.why_not)


def _generate(laid: Any) -> None:
    from meshwright.core.errors import MeshwrightError

    try:
        laid.generate(range(3, 35), 4)
    except MeshwrightError as error:  # the same on all ranks
        print(f"no generation: {str(error).splitlines()[0]}", flush=True)


def _at_rest(laid: Any, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of a rank's parameters, gradients and optimizer state, numbers of steps left out."""
    from meshwright.distributed.weights.shards import memory_of

    tensors = [t for p in laid.parameters() for t in (p, p.grad) if t is not None]
    tensors += [t for state in optimizer.state.values() for t in state.values() if getattr(t, "ndim", 0)]
    plain = {id(one.untyped_storage()): one.untyped_storage() for tensor in tensors for one in memory_of(tensor)}
    return sum({storage.data_ptr(): storage.nbytes() for storage in plain.values()}.values())


def _in_turn(router: Any, scores: torch.Tensor) -> torch.Tensor:
    """Choose experts one after the other, so that all have as many tokens."""
    shape, config = (*scores.shape[:-1], router.config.top_k), router.config
    number = torch.arange(scores.shape[0] * scores.shape[1] * config.top_k, device=scores.device)
    return (number % config.n_experts).view(shape)


def _own_rows(drawn: Drawn) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = drawn.rows * drawn.microbatches, SEQ
    tokens = torch.randint(VOCABULARY, shape, generator=generator)
    batch = {"tokens": tokens, "labels": tokens.roll(-1, 1)}
    if drawn.model in WITH_IMAGES:
        from meshwright.introspection.images import ImageArguments, ImageSize, pictured
        from meshwright.introspection.source import as_module

        images = ImageArguments.of(as_module(made(drawn.model)))
        assert images is not None
        sizes = [ImageSize(images.size, images.each)]
        batch |= pictured(tokens, [1] * len(tokens), images, sizes, generator, torch.float32)
    if "positions" in keys_of(drawn):
        batch["positions"] = torch.arange(SEQ // 2).repeat(2).expand(shape).contiguous()  # two documents
    if "document_ids" in keys_of(drawn):
        batch["document_ids"] = (torch.arange(SEQ) >= SEQ // 2).long().expand(shape).contiguous()
    return batch


# --- resident pages

LARGE = DecoderConfig(16_000, 640, 6, n_heads=8, n_kv_heads=8, hidden_dim=1920, max_seq_len=512)
RESIDENT = {
    "one process": (Layout(dp_shard=1), {}),
    "one process, recomputed": (Layout(dp_shard=1), {"activation_checkpointing": "full"}),
    "dp_shard 2": (Layout(dp_shard=2), {}),
    "dp_replicate 2": (Layout(dp_replicate=2, dp_shard=1), {}),
    "tp 2": (Layout(dp_shard=1, tp=2), {}),
    "pp 2": (Layout(dp_shard=1, pp=2), {}),
}


def compare_resident(layout: Layout, techniques: dict[str, Any]) -> tuple[int, int]:
    """Return the most bytes resident in a third step, without those before the layout, and the estimate."""
    import gc

    import psutil

    from meshwright.distributed.memory.dry_run import estimate_memory
    from meshwright.distributed.mesh import get_pp_rank
    from meshwright.distributed.parallelize import parallelize
    from meshwright.introspection.facts import model_facts
    from meshwright.introspection.source import as_module
    from meshwright.planning.build import plan

    drawn = Drawn("large", layout, techniques, 2 if layout.pp == 1 else 4, SEQ, vocab_size=VOCABULARY)
    batch = replace(drawn.batch, seq_len=LARGE.max_seq_len)
    facts = model_facts(as_module(LARGE))
    planned = plan(facts, layout, techniques=techniques)
    estimate = estimate_memory(facts, planned, batch, keys=("tokens", "labels"))
    gc.collect()
    before = psutil.Process().memory_info().rss
    laid = parallelize(LARGE, layout if layout.world > 1 else None, plan=planned, microbatch_rows=drawn.rows)
    optimizer = torch.optim.AdamW(laid.parameters(), lr=1e-3)
    tokens = torch.randint(LARGE.vocab_size, (drawn.rows * drawn.microbatches, LARGE.max_seq_len))
    for step in range(3):
        if step == 2:
            with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
                file.write("5")  # the high-water mark begins anew
        laid.forward_backward({"tokens": tokens, "labels": tokens.roll(-1, 1)})
        laid.optimizer_step(optimizer)
    with open("/proc/self/status", encoding="ascii") as file:
        most = next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))
    return most - before, estimate.of(get_pp_rank(laid.mesh)).total


def resident(workers: WorkerPool) -> int:
    """Print a line for each layout."""
    for name, (layout, techniques) in RESIDENT.items():
        for rank, (found, foreseen) in enumerate(
            workers.run(compare_resident, layout, techniques, world=layout.world, timeout=500)
        ):
            print(f"{foreseen / found - 1:+8.2%} {name}, rank {rank}: {found:,} resident, {foreseen:,} foreseen")
    return 0


# --- the table


def errors_of(results: list[Compared]) -> tuple[float, float, float]:
    """Return the largest relative errors of the dry run, of the plan's peak, and of the plan's states before a step.

    Of ranks of a pipeline's place, which share an estimate, the fullest counts.
    """
    fullest: dict[int, list[int]] = {}
    for one in results:
        sizes = one.found.total, one.estimate.total, one.planned, *one.states
        fullest[one.rank] = list(map(max, fullest.get(one.rank, [0] * 5), sizes))
    largest = [
        max((there / here - 1 for here, there in pairs), key=abs)
        for pairs in (
            [(row[0], row[1]) for row in fullest.values()],
            [(row[0], row[2]) for row in fullest.values()],
            [(row[3], row[4]) for row in fullest.values()],
        )
    ]
    return largest[0], largest[1], largest[2]


KINDS = "dry run", "plan at the peak", "plan's states before a step"


def run(each: Callable[[Drawn], list], drawn: list[Drawn], *, shows_rows: bool) -> int:
    """Compare all layouts, print a line for each and a summary, and return the exit status."""
    errors: list[tuple[float, float, float]] = []
    unknown, refused = [], 0
    higher: list[tuple[float, str]] = []
    for number, one in enumerate(drawn):
        try:
            results = each(one)
        except WorkerFailed as error:
            refused += 1
            print(f"{number:3} refused  {one}: {str(error).strip().splitlines()[-1]}", flush=True)
            continue
        if why := next((found.why_not for found in results if found.why_not), ""):
            unknown.append(one)
            print(f"{number:3} -        {one}: {why}", flush=True)
            continue
        errors += [errors_of(results)]
        print(f"{number:3} {' '.join(f'{error:+8.2%}' for error in errors[-1])} {one}", flush=True)
        higher += [
            (size / found.planned, f"{number} {name}") for found in results for name, size in found.forwards.items()
        ]
        if shows_rows:
            for found in results:
                here, there = found.found.peak, found.estimate.peak
                rows = {str(k): (here.get(k, 0), there.get(k, 0)) for k in sorted({*here, *there})}
                print("     rank", found.rank, rows, found.planned, found.states, found.forwards)
    failed = bool(unknown) or bool(refused)
    for kind, found in zip(KINDS, zip(*errors, strict=True), strict=True):
        sizes = sorted(map(abs, found))
        median, most = statistics.median(sizes), sizes[-1]
        failed |= median > MEDIAN or most > MOST
        print(f"{kind}: median error {median:.2%} (goal {MEDIAN:.0%}), most {most:.2%} (goal {MOST:.0%})")
    above = sorted((pair for pair in higher if pair[0] > 1 + MOST), reverse=True)
    print(f"evaluations and generations above the plan's peak of a step: {len(above)} of {len(higher)} {above[:4]}")
    print(
        f"{len(errors)} layouts, without an estimate {len(unknown)}, planned and refused by the run {refused} (goals 0)"
    )
    return int(failed)


def main() -> int:
    """Read the arguments, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, default=-1)
    parser.add_argument("--rows", action="store_true", help="print each rank's bytes by kind")
    parser.add_argument("--tuning", action="store_true", help="draw steps of fine-tuning")
    parser.add_argument("--resident", action="store_true", help="compare resident pages instead")
    arguments = parser.parse_args()
    if arguments.resident:
        with WorkerPool(2, threads=1) as workers:
            return resident(workers)
    models = {name: made(name) for name in (TUNED if arguments.tuning else MODELS)}
    drawn = draw(
        arguments.layouts,
        arguments.seed,
        models,
        TUNING if arguments.tuning else SWITCHES,
        facts_of,
        seq=SEQ,
        worlds=WORLDS,
        pairs=(True, False) if arguments.tuning else (False,),
        vocab_size=VOCABULARY,
    )
    drawn = drawn if arguments.only < 0 else drawn[arguments.only : arguments.only + 1]
    with WorkerPool(4, threads=1) as workers:
        return run(
            lambda one: workers.run(compare, one, world=one.layout.world, timeout=1500),
            drawn,
            shows_rows=arguments.rows,
        )


if __name__ == "__main__":
    sys.exit(main())
