"""Calls of ``flex_attention`` over cut rows: what one process computes, or a refusal in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.mixing import Model, causal, packed, windowed
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, and_masks, create_block_mask, flex_attention

from meshwright import ConfigError, Layout, UnsupportedError, plan
from meshwright.distributed.context import rows as reaches
from meshwright.distributed.context.proof import prove, rehearse, rehearsed
from meshwright.distributed.rehearsal import LARGEST_ERROR
from meshwright.introspection.facts import model_facts
from meshwright.introspection.mixing import arithmetic
from meshwright.introspection.mixing.arithmetic import Arithmetic, PlaceMask, computing_flex, formula
from meshwright.introspection.mixing.interception import AttentionCall
from meshwright.introspection.mixing.masks import replaced
from meshwright.introspection.mixing.measure import measure_mixing, small_copy
from meshwright.planning.context.plan import ContextPlan, plan_methods


def causal_mod(row: Any, head: Any, query: Any, key: Any) -> Any:
    return key <= query


def window_mod(row: Any, head: Any, query: Any, key: Any) -> Any:
    return (key <= query) & (query - key < 5)


def every_other_mod(row: Any, head: Any, query: Any, key: Any) -> Any:
    return (key <= query) & ((query - key) % 2 == 0)


def by_head_mod(row: Any, head: Any, query: Any, key: Any) -> Any:
    return (key <= query) & (query - key < 4 + head)


def far_by_head_mod(row: Any, head: Any, query: Any, key: Any) -> Any:
    return (key <= query) & (query - key < 100 + head)


def of_documents(mask: Callable[..., Any], documents: Tensor | None) -> Callable[..., Any]:
    """Restrict a mask to a batch's documents, as a model does with those that it is given."""
    if documents is None:
        return mask

    def same(row: Any, head: Any, query: Any, key: Any) -> Any:
        return documents[row, query] == documents[row, key]

    return and_masks(mask, same)


def attending(mask: Callable[..., Any], *, per_document: bool = False, **options: Any) -> Callable[..., Tensor]:
    """Attend as a model does that makes its block mask for the tokens that it is given."""

    def attend(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        function = of_documents(mask, documents) if per_document else mask
        made = create_block_mask(function, len(q), None, q.shape[2], k.shape[2], device="cpu")
        return flex_attention(q, k, v, block_mask=made, **options)

    return attend


def capped(score: Any, row: Any, head: Any, query: Any, key: Any) -> Any:
    return 1.5 * torch.tanh(score / 1.5)


EQUAL = {
    "causal": attending(causal_mod),
    "causal, scaled": attending(causal_mod, scale=0.7),
    "window": attending(window_mod),
    "full": lambda q, k, v, documents: flex_attention(q, k, v),
    "documents": attending(causal_mod, per_document=True),
    "windows in documents": attending(window_mod, per_document=True),
    "holes": attending(every_other_mod),
    "soft cap": attending(causal_mod, score_mod=capped),
    "scores as they are": attending(causal_mod, score_mod=lambda score, *places: score),
}


def planned(model: torch.nn.Module, ranks: int, kind: str = "auto") -> ContextPlan:
    return plan_methods(measure_mixing(model), ranks, 1, kind, "float64")  # type: ignore[arg-type]


def errors(attend: Callable[..., Tensor], ranks: int, kind: str = "auto") -> dict[str, float]:
    model = small_copy(Model(attend))
    made = planned(model, ranks, kind)
    return {kind: max(rehearse(model, made, batch).values()) for kind, batch in rehearsed(model).items()}


@pytest.mark.first
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", EQUAL)
def test_cut_rows_compute_what_one_process_does(name, ranks):
    found = errors(EQUAL[name], ranks)
    assert set(found) == {"plain", "packed", "without positions"} and max(found.values()) < 1e-12, found


@pytest.mark.first
@pytest.mark.parametrize("kind", ["ring", "ulysses", "halo"])
def test_documents_go_by_every_method(kind):
    assert max(errors(EQUAL["windows in documents"], 2, kind).values()) < 1e-12


@pytest.mark.first("documents-packed")
@pytest.mark.parametrize(
    ("of_flex", "of_sdpa"), [("causal", causal), ("documents", packed), ("windows in documents", windowed)]
)
def test_one_process_computes_what_the_same_model_does_without_flex(of_flex, of_sdpa):
    models = [small_copy(Model(attend)) for attend in (EQUAL[of_flex], of_sdpa)]
    models[1].load_state_dict(models[0].state_dict())
    for batch in rehearsed(models[0]).values():
        given = {"document_ids" if key == "documents" else key: value for key, value in batch.items()}
        with computing_flex():
            one = models[0](**given)
        assert torch.allclose(one, models[1](**given), rtol=0, atol=1e-12)


def of_transformers(window: int | None) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.MistralConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        sliding_window=window,
    )
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="flex_attention")


@pytest.mark.first
@pytest.mark.parametrize("method", ["all_gather", "ring"])
@pytest.mark.parametrize("window", [None, 5])
def test_a_model_of_transformers_that_computes_by_flex_attention_is_intercepted(window, method):
    model = of_transformers(window).double()
    made = planned(model, 2, method)
    assert model.config._attn_implementation.endswith("flex_attention")
    found = {kind: max(rehearse(model, made, batch).values()) for kind, batch in rehearsed(model).items()}
    assert len(found) == 5 and max(found.values()) < 1e-12, found


