"""Every style of transformers, applied one by one with torch's own parallelize_module: forward and gradients are
those of one process.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from support.ranks import ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from meshwright import ConfigError, Layout, UnsupportedError
from meshwright.distributed import init_distributed
from meshwright.distributed.parallelizer import to_cpu, translate_to_torch_parallel_style
from meshwright.distributed.tensor.styles import is_transposed, word_of
from meshwright.planning.tensor.styles import STYLES

ROWS, SEQ, DIM, HIDDEN, VOCAB = 2, 6, 8, 12, 18
OF_5_23 = """colwise rowwise colwise_gather_output rowwise_split_input packed_colwise packed_rowwise embedding_rowwise
embedding_colwise
replicated_with_grad_allreduce all_reduce replicate mla_kv_a_proj moe_tp_experts local_params moe_identity_expert
grouped_gemm
ep_dispatch_experts""".split()
OLDER = [
    "colwise_rep",
    "rowwise_rep",
    "sequence_parallel",
    "local",
    "local_colwise",
    "local_rowwise",
    "local_packed_rowwise",
]
EXPERTS = ["moe_tp_experts", "moe_identity_expert", "grouped_gemm", "ep_dispatch_experts"]


# --- translation


@pytest.mark.parametrize("word", [*OF_5_23, *OLDER])
def test_every_style_translates_and_says_what_it_means(word):
    style = translate_to_torch_parallel_style(word)
    assert isinstance(style, ParallelStyle) and style.word == word and style.kind == STYLES[word].kind  # type: ignore[attr-defined]
    assert style.parts == (2 if "packed" in word else 1)  # type: ignore[attr-defined]
    assert translate_to_torch_parallel_style(style) is style and word_of(style, "plan") == word


def test_these_are_all_that_transformers_declares():
    from transformers.distributed import expert_parallel, tensor_parallel  # noqa: F401  (they register)
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    assert set(ALL_PARALLEL_STYLES) <= {*OF_5_23, *OLDER} == set(STYLES)


def test_another_word_is_refused_with_all_that_are_legal():
    with pytest.raises(ValueError) as caught:
        translate_to_torch_parallel_style("colwize")
    assert "Did you mean 'colwise'?" in str(caught.value) and all(word in str(caught.value) for word in STYLES)


def test_torchs_own_styles_are_read():
    class Mine(ParallelStyle):
        def _apply(self, module, device_mesh):
            return module

    mine = Mine()
    assert translate_to_torch_parallel_style(mine) is mine
    words = [
        word_of(style, "plan")
        for style in (
            ColwiseParallel(),
            ColwiseParallel(output_layouts=Replicate()),
            RowwiseParallel(),
            RowwiseParallel(input_layouts=Replicate()),
            SequenceParallel(),
        )
    ]
    assert words == ["colwise", "colwise_gather_output", "rowwise", "rowwise_split_input", "sequence_parallel"]
    with pytest.raises(UnsupportedError, match="the behaviour of a Mine"):
        word_of(mine, "plan")


# --- compositions, each of a few styles, against one process


class Transposed(nn.Module):
    """y = x W + b, the weight stored (in, out), as older models have it."""

    def __init__(self, into: int, out: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(into, out)), nn.Parameter(torch.empty(out))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.weight.shape[1])


class FeedForward(nn.Module):
    def __init__(self, linear: Callable[..., nn.Module] = nn.Linear, bias: bool = True, hidden: int = HIDDEN):
        super().__init__()
        options = {} if linear is Transposed else {"bias": bias}
        self.up, self.down = linear(DIM, hidden, **options), linear(hidden, DIM, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Packed(nn.Module):
    """Gate and up in one weight."""

    def __init__(self):
        super().__init__()
        self.both, self.down = nn.Linear(DIM, 2 * HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, dim=-1)
        return self.down(torch.tanh(gate) * up)


class Wide(nn.Module):
    """The second layer takes two halves, each of which is cut."""

    def __init__(self, bias: bool = True):
        super().__init__()
        self.left, self.right = nn.Linear(DIM, HIDDEN), nn.Linear(DIM, HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, DIM, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.cat([torch.tanh(self.left(x)), self.right(x) ** 2], dim=-1))


class Normed(nn.Module):
    """Four heads with one norm for all, as of queries; a module that stays whole beside."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down, self.after = (
            nn.Linear(DIM, 16),
            nn.RMSNorm(4),
            nn.Linear(16, DIM),
            nn.LayerNorm(DIM),
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = self.up(x)
        return self.after(self.down(self.norm(heads.unflatten(-1, (-1, 4))).flatten(-2)))


