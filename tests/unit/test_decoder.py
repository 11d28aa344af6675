"""The decoder against independent formulas: positions, masks, grouped heads, dtypes, and the published sizes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.models.decoder import AttentionCore, Decoder, document_mask, rotary_frequencies, rotary_tables, rotate
from meshwright.models.decoder_config import SIZES, DecoderConfig, MoEConfig, RopeScaling, parameter_count

SMALL = DecoderConfig(61, 24, 2, n_heads=6, n_kv_heads=2, hidden_dim=17, max_seq_len=32, qk_norm=True)

PUBLISHED = {"125M": 124_635_456, "1B": 1_235_814_400, "8B": 8_030_261_248, "70B": 70_553_706_496}
"""MobileLLM-125M (arXiv 2402.14905), Llama 3.2 1B, Llama 3 8B and 70B (their model cards)."""


def decoder(config: DecoderConfig = SMALL, dtype: torch.dtype = torch.float64) -> Decoder:
    """A decoder with weights large enough that every part of it matters."""
    model = Decoder(config).to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.5, generator=generator)
    return model


def tokens(rows: int = 2, seq: int = 12, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, SMALL.vocab_size, (rows, seq), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "config", [SMALL, replace(SMALL, moe=MoEConfig(n_experts=4, hidden_dim=8))], ids=["dense", "experts"]
)
def test_a_decoder_on_a_real_device_begins_by_its_law(config):
    torch.manual_seed(3)
    model = Decoder(config)
    for name, parameter in model.named_parameters():
        kind, value = model.weight_law(name)
        if kind == "constant":
            assert (parameter == value).all(), name
        else:
            assert abs(parameter.std().item() / value - 1) < 0.3, name
    torch.manual_seed(3)
    assert all(torch.equal(a, b) for a, b in zip(Decoder(config).parameters(), model.parameters(), strict=True))


@pytest.mark.first
@pytest.mark.parametrize("size", SIZES)
def test_sizes_have_the_published_number_of_parameters(size):
    with torch.device("meta"):
        model = Decoder(SIZES[size])
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED.get(size, parameter_count(SIZES[size]))
    assert parameter_count(SIZES[size]) == PUBLISHED.get(size, parameter_count(SIZES[size]))
    assert all(p.is_meta for p in model.parameters())


# --- a second implementation, in complex numbers and loops


def rotated_by_complex_numbers(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """x: (rows, heads, seq, head), pairs (i, i + head / 2) as real and imaginary part, turned by position ·
    theta^(-2i / head).
    """
    half = x.shape[-1] // 2
    frequency = torch.tensor([theta ** (-2 * i / x.shape[-1]) for i in range(half)], dtype=torch.float64)
    turn = torch.polar(torch.ones(()).double(), (positions.double().unsqueeze(-1) * frequency).unsqueeze(1))
    turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * turn
    return torch.cat((turned.real, turned.imag), dim=-1)


def by_loops(model: Decoder, ids: torch.Tensor, positions: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """The whole decoder again, one query at a time, with no code of the model."""
    c, w = model.config, dict(model.named_parameters())

    def norm(x, weight):
        return x / (x.pow(2).mean(-1, keepdim=True) + c.norm_eps).sqrt() * weight

    x = w["embedding.weight"][ids]
    rows, seq, _ = x.shape
    for layer in range(c.n_layers):
        p = {name.removeprefix(f"layers.{layer}."): value for name, value in w.items()}
        h = norm(x, p["attention_norm.weight"])
        heads = {}
        for name, count in (("wq", c.n_heads), ("wk", c.n_kv_heads), ("wv", c.n_kv_heads)):
            heads[name] = (h @ p[f"attention.{name}.weight"].T).view(rows, seq, count, c.head_dim).transpose(1, 2)
        q, k, v = heads["wq"], heads["wk"], heads["wv"]
        if c.qk_norm:
            q, k = norm(q, p["attention.q_norm.weight"]), norm(k, p["attention.k_norm.weight"])
        q, k = (rotated_by_complex_numbers(z, positions, c.rope_theta) for z in (q, k))
        out = torch.zeros_like(q)
        for row in range(rows):
            for head in range(c.n_heads):
                group = head // (c.n_heads // c.n_kv_heads)
                for here in range(seq):
                    seen = [there for there in range(here + 1) if documents[row, there] == documents[row, here]]
                    weights = torch.softmax(k[row, group, seen] @ q[row, head, here] / math.sqrt(c.head_dim), dim=0)
                    out[row, head, here] = weights @ v[row, group, seen]
        x = x + out.transpose(1, 2).flatten(-2) @ p["attention.wo.weight"].T
        h = norm(x, p["feed_forward_norm.weight"])
        gate = h @ p["feed_forward.w_gate.weight"].T
        x = x + (gate * torch.sigmoid(gate) * (h @ p["feed_forward.w_up.weight"].T)) @ p["feed_forward.w_down.weight"].T
    head = w["embedding.weight"] if c.tied_embeddings else w["head.weight"]
    return norm(x, w["norm.weight"]) @ head.T


@pytest.mark.parametrize(
    "config", [SMALL, replace(SMALL, qk_norm=False, tied_embeddings=True, n_kv_heads=6, rope_theta=100.0)]
)
def test_the_decoder_equals_a_second_implementation(config):
    model, ids = decoder(config), tokens(2, 9)
    positions = torch.randint(0, 30, ids.shape, generator=torch.Generator().manual_seed(1))
    documents = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2], [5, 5, 5, 5, 5, 5, 3, 3, 5]])
    with torch.no_grad():
        torch.testing.assert_close(
            model(ids, positions, documents), by_loops(model, ids, positions, documents), rtol=1e-12, atol=1e-12
        )


@given(
    half=st.integers(1, 8), theta=st.floats(10, 1e6), positions=st.lists(st.integers(0, 5000), min_size=1, max_size=6)
)
@settings(max_examples=40, derandomize=True, database=None)
def test_rotation_is_a_product_of_complex_numbers(half, theta, positions):
    config = replace(SMALL, dim=2 * half, n_heads=1, n_kv_heads=1, rope_theta=theta)
    where = torch.tensor([positions])
    x = torch.randn(1, 2, len(positions), 2 * half, dtype=torch.float64, generator=torch.Generator().manual_seed(half))
    found = rotate(x, *rotary_tables(config, where, torch.float64))
    torch.testing.assert_close(found, rotated_by_complex_numbers(x, where, theta), rtol=1e-9, atol=1e-9)


def test_scaled_frequencies_follow_the_three_bands_of_llama_3():
    """Wave lengths below original / high stay, above original / low are divided by the factor, in between they are
    mixed.
    """
    scaling = RopeScaling(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192)
    config = replace(SIZES["1B"], rope_scaling=scaling)
    found = rotary_frequencies(config, torch.device("cpu"), torch.float64)
    bands = set()
    for i, frequency in enumerate(found.tolist()):
        plain = config.rope_theta ** (-2 * i / config.head_dim)
        length = 2 * math.pi / plain
        if length < 8192 / 4:
            expected, band = plain, "kept"
        elif length > 8192 / 1:
            expected, band = plain / 32, "stretched"
        else:
            share = (8192 / length - 1) / (4 - 1)
            expected, band = (1 - share) * plain / 32 + share * plain, "mixed"
        bands.add(band)
        assert frequency == pytest.approx(expected, rel=1e-12)
    assert bands == {"kept", "stretched", "mixed"}


@pytest.mark.parametrize("size", ["1B", "8B"])
def test_frequencies_are_those_of_transformers(size):
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    ours = SIZES[size]
    parameters = {"rope_type": "default", "rope_theta": ours.rope_theta}
    if (s := ours.rope_scaling) is not None:
        parameters |= {
            "rope_type": "llama3",
            "factor": s.factor,
            "original_max_position_embeddings": s.original_max_seq_len,
        }
        parameters |= {"low_freq_factor": s.low_freq_factor, "high_freq_factor": s.high_freq_factor}
    config = LlamaConfig(
        hidden_size=ours.dim,
        num_attention_heads=ours.n_heads,
        max_position_embeddings=ours.max_seq_len,
        rope_parameters=parameters,
    )
    if s is None:
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        theirs = LlamaRotaryEmbedding(config).inv_freq
    else:
        theirs, factor = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        assert factor == 1.0
    torch.testing.assert_close(rotary_frequencies(ours, torch.device("cpu"), torch.float32), theirs, rtol=1e-5, atol=0)


# --- masks


def test_packed_documents_equal_their_separate_forwards():
    model = decoder()
    lengths = (5, 1, 4, 2)
    parts = [tokens(1, length, seed) for seed, length in enumerate(lengths)]
    packed = torch.cat(parts, dim=1)
    documents = torch.cat([torch.full((1, n), i) for i, n in enumerate(lengths)], dim=1)
    positions = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)
    with torch.no_grad():
        together = model(packed, positions, documents)
        apart = torch.cat([model(part) for part in parts], dim=1)
    torch.testing.assert_close(together, apart, rtol=1e-11, atol=1e-11)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
@settings(max_examples=30, derandomize=True, database=None)
def test_the_document_mask_is_its_definition(ids):
    mask = document_mask(torch.tensor([ids]), torch.float32)[0, 0]
    seen = [[j <= i and ids[i] == ids[j] for j in range(len(ids))] for i in range(len(ids))]
    assert mask.tolist() == [[0 if may else -math.inf for may in row] for row in seen]


@pytest.mark.parametrize("with_documents", [False, True])
def test_the_future_is_not_seen(with_documents):
    model, ids = decoder(), tokens(1, 10)
    documents = torch.zeros_like(ids) if with_documents else None
    later = ids.clone()
    later[0, 6:] = (later[0, 6:] + 1) % SMALL.vocab_size
    with torch.no_grad():
        before, after = model(ids, None, documents), model(later, None, documents)
    torch.testing.assert_close(before[:, :6], after[:, :6], rtol=1e-12, atol=1e-12)
    assert (before[:, 6:] - after[:, 6:]).abs().amax(-1).min() > 1e-3


# --- heads, dtypes, lengths


def test_blocks_keep_one_mask_together():
    model, ids, kept = decoder(), tokens(2, 10), set()

    def save(tensor):
        if tensor.shape[-2:] == (10, 10):
            kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        logits = model(ids, None, ids)
    assert logits.requires_grad and len(kept) == 1 < len(model.layers)


@pytest.mark.parametrize(("device", "masked", "heads"), [("cuda", True, 6), ("cuda", False, 2), ("cpu", True, 2)])
def test_fused_kernels_of_cuda_are_given_a_mask_or_groups_but_not_both(device, masked, heads, monkeypatch):
    given = []
    attend = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: given.append((a, k)) or attend(*a, **k))
    with FakeTensorMode():
        q, k = (torch.empty(2, n, 10, 4, device=device) for n in (6, 2))
        mask = torch.zeros(2, 1, 10, 10, device=device) if masked else None
        assert AttentionCore()(q, k, k, mask).shape == q.shape
    ((_, keys, values), switches) = given[0]
    assert keys.shape[1] == values.shape[1] == heads and switches["enable_gqa"] == (heads == 2)


def test_grouped_heads_equal_repeated_ones():
    grouped = decoder(SMALL)
    full = Decoder(replace(SMALL, n_kv_heads=SMALL.n_heads)).double()
    state = grouped.state_dict()
    for name, weight in state.items():
        if name.endswith(("wk.weight", "wv.weight")):
            heads = weight.view(SMALL.n_kv_heads, SMALL.head_dim, SMALL.dim)
            state[name] = heads.repeat_interleave(SMALL.n_heads // SMALL.n_kv_heads, dim=0).flatten(0, 1)
    full.load_state_dict(state)
    with torch.no_grad():
        torch.testing.assert_close(grouped(tokens()), full(tokens()), rtol=1e-12, atol=1e-12)


def test_fp64_stays_fp64():
    """Nothing in between rounds to fp32: the logits change smoothly under a shift of one weight by 1e-12."""
    model, ids = decoder(), tokens()
    with torch.no_grad():
        before = model(ids)
        weight = model.layers["0"].attention.wq.weight
        kept = weight[0, 0].item()
        changes = []
        for step in (1e-12, 2e-12):
            weight[0, 0] = kept + step
            changes.append(model(ids) - before)
    assert before.dtype == torch.float64
    assert changes[0].norm() > 0
    torch.testing.assert_close(
        changes[1].norm() / changes[0].norm(), torch.tensor(2.0, dtype=torch.float64), rtol=0.05, atol=0
    )


def test_bf16_computes_its_norms_in_fp32():
    """The norm of bf16 numbers is the rounded norm of the same numbers in fp32."""
    norm = decoder(dtype=torch.bfloat16).norm
    x = 30 * torch.randn(4, SMALL.dim, generator=torch.Generator().manual_seed(3)).bfloat16()
    expected = F.rms_norm(x.float(), (SMALL.dim,), norm.weight.float(), SMALL.norm_eps).bfloat16()
    assert norm(x).dtype == torch.bfloat16
    assert torch.equal(norm(x), expected)


def test_too_long_a_sequence_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"33 tokens is longer than the model's max_seq_len = 32"):
        decoder()(tokens(1, 33))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_layers": 0}, "model.n_layers = 0"),
        ({"n_heads": 5}, "model.dim = 24 is not a multiple of model.n_heads = 5"),
        ({"n_heads": 8, "n_kv_heads": 8}, "rotary embeddings need an even head size"),
        ({"n_kv_heads": 4}, "model.n_heads = 6 is not a multiple of model.n_kv_heads = 4"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        replace(SMALL, **change)