def test_outside_nothing_is_changed():
    q = torch.randn(1, 1, 4, 8, requires_grad=True)
    with computing_flex():
        flex_attention(q, q, q).sum().backward()
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        flex_attention(q, q, q)


@pytest.mark.all
def test_rules_of_masks_are_measured():
    rules = {name: str(measure_mixing(Model(attend)).callers[0].rule) for name, attend in EQUAL.items()}
    assert rules == {
        "causal": "causal",
        "causal, scaled": "causal",
        "window": "causal window 5",
        "full": "full",
        "documents": "causal per document",
        "windows in documents": "causal window 5 per document",
        "holes": "None",
        "soft cap": "causal",
        "scores as they are": "causal",
    }
    assert all(caller.flex for caller in measure_mixing(Model(EQUAL["causal"])).callers)


def test_a_soft_cap_is_recognised():
    (call,) = calls_of(lambda q: flex_attention(q, q, q, score_mod=capped))
    assert call.extras == {"softcap": 1.5}
    allowed = call.mask.dense(1, 1, 4, 4, torch.device("cpu"))
    assert torch.allclose(call.as_given(), formula(Arithmetic(cap="softcap"), call, allowed), rtol=0, atol=1e-12)


def calls_of(attend: Callable[[Tensor], Tensor]) -> list[AttentionCall]:
    class Noting(arithmetic.Handler):
        def attend(self, call: AttentionCall) -> Tensor:
            noted.append(call)
            return call.as_given()

    noted: list[AttentionCall] = []
    with arithmetic.FlexCalls(Noting()):
        attend(torch.randn(1, 1, 4, 8, dtype=torch.float64))
    return noted


def near(score: Any, row: Any, head: Any, query: Any, key: Any) -> Any:
    return score - 0.5 * (query - key)


def of_part(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
    """A mask of a tensor that the model derives from its tokens, and so from a rank's part."""
    groups = torch.arange(q.shape[2]) // 6

    def same(row: Any, head: Any, query: Any, key: Any) -> Any:
        return (key <= query) & (groups[query] == groups[key])

    return flex_attention(q, k, v, block_mask=create_block_mask(same, None, None, q.shape[2], q.shape[2], device="cpu"))


REFUSED = {
    "distances": (attending(causal_mod, score_mod=near), "score_mod = near, which changes scores by another rule than"),
    "heads": (attending(by_head_mod), r"the mask of flex_attention \(by_head_mod\) differs from head to head"),
    "heads, far away": (attending(far_by_head_mod), "differs from head to head"),
    "logarithms": (
        lambda q, k, v, documents: flex_attention(q, k, v, return_aux=AuxRequest(lse=True))[0],
        r"asked for more than its output \(return_lse, return_aux\)",
    ),
    "a tensor of a part": (of_part, "closes over a tensor of .*, one number for each of this rank's"),
}


@pytest.mark.first
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_computed_is_refused(name):
    attend, words = REFUSED[name]
    with pytest.raises(UnsupportedError, match=words):
        facts = model_facts(Model(attend))
        made = plan(facts, Layout(dp_shard=1, cp=2))
        assert made.context is not None
        prove(facts, made.context)


def test_compiled_modules_that_call_it_are_refused():
    with pytest.raises(ConfigError, match=r"flex_attention .* Set techniques.compile = false"):
        plan(Model(EQUAL["causal"]), Layout(dp_shard=1, cp=2), techniques={"compile": True})


def test_tensors_in_nested_masks_are_replaced():
    documents = torch.tensor([[0, 0, 1]])
    made = replaced(of_documents(causal_mod, documents), lambda held: held + torch.tensor([[0, 1, 0]]))
    assert PlaceMask(made).dense(1, 1, 3, 3, torch.device("cpu")).tolist() == [
        [[[True, False, False], [False, True, False], [False, True, True]]]
    ]
    assert replaced(causal_mod, lambda held: held) is causal_mod


# --- faults that the rehearsal finds


def local_places(patch):
    correct = reaches.of_whole_rows

    def local(function, rows, expect):
        made = correct(function, rows, expect)
        numbers = torch.full((rows.length,), 0).index_copy(0, rows.own[0], torch.arange(rows.counts[rows.rank]))
        return replace(made, function=lambda b, h, q, kv: function(b, h, numbers[q], numbers[kv]))

    patch.setattr("meshwright.distributed.context.runtime.of_whole_rows", local)


def documents_of_a_part(patch):
    patch.setattr(reaches, "_whole", lambda held, rows, expect: held)


FAULTS = ((local_places, "window"), (documents_of_a_part, "documents"))


@pytest.mark.kills("context", "fault")
@pytest.mark.parametrize(("fault", "name"), FAULTS, ids=lambda value: getattr(value, "__name__", ""))
def test_the_rehearsal_finds(monkeypatch, fault, name):
    model = small_copy(Model(EQUAL[name]))
    made = planned(model, 2)
    fault(monkeypatch)
    worst = 0.0
    for batch in rehearsed(model).values():
        try:
            worst = max(worst, *rehearse(model, made, batch).values())
        except (UnsupportedError, IndexError):
            worst = torch.inf
    assert not worst <= 1e3 * LARGEST_ERROR