class Latent(nn.Module):
    """What multi-head latent attention does with its compressed keys: one part is projected for each head, one is
    used by all heads.
    """

    def __init__(self):
        super().__init__()
        self.compress, self.expand, self.out = nn.Linear(DIM, 6), nn.Linear(4, 16), nn.Linear(24, DIM)
        self.compress.qk_rope_head_dim = 2  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        kept, rotated = self.compress(x).split([4, 2], dim=-1)
        heads = self.expand(kept).unflatten(-1, (-1, 4))
        every = rotated.unsqueeze(-2).expand(*heads.shape[:-1], 2)
        return self.out(torch.tanh(torch.cat([heads, every], dim=-1)).flatten(-2))


class Ends(nn.Module):
    def __init__(self, vocabulary: int = VOCAB):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, DIM, padding_idx=1), nn.Linear(DIM, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(ids)))


def silent(bias: bool = False) -> nn.Module:
    return FeedForward(bias=False)


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, str]]] = {
    "colwise, rowwise": (FeedForward, {"up": "colwise", "down": "rowwise"}),
    "stored (in, out)": (lambda: FeedForward(Transposed), {"up": "colwise", "down": "rowwise"}),
    "gathered and split": (FeedForward, {"up": "colwise_gather_output", "down": "rowwise_split_input"}),
    "gathered and split, unevenly": (
        lambda: FeedForward(hidden=14),
        {"up": "colwise_gather_output", "down": "rowwise_split_input"},
    ),
    "the older words": (FeedForward, {"up": "colwise_rep", "down": "rowwise_rep"}),
    "packed_colwise": (Packed, {"both": "packed_colwise", "down": "rowwise"}),
    "packed_rowwise": (Wide, {"left": "colwise", "right": "colwise", "down": "packed_rowwise"}),
    "replicated": (
        Normed,
        {"up": "colwise", "norm": "replicated_with_grad_allreduce", "down": "rowwise", "after": "replicate"},
    ),
    "as sequence_parallel norms are": (
        Normed,
        {"up": "colwise", "norm": "sequence_parallel", "down": "rowwise", "after": "local_params"},
    ),
    "mla_kv_a_proj": (Latent, {"compress": "mla_kv_a_proj", "expand": "colwise", "out": "rowwise"}),
    "embedding_rowwise": (Ends, {"embed": "embedding_rowwise", "head": "colwise_gather_output"}),
    "embedding_rowwise, unevenly": (lambda: Ends(19), {"embed": "rowwise_rep", "head": "colwise_gather_output"}),
    "embedding_colwise": (Ends, {"embed": "embedding_colwise", "head": "colwise_gather_output"}),
    "silent": (silent, {"up": "local_colwise", "down": "local_rowwise", "": "all_reduce"}),
    "silent and packed": (
        lambda: Wide(bias=False),
        {"left": "local_colwise", "right": "local_colwise", "down": "local_packed_rowwise", "": "all_reduce"},
    ),
}


def built(make: Callable[[], nn.Module]) -> nn.Module:
    model = make().double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64, generator=generator) / 2)
    return model


