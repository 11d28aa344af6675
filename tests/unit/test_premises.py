"""What a model's forward does beyond giving a row's tokens their logits is seen on a small copy, and named.

Of sound models nothing is.
"""

from __future__ import annotations

import functools
import random
from unittest.mock import patch

import numpy as np
import pytest
import torch
from support import families
from support.mixing import Model
from support.premises import MODELS

from meshwright import Layout, UnsupportedError, plan
from meshwright.distributed.recompute import recompute
from meshwright.introspection.premises import playing, premises
from meshwright.introspection.premises.premises import Premises, hooks_of, play

SEEN: dict[str, dict[str, str]] = {
    "BatchNorm": {"mixes_rows": "batch_norm (BatchNorm1d)", "buffers": "batch_norm.running_mean"},
    "BatchNormOfNow": {"mixes_rows": "batch_norm (BatchNorm1d)"},
    "ByFrequency": {"mixes_rows": "the gradient of embedding.weight"},
    "Carries": {"changes": "outputs", "remembers": "True"},
    "Centred": {"mixes_rows": "Centred itself"},
    "ChoosesByFirstRow": {
        "mixes_rows": "ChoosesByFirstRow itself",
        "decides_by_batch": "ChoosesByFirstRow itself, at premises.py:",
        "conditional": "even.weight",
    },
    "Clipped": {"parameters": "embedding.weight"},
    "Contrastive": {"mixes_rows": "Contrastive itself"},
    "BlocksCountRows": {"buffers": "layers.1.rows"},
    "CountsIds": {"buffers": "seen"},
    "CountsTokens": {"buffers": "seen"},
    "WarmsByTokens": {"changes": "tokens_seen", "counts_rows": "tokens_seen"},
    "DecidesByAll": {"decides_by_batch": "DecidesByAll itself, at premises.py:"},
    **{
        name: {"decides_by_batch": f"{name} itself, at premises.py:"}
        for name in (
            "DecidesByMean",
            "DecidesBySignOfMean",
            "DecidesBySumOfFeatures",
            "DecidesByMeanId",
            "DecidesByMeanThatIsRead",
            "DecidesByDifferentIds",
            "DecidesBySum",
            "DecidesByShare",
            "DecidesByList",
        )
    },
    "DecidesByParity": {
        "mixes_rows": "DecidesByParity itself",
        "decides_by_batch": "DecidesByParity itself, at premises.py:",
    },
    "DecidesByLargest": {"decides_by_batch": "DecidesByLargest itself, at premises.py:"},
    "DecidesByNorm": {"decides_by_batch": "DecidesByNorm itself, at premises.py:"},
    "DecidesBySmallest": {"decides_by_batch": "DecidesBySmallest itself, at premises.py:"},
    "Detached": {"unused": "probe.weight"},
    "EarlyExit": {"conditional": "layers.1.first.weight", "decides_by_batch": "EarlyExit itself, at premises.py:"},
    "ExpertList": {"conditional": "experts.0.up.weight"},
    **{name: {"conditional": "experts.1.up.weight"} for name in ("ExpertsByList", "ExpertsByItem", "ExpertsByCount")},
    "ExpertsByShape": {"conditional": "experts.1.up.weight"},
    "ForOneToken": {"conditional": "adapter.weight"},
    "LayerDrop": {"conditional": "layers.1.first.weight"},
    "OnTheSphere": {"parameters": "head.weight"},
    "OwnGenerator": {"generators": "layers.0"},
    "RunningMean": {"buffers": "mean"},
    "Shared": {"mixes_rows": "Shared itself"},
    "ShiftsLater": {"changes": "calls"},
    "SortedByBatch": {"mixes_rows": "SortedByBatch itself"},
    "Spare": {"unused": "spare.weight"},
    "SparseGradient": {"sparse": "embedding.weight"},
    "Spectral": {"buffers": "mix.parametrizations.weight.0._u"},
    "Warm": {"buffers": "calls"},
    "WarmBlocks": {"buffers": "layers.0.calls"},
    "WithAuxiliaryLoss": {"losses": "aux_loss"},
    "WithLoss": {"losses": "loss"},
}
"""By model: attributes of its premises and a name in each; of models that do not stand here nothing is seen."""


def seen(model: torch.nn.Module) -> dict[str, str]:
    found = {key: value for key, value in vars(play(model)).items() if value}
    return {key: str(value) for key, value in found.items()}


@pytest.mark.first
@pytest.mark.parametrize("name", MODELS)
def test_what_a_forward_does_is_seen(name):
    found, wanted = seen(MODELS[name]()), SEEN.get(name, {})
    assert wanted.keys() <= found.keys() and all(word in found[key] for key, word in wanted.items()), found
    assert found.keys() - wanted.keys() <= ({"unused", "conditional"} if "conditional" in wanted else set()), found


@pytest.mark.first("mpt")
@pytest.mark.parametrize(
    "family", ["bloom", "deepseek_v3", "falcon", "gemma2", "gpt2", "gpt_oss", "llama", "mixtral", "mpt", "olmo2"]
)
def test_of_a_family_nothing_is_seen(family):
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(families.config_of(family))
    assert play(model) == Premises()


