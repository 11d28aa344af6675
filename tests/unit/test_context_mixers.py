"""Modules in which tokens meet otherwise than in attention are found, and compute what one process does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support import families
from support.mixing import WIDTH, Model, by_hand, causal, shifted
from support.releases import TRANSFORMERS, not_of_517
from torch import Tensor, nn

from meshwright import Layout, UnsupportedError, plan
from meshwright.distributed.context import modules as applied
from meshwright.distributed.context import rows
from meshwright.distributed.context.proof import prove, rehearse, rehearsed
from meshwright.distributed.context.proof import small_and_plan as small_of
from meshwright.introspection.facts import model_facts


class Shift(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return shifted(x)


class Total(nn.Module):
    """The mean of all tokens before."""

    def forward(self, x: Tensor) -> Tensor:
        count = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)
        return x.cumsum(1) / count[:, None]


class Backwards(nn.Module):
    """A recurrence from a row's end."""

    def __init__(self):
        super().__init__()
        self.decay = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        state, found = torch.zeros_like(x[:, 0]), []
        for token in x.flip(1).unbind(1):
            state = torch.sigmoid(self.decay) * state + token
            found.append(state)
        return torch.stack(found[::-1], dim=1)


class Convolution(nn.Module):
    """Channels each by themselves, over three tokens, between two layers."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.over_tokens = nn.Conv1d(2 * WIDTH, 2 * WIDTH, 3, groups=2 * WIDTH, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        return self.leave(torch.tanh(self.over_tokens(self.enter(x).transpose(1, 2))[..., :length].transpose(1, 2)))


class Counted(nn.Module):
    """A factor that grows with the number of tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.shape[1]


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, str]]] = {
    "shift": (lambda: Model(causal, Shift()), {"between": "its tokens see earlier ones"}),
    "mean": (lambda: Model(causal, Total()), {"between": "its tokens see earlier ones"}),
    "backwards": (lambda: Model(causal, Backwards()), {"between": "its tokens see later ones"}),
    "convolution": (lambda: Model(causal, Convolution()), {"between": "its tokens see earlier ones"}),
    "counted": (lambda: Model(causal, Counted()), {"between": "it counts the tokens of a row"}),
    "attention by hand": (
        lambda: Model(by_hand),
        dict.fromkeys(("attentions.0", "attentions.1"), "its tokens see earlier ones"),
    ),
    "no mixer": (lambda: Model(causal), {}),
}
FAMILIES = {
    "mamba2": {"heads"},
    "lfm2": {"heads"},
    "qwen3_next": {"heads"},
    "recurrent_gemma": {"heads"},
    "jamba": {"whole"},
    "rwkv": {"whole"},
    "mixtral": set(),
    "llama": set(),
}


def errors(model: nn.Module, ranks: int) -> dict[str, float]:
    facts = model_facts(model)
    made = plan(facts, Layout(dp_shard=1, cp=ranks)).context
    assert made is not None
    small, of_small = small_of(facts, made)
    return {kind: max(rehearse(small, of_small, batch).values()) for kind, batch in rehearsed(small).items()}


@pytest.mark.first
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_mixers_are_found_and_computed_on_whole_rows(name, ranks):
    build, expected = MODELS[name]
    made = plan(build(), Layout(dp_shard=1, cp=ranks)).context
    assert made is not None and {m.mixer.path: m.mixer.why for m in made.mixers} == expected
    found = errors(build(), ranks)
    assert {"plain", "packed"} <= set(found) and max(found.values()) < 1e-10, found


@pytest.mark.first("llama-2")
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_mixers_of_families_share_their_heads_out_or_compute_whole_rows(name, ranks):
    model = families.on_cpu(families.config_of(name))
    facts = model_facts(model)
    made = plan(facts, Layout(dp_shard=1, cp=ranks)).context
    assert made is not None and {m.kind for m in made.mixers} <= {*FAMILIES[name], *(["whole"] if ranks == 4 else [])}
    assert bool(made.mixers) == bool(FAMILIES[name])
    refused = prove(facts, made)
    assert set(refused.values()) <= {""}, refused
    assert max(error for kind, error in errors(model, ranks).items() if not kind.startswith("padded")) < 1e-6


