"""Check context parallelism; the functions are rows of the table in ``rules``."""

from __future__ import annotations

from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.core.names import is_within
from meshwright.introspection.mixing.values import Mixing
from meshwright.introspection.signature import core_of
from meshwright.models.layers import Router
from meshwright.planning.case import Case, Found

from .plan import ContextPlan


def context_companions(case: Case) -> Found:
    """Refuse techniques and kinds of experts that do not go with rows cut over ranks."""
    kind = case.techniques.context_parallel_method
    if case.layout.cp > 1:
        refused = [*_encoders(case), *_images(case), *_routers(case)]
        yield from refused or _measured(case)
    elif kind != "auto":
        yield ConfigError(
            f"techniques.context_parallel_method = {kind} is about rows that are cut over ranks, and layout.cp = 1."
            f' Leave it at "auto", or set layout.cp = 2 or more.'
        )


def _encoders(case: Case) -> Found:
    config = None if case.facts.module is None else getattr(core_of(case.facts.module), "config", None)
    if getattr(config, "is_encoder_decoder", False) is True:
        yield UnsupportedError(
            f"layout.cp = {case.layout.cp}: {case.facts.kind} has an encoder and a decoder, whose rows are two, and one"
            f" of them is cut. Set layout.cp = 1."
        )


def _images(case: Case) -> Found:
    if case.facts.images is not None:
        yield UnsupportedError(
            f"layout.cp = {case.layout.cp}: {case.facts.kind} puts the features of a row's images in the places of its"
            f" image tokens, one after the other, before its blocks, and a rank has a part of these places. Set"
            f" layout.cp = 1; layout.tp cuts long rows between the blocks too (techniques.sequence_parallel)."
        )


def _measured(case: Case) -> Found:
    """Refuse ways by which tokens see each other, as a small copy shows them before rows are cut."""
    if case.facts.module is None or case.facts.applied_plan(ContextPlan) is not None:
        return
    try:
        mixing = case.facts.measurements.mixing()
    except UnsupportedError as error:
        yield UnsupportedError(f"{error}. Set layout.cp = 1.")
        return
    yield from _passed_over(case, mixing)
    yield from _compiled_flex(case, mixing)
    yield from _mixers(case, mixing)


def _passed_over(case: Case, mixing: Mixing) -> Found:
    """Refuse modules in which tokens meet, and that some batches or draws pass over: ranks would wait there."""
    conditional = set(case.facts.measurements.premises().conditional)
    names = [p.name for p in case.facts.parameters if p.trainable] if conditional else []
    # a block that a small copy never calls has no known way in which tokens meet
    paths = [*(caller.path for caller in mixing.callers), *(mixer.path for mixer in mixing.mixers), *case.facts.blocks]
    inside = {path: {name for name in names if is_within(name, path)} for path in paths}
    if path := next((path for path, held in inside.items() if held and held <= conditional), None):
        yield UnsupportedError(
            f"layout.cp = {case.layout.cp}: some batches or draws pass over {path}, in which the tokens of all ranks"
            f" meet, and each rank would decide so for its own tokens. Set layout.cp = 1."
        )


def _compiled_flex(case: Case, mixing: Mixing) -> Found:
    flex = [caller.path for caller in mixing.callers if caller.flex]
    if case.techniques.compile and flex:
        yield ConfigError(
            f"layout.cp = {case.layout.cp} takes the calls of flex_attention in {flex[0]} out of its forward, which"
            f" a compiled block does not allow. Set techniques.compile = false."
        )


def _mixers(case: Case, mixing: Mixing) -> Found:
    """Refuse modules that need whole rows of which tensor-parallel ranks have parts, or whose sizes are unknown."""
    ranks, tensor_ranks = case.layout.cp, case.layout.tp
    needy = next((m for m in mixing.mixers if any(each.is_read and not each.is_integer for each in m.inputs)), None)
    if needy is not None and tensor_ranks > 1 and case.techniques.sequence_parallel:
        yield UnsupportedError(
            f"layout.cp = {ranks} with layout.tp = {tensor_ranks}: {needy.path} needs whole rows ({needy.why}), and"
            f" tensor-parallel ranks have parts of them. Set techniques.sequence_parallel = false, or layout.tp = 1."
        )
    unknown = (m for m in mixing.mixers if any(each.is_read and not each.features for each in m.inputs))
    if (mixer := next(unknown, None)) is not None:
        yield UnsupportedError(
            f"layout.cp = {ranks}: the sizes of the tensors that {mixer.path} is given are unknown: a forward without"
            f" values does not reach it. Set layout.cp = 1."
        )


def _routers(case: Case) -> Found:
    routers = [] if case.facts.module is None else [m for m in case.facts.module.modules() if isinstance(m, Router)]
    if value := next((r.config.capacity_factor for r in routers if r.config.capacity_factor), 0):
        yield UnsupportedError(
            f"model.moe.capacity_factor = {value} with layout.cp = {case.layout.cp}: who is over an expert's capacity"
            f" depends on the whole sequence, of which a rank has a part. Set model.moe.capacity_factor = 0 (no token"
            f" is dropped), or layout.cp = 1."
        )