def test_what_depends_on_the_rows_is_told_from_what_does_not():
    by_data = {
        name: {w.name: w.by_data for w in play(MODELS[name]()).buffers} for name in ("RunningMean", "Spectral", "Warm")
    }
    assert by_data["RunningMean"] == {"mean": True} and by_data["Warm"] == {"calls": False}
    assert not any(by_data["Spectral"].values())


def test_a_model_stays_as_it_was_and_so_does_chance():
    model = MODELS["RunningMean"]()
    before, state = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    play(model)
    assert torch.equal(torch.get_rng_state(), state) and model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_model_that_cannot_be_played_is_said_to_be_unknown():
    class TakesImages(MODELS["Sound"]):  # type: ignore[misc]
        def forward(self, tokens):
            raise ValueError("pixels, please")

    assert play(TakesImages()).unknown == "ValueError: pixels, please"
    notes = plan(TakesImages(), Layout(dp_shard=2)).notes
    assert any("could not be rehearsed (ValueError: pixels, please)" in note for note in notes)


@pytest.mark.parametrize(("name", "adds_up"), [("Masked", True), ("ClippedByHook", False)])
def test_hooks_are_tried_whether_they_add_up(name, adds_up):
    (hook,) = hooks_of(MODELS[name]())
    assert (hook.kind, hook.adds_up) == ("gradient", adds_up)


DDP2, FSDP2, PP2 = Layout(dp_shard=1, dp_replicate=2), Layout(dp_shard=2), Layout(dp_shard=1, pp=2)
TP2 = Layout(dp_shard=1, tp=2)
LAYOUTS = {
    "ddp": (DDP2, {}),
    "fsdp": (FSDP2, {}),
    "pp": (PP2, {}),
    "tp": (TP2, {}),
    "recomputed": (Layout(dp_shard=1), {"activation_checkpointing": "full"}),
}
REFUSED: dict[str, str] = {
    **dict.fromkeys(("BatchNormOfNow", "Centred", "Contrastive", "Shared", "SortedByBatch"), "ddp fsdp pp"),
    **dict.fromkeys(("BatchNorm", "CountsIds", "RunningMean"), "ddp fsdp pp tp"),
    "CountsTokens": "ddp fsdp pp",
    **dict.fromkeys((name for name in MODELS if name.startswith("DecidesBy")), "ddp fsdp pp"),
    "BlocksCountRows": "ddp fsdp pp tp recomputed",
    "WarmsByTokens": "ddp fsdp pp tp recomputed",
    "ByFrequency": "ddp fsdp pp tp",
    "Carries": "ddp fsdp pp tp recomputed",
    "ChoosesByFirstRow": "ddp fsdp pp tp",
    "Clipped": "ddp fsdp pp tp",
    "ClippedByHook": "ddp fsdp pp tp",
    "EarlyExit": "ddp fsdp pp tp",
    **dict.fromkeys((name for name in MODELS if name.startswith("Expert") and name != "ExpertsInOrder"), "pp tp"),
    "ForOneToken": "pp tp",
    "LayerDrop": "pp tp",
    "Masked": "fsdp tp",
    "OnTheSphere": "fsdp pp tp",
    "OwnGenerator": "recomputed",
    "ShiftsLater": "pp tp recomputed",
    "SparseGradient": "ddp fsdp pp tp recomputed",
    "Spectral": "pp",
    "StepsByHook": "ddp fsdp pp tp",
    "Warm": "pp",
    "WarmBlocks": "pp recomputed",
}
"""The layouts that the rules of premises refuse; all others are planned."""


@pytest.mark.first
@pytest.mark.parametrize("name", MODELS)
def test_what_a_layout_would_change_is_refused_and_nothing_else(name):
    from meshwright.introspection.facts import model_facts
    from meshwright.planning import premise_rules
    from meshwright.planning.techniques import Techniques
    from meshwright.planning.values import Case

    facts, refused = model_facts(MODELS[name]()), []
    for key, (layout, requested) in LAYOUTS.items():
        technique = {"ddp": "ddp", "fsdp": "fully_shard"}.get(key, "none")
        case = Case(facts, layout, Techniques(**requested), None, technique, "cpu")  # type: ignore[arg-type]
        rules = [
            rule
            for rule in vars(premise_rules).values()
            if getattr(rule, "__annotations__", {}).get("return") == "Found"
        ]
        errors = [error for rule in rules for error in rule(case)]
        assert all(isinstance(error, UnsupportedError) for error in errors)
        refused += [key] if errors else []
    assert " ".join(refused) == REFUSED.get(name, "")


# --- coins

COINS = {
    "bernoulli": lambda: bool(torch.bernoulli(torch.tensor(0.3))),
    "bernoulli_": lambda: bool(torch.zeros(()).bernoulli_(0.3)),
    "normal": lambda: float(torch.randn(())) > 1.2,
    "band": lambda: 0.3 < float(torch.rand(())) < 0.4,
    "integer": lambda: int(torch.randint(0, 3, ())) == 0,
    "python": lambda: random.choice([0, 0, 0, 1]) == 1,
    "numpy": lambda: np.random.randint(3) == 0,
}
NEVER = {
    "bernoulli": lambda: bool(torch.bernoulli(torch.tensor(0.0))),
    "uniform": lambda: float(torch.rand(())) < 0.0,
    "python": lambda: random.random() < 0.0,
}