@pytest.mark.first
@pytest.mark.parametrize("kind", ["dynamic", "longrope", "default"])
def test_tables_that_depend_on_the_farthest_position_are_computed_for_whole_rows(kind):
    """Ranks whose last token lies before the limit would take the table of short rows."""
    more = {"dynamic": {"factor": 4.0}, "longrope": {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}}
    rope = {"rope_type": kind, "rope_theta": 10_000.0} | more.get(kind, {})
    family = "phi3" if kind == "longrope" else "llama"
    longest = {"original_max_position_embeddings": 64} if kind == "longrope" else {}
    config = families.config_of(family, rope_parameters=rope, max_position_embeddings=64, **longest)
    model = families.on_cpu(config)
    facts = model_facts(model)
    made = plan(facts, Layout(dp_shard=1, cp=2)).context
    assert made is not None
    assert [m.mixer.why for m in made.mixers] == (["it reads how far positions go"] if kind != "default" else [])
    tokens = torch.randint(0, families.VOCABULARY, (1, 100), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens, "positions": torch.arange(100)[None]}
    assert max(rehearse(model.double(), made, batch).values()) < 1e-12


def test_a_model_without_mixing_is_refused():
    class Alone(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.head = nn.Embedding(61, WIDTH), nn.Linear(WIDTH, 61)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.tokens(tokens))

    with pytest.raises(UnsupportedError, match="and has no other module in which tokens meet"):
        plan(Alone(), Layout(dp_shard=1, cp=2))


@pytest.mark.all
@not_of_517
def test_parts_of_whole_rows_on_tensor_ranks_are_refused():
    model = families.on_cpu(families.config_of("mamba2"))
    with pytest.raises(UnsupportedError, match="Set techniques.sequence_parallel = false, or layout.tp = 1"):
        plan(model, Layout(dp_shard=1, cp=2, tp=2))
    made = plan(model, Layout(dp_shard=1, cp=2, tp=2), techniques={"sequence_parallel": False})
    assert made.context is not None and made.context.mixers


# --- broken on purpose


def tokens_in_the_order_of_ranks(monkeypatch):
    def behind_each_other(numbers, x, part):
        start = 0 if int(numbers.index[0, 0]) == 0 else x.shape[2] - part.shape[2]
        x[:, :, start : start + part.shape[2]].copy_(part)

    monkeypatch.setattr(rows.Numbers, "put", behind_each_other)


def heads_of_the_next_rank(monkeypatch):
    correct = applied.take
    monkeypatch.setattr(
        applied, "take", lambda x, dim, parts, rank, ranks: correct(x, dim, parts, (rank + 1) % ranks, ranks)
    )


def numbers_of_the_whole(monkeypatch):
    correct = applied.counting_locally
    monkeypatch.setattr(applied, "counting_locally", lambda numbers: correct([]))


def own_tokens_alone(monkeypatch):
    monkeypatch.setattr(applied, "_whole", lambda forward, args, kwargs, *others: forward(*args, **kwargs))


FAULTS = [
    (tokens_in_the_order_of_ranks, "lfm2"),
    (heads_of_the_next_rank, "mamba2"),
    (numbers_of_the_whole, "mamba2"),
    (own_tokens_alone, "jamba"),
]


@pytest.mark.first
@pytest.mark.parametrize(("fault", "family"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_broken_mixer_is_refused_by_the_rehearsal(monkeypatch, fault, family):
    if fault is heads_of_the_next_rank and TRANSFORMERS == (5, 17):
        pytest.skip("transformers 5.17's Mamba-2 has no heads that ranks share")
    facts = model_facts(families.on_cpu(families.config_of(family)))
    made = plan(facts, Layout(dp_shard=1, cp=2)).context
    assert made is not None
    fault(monkeypatch)
    with pytest.raises(UnsupportedError, match="rows of .* cut over ranks were rehearsed on a small copy"):
        prove(facts, made)
