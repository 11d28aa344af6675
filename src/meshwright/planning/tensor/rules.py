"""Check tensor parallelism; the functions are rows of the table in ``rules``."""

from __future__ import annotations

from meshwright.core.devices import CUDA
from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.core.names import clean, is_within, pattern
from meshwright.introspection.adapted_model import host_of_magnitude
from meshwright.introspection.facts import ModelFacts
from meshwright.introspection.structure.structure import legal_degrees
from meshwright.planning.case import Case, Found
from meshwright.planning.tensor.plan import TensorPlan

from .make import words_for
from .styles import STYLES, unknown_style


def tensor_words(case: Case) -> Found:
    for i, request in enumerate(case.techniques.tensor_plan):
        if request.style not in STYLES:
            yield ConfigError(unknown_style(f"techniques.tensor_plan[{i}].style = '{request.style}'", request.style))


def tensor_fits(case: Case) -> Found:
    ranks = case.layout.tp
    if ranks == 1 or case.facts.applied_plan(TensorPlan) is not None:
        return
    if not case.facts.blocks:
        yield ConfigError(no_blocks(f"layout.tp = {ranks}", case.facts))
        return
    if case.facts.vocab_size is not None and case.facts.vocab_size < ranks:
        yield ConfigError(
            f"layout.tp = {ranks}: the vocabulary has {case.facts.vocab_size} ids, fewer than there are ranks to"
            f" share it out to"
        )
        return
    structure = case.facts.measurements.structure(ranks).structure
    legal = ", ".join(map(str, legal_degrees(structure)))
    requested = case.techniques.tensor_plan
    given = (
        words_for(case.facts, requested).given
        if requested and all(request.style in STYLES for request in requested)
        else None
    )
    for kind in structure.kinds:
        for region in kind.regions:
            if not region.fits(ranks) and (given is None or given.cuts(kind.blocks[0], region)):
                what = f"{region.groups} heads" if region.kind == "attention" else f"{region.groups} hidden features"
                fewer = (
                    f" (and {region.joint} of keys and values)"
                    if region.kind == "attention" and region.joint < region.groups
                    else ""
                )
                where = ".".join(filter(None, (pattern(kind.blocks[0]), region.container)))
                yield ConfigError(
                    f"layout.tp = {ranks}: {where} has {what}{fewer}, which {ranks} ranks cannot share. Legal: {legal}."
                )
                return


def lengths_of_whole_rows(case: Case) -> Found:
    """Refuse DoRA beside embedding and head, whose rows are cut: its lengths are those of whole weights."""
    if case.layout.tp == 1 or case.facts.module is None:
        return
    blocks = case.facts.blocks
    for raw, _ in case.facts.module.named_parameters():
        host = host_of_magnitude(clean(raw))
        if host is not None and not any(is_within(host, block) for block in blocks):
            yield UnsupportedError(
                f"layout.tp = {case.layout.tp} cuts {host.removesuffix('.base_layer.weight')}, and adapters.kind = dora"
                f" trains the lengths of its whole rows. Leave it out of adapters.targets, or set adapters.kind = lora"
                f" or layout.tp = 1."
            )
            return


def tensor_companions(case: Case) -> Found:
    t = case.techniques
    if case.layout.tp > 1 and case.technique == "ddp":
        yield UnsupportedError(
            f"techniques.data_parallel = ddp does not go with layout.tp = {case.layout.tp}: its buckets know no"
            f" tensor-parallel parameters."
            f" Set techniques.data_parallel = fully_shard, which replicates over layout.dp_replicate too."
        )
    if t.loss_chunks < 1:
        yield ConfigError(
            f"techniques.loss_chunks = {t.loss_chunks}: the tokens of a microbatch are cut in 1 chunk or more"
        )
    elif t.loss_chunks > 1:
        structure = case.facts.measurements.structure(case.layout.tp).structure
        why = structure.tail.obstacle_if_cut if case.layout.tp > 1 else structure.tail.obstacle
        if structure.head is None or why:
            yield UnsupportedError(
                f"techniques.loss_chunks = {t.loss_chunks}: what {case.facts.kind} does to its logits cannot be done"
                f" piece by piece ({why}). Set techniques.loss_chunks = 1."
            )


def async_tensor_fits(case: Case) -> Found:
    if not case.techniques.async_tensor_parallel:
        return
    request = "techniques.async_tensor_parallel = true"
    if case.layout.tp == 1:
        yield ConfigError(
            f"{request} acts on the tensor axis, and layout.tp = 1. Set it false, or layout.tp = 2 or more."
        )
    elif not case.techniques.sequence_parallel:
        yield ConfigError(
            f"{request} needs cut sequences. Set techniques.sequence_parallel = true, or async_tensor_parallel = false."
        )
    if case.device != CUDA:
        yield UnsupportedError(
            f"{request} needs CUDA with symmetric memory (GPUs joined by NVLink), and this plan is for {case.device}."
            f" Set techniques.async_tensor_parallel = false: the numbers are the same."
        )


def no_blocks(request: str, facts: ModelFacts) -> str:
    """Return the error text for a request that acts on repeated blocks and finds none."""
    lacks = f"{request} acts on repeated blocks, and none was found in {facts.kind}: "
    for parameter in facts.parameters:
        alike = [name for name in parameter.aliases if pattern(name) == pattern(parameter.name)]
        if alike:  # sibling modules share one weight
            return (
                f"{lacks}{parameter.name} is one parameter with {', '.join(alike)}, and blocks need parameters of their"
                f" own. Give each block a copy, or use the shared module outside the blocks"
            )
    return (
        f"{lacks}put them into an nn.ModuleList or nn.ModuleDict, each with parameters of its own, or name them:"
        f" hints=meshwright.Hints(blocks=('layer_*',))"
    )