def skipping(coin):
    class Skipping(MODELS["LayerDrop"]):  # type: ignore[misc]
        def forward(self, tokens):
            x = self.embedding(tokens)
            for layer in self.layers:
                x = x if coin() else layer(x)
            return self.head(self.norm(x))

    return play(Skipping())


@pytest.mark.first
@pytest.mark.parametrize("coin", COINS)
def test_a_coin_is_seen_whatever_it_is_tossed_by(coin):
    assert "layers.1.first.weight" in skipping(COINS[coin]).conditional


@pytest.mark.first
@pytest.mark.parametrize("coin", NEVER)
def test_a_coin_that_never_falls_is_none(coin):
    assert skipping(NEVER[coin]) == Premises()


# --- faults


def numbers_of_rows_are_alike():
    kind = premises.WrittenState
    return patch.object(premises, "WrittenState", lambda *args, by_number, **more: kind(*args, **more))


def random_draws_run_on():
    return patch.object(playing, "_still", lambda func, args, out: out)


def conditions_as_they_are():
    return patch.object(playing.HeldRandomness, "_read", lambda self, value: value)


def numbers_never_move():
    return patch.object(playing.Reading, "others", lambda self: [])


def no_row_is_alone():
    return patch.object(premises, "_beside_others", lambda model, first: "")


def shares_are_means():
    return patch.object(playing, "COMPARISONS", dict.fromkeys(playing.COMPARISONS, 0))


def rows_are_never_compared():
    return patch.object(premises, "_mixing", lambda together, halves: "")


FAULTS = {
    "numbers_of_rows_are_alike": "CountsTokens",
    "random_draws_run_on": "Dropping",
    "conditions_as_they_are": "ForOneToken",
    "rows_are_never_compared": "Centred",
    "numbers_never_move": "DecidesByMean",
    "no_row_is_alone": "DecidesByDifferentIds",
    "shares_are_means": "ExpertsByCount",
}


@pytest.mark.kills("premises", "fault")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_rehearsal_is_caught(fault):
    name = FAULTS[fault]
    with globals()[fault](), pytest.raises(AssertionError):
        test_what_a_forward_does_is_seen(name)
        test_what_a_layout_would_change_is_refused_and_nothing_else(name)


# --- the model that is looked at stays as it is


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(32, 8)
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)) for _ in range(2)
        )
        self.head = torch.nn.Linear(8, 32)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def recomputed(model: Two) -> None:
    for layer in model.layers:
        recompute.recompute(layer)


def closed_over(model: Two) -> None:
    for layer in model.layers:
        layer.forward = (lambda forward: lambda x: x + forward(x))(layer.forward)


def hooked(model: Two) -> None:
    model.register_module("scale", scale := torch.nn.Linear(8, 8))
    model.head.register_forward_pre_hook(lambda _module, args: (scale(args[0]),))


def partly(model: Two) -> None:
    layer = model.layers[0]
    layer.forward = functools.partial(lambda inner, x: x + inner(x), layer.get_submodule("1"))


@pytest.mark.parametrize("change", [recomputed, closed_over, hooked, partly])
def test_a_forward_that_was_replaced_is_played_on_the_copy(change):
    torch.manual_seed(0)
    model = Two()
    change(model)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    found = play(model)
    assert not found.unknown and all(bool((p.grad == 3.0).all()) for p in model.parameters())  # type: ignore[union-attr]
    assert found.unused == (("layers.0.0.weight", "layers.0.0.bias") if change is partly else ())


HELD = torch.nn.Linear(8, 8, dtype=torch.float64)


def test_a_copy_that_reaches_the_model_itself_says_nothing_and_leaves_no_gradient():
    model = Two()
    setattr(model.layers[0], "0", HELD)
    model.layers[0].forward = reaching_it
    assert play(model) == Premises(unknown="a copy of it computes with the model's own parameters")
    assert all(parameter.grad is None for parameter in model.parameters())


def reaching_it(x):
    return HELD(x)


def test_planning_leaves_the_random_streams_where_they_were():
    model = Two()
    before = torch.get_rng_state(), str(np.random.get_state()), random.getstate()
    plan(model, Layout(dp_shard=2))
    plan(model, Layout(dp_shard=1, tp=2))
    after = torch.get_rng_state(), str(np.random.get_state()), random.getstate()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]


def across_rows(q, k, v, documents):
    """Fused attention from row to row."""
    swapped = (x.transpose(0, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(*swapped).transpose(0, 2)


def test_fused_attention_from_row_to_row_is_seen_where_it_is():
    with pytest.raises(UnsupportedError, match=r"rows of a batch depend on each other in Model: attentions.0"):
        plan(Model(across_rows), Layout(dp_replicate=2, dp_shard=1))