def inputs(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if isinstance(model, Ends):
        return torch.randint(0, VOCAB, (ROWS, SEQ), generator=generator)
    return torch.randn(ROWS, SEQ, DIM, dtype=torch.float64, generator=generator).requires_grad_()


def computed(model: nn.Module, group_sums: bool = False) -> dict[str, Tensor]:
    """The output, and every gradient."""
    x = inputs(model)
    output = model(x)
    weights = torch.randn(output.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (output * weights).sum().backward()
    found = {name: to_cpu(p.grad) for name, p in model.named_parameters() if p.grad is not None} | {
        "output": output.detach()
    }
    if x.requires_grad:
        assert x.grad is not None
        if group_sums:
            dist.all_reduce(x.grad)
        found["input"] = x.grad
    return found


@pytest.mark.all
@pytest.mark.parametrize("ranks", [2, 4])
@ranks(lambda ranks: ranks)
def test_styles_compute_what_one_process_computes(ranks):
    mesh = init_distributed(Layout(dp_shard=1, tp=ranks))
    assert mesh is not None
    errors = {}
    for name, (make, words) in CASES.items():
        wanted = computed(built(make))
        model = built(make)
        for path, word in words.items():
            parallelize_module(model, mesh["tp"], {path: translate_to_torch_parallel_style(word)})
        found = computed(model, group_sums=name.startswith("silent"))
        assert found.keys() == wanted.keys()
        errors[name] = {key: ((found[key] - w).norm() / w.norm()).item() for key, w in wanted.items()}
        cut = [p for p in model.parameters() if isinstance(p, DTensor) and not p.placements[0].is_replicate()]
        errors[name]["cut"] = 0.0 if cut and all(p.to_local().numel() < p.numel() for p in cut) else 1.0
    assert errors.keys() == CASES.keys()
    assert not {(name, key): e for name, by in errors.items() for key, e in by.items() if not e < 1e-12}


def test_every_style_that_can_be_applied_is_compared():
    assert {word for _, words in CASES.values() for word in words.values()} | {*EXPERTS, "local"} == set(STYLES)


# --- refusals

REFUSED: list[tuple[str, Callable[[], nn.Module], type[Exception], str]] = [
    ("colwise", lambda: nn.LayerNorm(8), ConfigError, "style 'colwise' is for a linear layer, and this is a LayerNorm"),
    ("colwise", lambda: nn.Embedding(8, 8), ConfigError, "this is a Embedding"),
    ("embedding_rowwise", lambda: nn.Linear(8, 8), ConfigError, "is for an embedding"),
    ("rowwise", lambda: nn.Linear(1, 8), ConfigError, "has 1 slices along dim 1, too few for 2 ranks"),
    ("packed_colwise", lambda: nn.Linear(8, 6), ConfigError, "no 2 equal parts that 2 ranks can share"),
    ("local_rowwise", lambda: nn.Linear(8, 8), ConfigError, "Legal here: rowwise"),
    ("mla_kv_a_proj", lambda: nn.Linear(8, 8), ConfigError, "needs qk_rope_head_dim"),
    *((word, lambda: nn.Linear(8, 8), UnsupportedError, f"style '{word}': experts cannot be cut") for word in EXPERTS),
]


@ranks(2)
def test_what_a_style_cannot_do_is_refused_and_nothing_is_changed():
    mesh = init_distributed(Layout(dp_shard=1, tp=2))
    assert mesh is not None
    found = []
    for word, make, *_ in REFUSED:
        module = make()
        try:
            parallelize_module(module, mesh["tp"], translate_to_torch_parallel_style(word))
            found.append("none")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        assert not any(isinstance(p, DTensor) for p in module.parameters()) and "forward" not in vars(module)
    for (_, _, kind, words), said in zip(REFUSED, found, strict=True):
        assert said.startswith(kind.__name__) and words in said


def test_how_a_weight_is_stored_is_asked_of_the_module():
    assert is_transposed(Transposed(4, 4)) is True and is_transposed(nn.Linear(4, 4)) is False
    assert is_transposed(nn.Embedding(4, 4)) is None and is_transposed(nn.RMSNorm(4)) is None
