"""Check weights in 4 bits; the functions are rows of the table in ``rules``."""

from __future__ import annotations

from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.core.names import clean
from meshwright.introspection.adapted_model import host_of_magnitude
from meshwright.planning.case import Case, Found
from meshwright.planning.tensor.rules import no_blocks


def quantize_companions(case: Case) -> Found:
    """Require blocks, and refuse techniques that do not combine with weights in 4 bits."""
    t = case.techniques
    if t.quantize_frozen == "none":
        return
    asked = f"techniques.quantize_frozen = {t.quantize_frozen}"
    if not case.facts.blocks:
        yield ConfigError(no_blocks(asked, case.facts))
    if t.float8 != "none":
        yield UnsupportedError(
            f"{asked} does not go with techniques.float8 = {t.float8}, which rounds the weights of the same layers."
            f" Set one of them to none."
        )
    if t.async_tensor_parallel:
        yield UnsupportedError(
            f"{asked} does not go with techniques.async_tensor_parallel = true, whose fused products take plain"
            f" weights. Set techniques.async_tensor_parallel = false."
        )
    names = (clean(raw) for raw, _ in case.facts.module.named_parameters()) if case.facts.module is not None else ()
    if any(host_of_magnitude(name) for name in names):
        yield UnsupportedError(
            f"{asked} does not go with adapters.kind = dora, which takes the lengths of a plain weight's rows. Set"
            f" adapters.kind = lora, or techniques.quantize_frozen = none."
        )
