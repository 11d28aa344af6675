"""Tell the names of an adapted model's parameters apart: the base's, and the adapters'.

peft replaces an adapted layer ``q_proj`` by a module that holds the layer as ``q_proj.base_layer`` and its adapter as
``q_proj.lora_A.default`` and ``q_proj.lora_B.default``. A module that is trained whole, ``lm_head``, becomes
``lm_head.modules_to_save.default`` beside the untrained ``lm_head.original_module``. Its wrapper around a whole model
puts ``base_model.model.`` before every name.
"""

from __future__ import annotations

import re

ADAPTER = "default"
"""peft's name of the adapter."""
WRAPPER = "base_model.model."
_ADAPTERS = re.compile(r"\.lora_(A|B|embedding_A|embedding_B|magnitude_vector|bias)\b")
_MAGNITUDE = re.compile(rf"\.lora_magnitude_vector\.{ADAPTER}\.weight$")
_HOST = re.compile(r"\.base_layer\b")
_UNTRAINED = re.compile(r"\.original_module\b")
_TRAINED_WHOLE = re.compile(r"\.modules_to_save\.[^.]+")


def is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to an adapter, so that the base has nothing of its kind."""
    return _ADAPTERS.search(name) is not None


def host_of_magnitude(name: str) -> str | None:
    """Return the name of the weight whose rows' lengths a parameter holds (DoRA); None for any other parameter."""
    host, count = _MAGNITUDE.subn(".base_layer.weight", name)
    return host if count else None


def base_name(name: str) -> str:
    """Return the name that a parameter of the base has without adapters; a copy that is trained whole has it too."""
    for part in (_HOST, _UNTRAINED, _TRAINED_WHOLE):
        name = part.sub("", name)
    return name.removeprefix(WRAPPER)


def is_trained_copy(name: str) -> bool:
    """Return whether a parameter is the trained copy of one that the base has too."""
    return _TRAINED_WHOLE.search(name) is not None


def peft_name(name: str) -> str:
    """Return the name under which peft stores an adapter's parameter or a trained copy."""
    without = re.sub(rf"\.{ADAPTER}\b", "", name).replace(".modules_to_save", "")
    return WRAPPER + without.removeprefix(WRAPPER)
