"""Every argument of the tools is carried, mapped or refused: a table that no field may miss."""

from __future__ import annotations

from dataclasses import dataclass, fields

import pytest

from meshwright import ConfigError, Techniques
from meshwright.integrations.training_arguments import (
    CARRIED,
    SFT_CONFIG,
    TRAINING_ARGUMENTS,
    handed_over,
    refuse,
    refused,
    techniques_of,
)

transformers = pytest.importorskip("transformers")


ARGUMENTS = {field.name for field in fields(transformers.TrainingArguments)}
NOT_YET = {"activation_checkpointing", "activation_checkpointing_kwargs", "router_aux_loss_coef", "trust_remote_code"}
"""Fields that transformers 5.17 and trl 1.0 lack."""
RECOMPUTE = "activation_checkpointing" if "activation_checkpointing" in ARGUMENTS else "gradient_checkpointing"


def test_every_field_of_training_arguments_has_a_decision():
    assert ARGUMENTS - set(TRAINING_ARGUMENTS) == set(), "decide: carried, mapped or refused"
    assert set(TRAINING_ARGUMENTS) - ARGUMENTS - NOT_YET == set()


@pytest.mark.all
def test_every_field_of_sft_config_has_a_decision():
    trl = pytest.importorskip("trl")
    names = {field.name for field in fields(trl.SFTConfig)}
    assert names - set(SFT_CONFIG) == set() == set(SFT_CONFIG) - names - NOT_YET


def test_each_refused_argument_says_what_to_do_instead():
    table = {**TRAINING_ARGUMENTS, **SFT_CONFIG}
    for name, handling in table.items():
        assert (handling.kind == "carried") == (not handling.words), name
        assert handling.kind != "refused" or (handling.words[0].isupper() and handling.words[-1] == "."), name


@dataclass
class Arguments:
    old: int = 0
    odd: str = "a"
    new: bool = False


def test_a_refused_value_is_named_with_its_remedy():
    table = {"old": refused("Leave it."), "odd": refused("Legal: a, b.", lambda value: value in ("a", "b"))}
    refuse(Arguments(odd="b"), table, "Tool")
    with pytest.raises(ConfigError, match=r"Tool: old = 3 would be ignored here. Leave it."):
        refuse(Arguments(old=3), table, "Tool")
    with pytest.raises(ConfigError, match=r"odd = 'c' .* Legal: a, b."):
        refuse(Arguments(odd="c"), table, "Tool")
    refuse(Arguments(old=3), {**table, "old": CARRIED}, "Tool")


def test_a_field_of_a_newer_release_may_keep_its_default_alone():
    with pytest.raises(ConfigError, match=r"new = True .* newer release: leave it at its default, False"):
        refuse(Arguments(new=True), {"old": CARRIED, "odd": CARRIED}, "Tool")


def arguments(tmp_path, **options):
    return transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", **options)


MAPPED = {
    "compute bfloat16": ({"bf16": True}, {}, {"precision.compute": "bfloat16"}),
    "own dtype without a flag": ({}, {}, {"precision.compute": "float32"}),
    "a wish of ours stays": ({}, {"precision": {"compute": "bf16"}}, {"precision.compute": "bf16"}),
    "recomputed": ({RECOMPUTE: True}, {}, {"activation_checkpointing": "full"}),
    "every second block": (
        {RECOMPUTE: True, f"{RECOMPUTE}_kwargs": {"every_n_layers": 2}},
        {},
        {"activation_checkpointing": "every_n", "checkpoint_every": 2},
    ),
    "ours says how": (
        {RECOMPUTE: True},
        {"activation_checkpointing": "selective"},
        {"activation_checkpointing": "selective"},
    ),
    "compiled": ({"torch_compile": True}, {}, {"compile": True, "compile_backend": "inductor"}),
}


@pytest.mark.parametrize("case", MAPPED)
def test_what_arguments_ask_for_becomes_a_technique(tmp_path, case):
    from meshwright.planning.techniques import as_techniques

    options, given, expected = MAPPED[case]
    made = arguments(tmp_path, **options)
    found = techniques_of(made, as_techniques(given), "float32")
    for path, value in expected.items():
        owner = found.precision if path.startswith("precision.") else found
        assert getattr(owner, path.rpartition(".")[2]) == value
    ours = handed_over(made, TRAINING_ARGUMENTS)
    assert ours.mixed_precision == "no" and not (ours.bf16 or ours.torch_compile or getattr(ours, RECOMPUTE))
    assert made.bf16 == options.get("bf16", False)  # the caller's own stay


@pytest.mark.parametrize(
    ("options", "given", "words"),
    [
        ({"bf16": True}, {"precision": {"compute": "float16"}}, "bf16 = True computes in bfloat16"),
        (
            {RECOMPUTE: True, f"{RECOMPUTE}_kwargs": {"use_reentrant": True}},
            {},
            "use_reentrant = True",
        ),
    ],
)
def test_contradictions_are_refused(tmp_path, options, given, words):
    from meshwright.planning.techniques import as_techniques

    with pytest.raises(ConfigError, match=words):
        techniques_of(arguments(tmp_path, **options), as_techniques(given), "float32")
    assert isinstance(as_techniques(given), Techniques)
