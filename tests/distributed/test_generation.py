"""Texts with kept keys and values: those of transformers' own generation, of no cache, and of one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.families import saved
from support.problems import DDP2, FSDP2, ONE
from support.ranks import ranks

from meshwright import ConfigError, Layout, parallelize, pretrained
from meshwright.distributed.step.generation import Cached, Sampling, next_logits
from meshwright.introspection.source import read_causal_lm
from meshwright.models.decoder import AttentionCore, Decoder
from meshwright.models.decoder_config import DecoderConfig, MoEConfig

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
TP2, PP2, CP2 = Layout(tp=2, dp_shard=1), Layout(pp=2, dp_shard=1), Layout(cp=2, dp_shard=1)
LAID_OUT = {"one": ONE, "ddp": DDP2, "fsdp": FSDP2, "tp": TP2, "pp": PP2, "cp": CP2}
DECODER = DecoderConfig(64, 32, 2, 4, 2, 48, 24, qk_norm=True)


def texts(source, layout, weights=None, precision="float64"):
    """Texts of a model, whether it recomputes them, and hooks that are left on its attention."""
    techniques = {"precision": {"master": precision}}
    model = parallelize(source, layout, techniques=techniques, seed=4, weights=weights and pretrained(weights))
    found = [
        model.generate(PROMPT, 8, temperature=0),
        model.generate(PROMPT, 8, temperature=0.9, seed=5),
        model.generate(PROMPT, 20, temperature=0),  # beyond the decoder's window
    ]
    cores = [module for module in model.parts[0].modules() if isinstance(module, AttentionCore)]
    return found, model.recomputes_text, sum(len(core._forward_pre_hooks) for core in cores)


def forwards(model, ids, tokens, window):
    """The likeliest text, by plain forwards of the whole window."""
    ids = list(ids)
    for _ in range(tokens):
        ids.append(int(model(torch.tensor([ids[-window:]]))[0, -1].argmax()))
    return ids[-tokens:]


@pytest.mark.all
@pytest.mark.parametrize("name", LAID_OUT)
def test_the_decoder_writes_the_same_text_on_every_layout(spmd, name):
    (alone, reason, hooks), *_ = spmd(1, texts, DECODER, ONE)
    assert (reason, hooks) == ("", 0)
    for found, reason, hooks in spmd(LAID_OUT[name].world, texts, DECODER, LAID_OUT[name]):
        assert found == alone and hooks == 0
        assert (reason != "") == (name in ("pp", "cp")) and (not reason or f"layout.{name}" in reason)


def by_plain_torch():
    model = parallelize(DECODER, ONE, techniques={"precision": {"master": "float64"}}, seed=4)
    plain = Decoder(DECODER).double()
    plain.load_state_dict(model.state_dict())
    return forwards(plain.eval(), PROMPT, 8, 24), forwards(plain, PROMPT, 20, 24)


def test_the_decoder_writes_what_plain_forwards_do(spmd):
    (short, long), *_ = spmd(1, by_plain_torch)
    (found, _, _), *_ = spmd(1, texts, DECODER, ONE)
    assert found[0] == short and found[2] == long


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    found = {}
    for family in ("llama", "gemma3_text", "qwen3_moe", "gpt2"):
        found[family] = tmp_path_factory.mktemp(family)
        saved(found[family], family)
    return found


def by_transformers(folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager").eval()
    prompt = torch.tensor([PROMPT])
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[0, len(PROMPT) :].tolist()


def of_folder(folder, layout):
    return texts(read_causal_lm(folder, dtype="float64"), layout, folder)


@pytest.mark.all
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe", "gpt2"])
@pytest.mark.parametrize("name", ["one", "fsdp", "tp", "pp"])
def test_models_of_transformers_write_what_transformers_generates(spmd, folders, family, name):
    (expected,) = spmd(1, by_transformers, folders[family])
    for found, reason, _ in spmd(LAID_OUT[name].world, of_folder, folders[family], LAID_OUT[name]):
        assert found[0] == expected
        assert (reason != "") == (name == "pp"), reason


@pytest.mark.parametrize("name", ["one", "fsdp", "tp"])
@ranks(lambda name: LAID_OUT[name].world)
def test_logits_with_kept_keys_are_those_of_the_whole_window(name):
    layout = LAID_OUT[name]
    model = parallelize(DECODER, layout, techniques={"precision": {"master": "float64"}}, seed=4)
    ids, found = [*PROMPT, 7, 8, 9, 10, 11, 12], []
    given = model.parts[0], model.plan, model._opening.signature, model._inputs, model._runner.logits, 24
    with torch.no_grad(), next_logits(*given, model._cacheless) as following:
        assert isinstance(following, Cached)
        for end in range(len(PROMPT), len(ids) + 1):
            found.append(following(ids[:end]))
    whole = [model.logits({"tokens": torch.tensor([ids[:end]])})[0, -1] for end in range(len(PROMPT), len(ids) + 1)]
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, whole, strict=True)]
    assert max(errors) <= 1e-12, errors


class Plain(torch.nn.Module):
    """A model whose forward takes ids alone."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(64, 8), torch.nn.Linear(8, 64)

    def forward(self, tokens):
        return self.head(self.embedding(tokens).cumsum(1))


def reasons():
    capacity = replace(DECODER, moe=MoEConfig(n_experts=4, capacity_factor=1.0))
    found = []
    for source in (Plain, capacity):
        model = parallelize(source, ONE)
        ids = model.generate(PROMPT, 4, temperature=0)
        found.append((model.recomputes_text, ids == forwards(model.parts[0].eval(), PROMPT, 4, 24)))
    return found


@pytest.mark.all
def test_models_without_a_cache_say_so_and_compute_whole_windows(spmd):
    ((plain, is_equal), (capacity, is_same)), *_ = spmd(1, reasons)
    assert (
        plain == "Plain.forward takes no keys and values (cache or past_key_values)" and "capacity_factor" in capacity
    )
    assert is_equal and is_same


def judged_with(shift):
    """A text and the verdict, where kept positions are ``shift`` too far."""
    from meshwright.distributed.step import generation

    arange = torch.arange
    model = parallelize(DECODER, ONE, techniques={"precision": {"master": "float64"}}, seed=4)
    generation.torch.arange = lambda *a, **k: arange(*a, **k) + (shift if a and a[0] else 0)
    try:
        return model.generate(PROMPT, 8, temperature=0), model.recomputes_text
    finally:
        generation.torch.arange = arange


def test_a_cache_that_is_not_exact_is_noticed_and_left(spmd):
    (right, reason), *_ = spmd(1, judged_with, 0)
    (found, complaint), *_ = spmd(1, judged_with, 1)
    assert reason == "" and "its logits differ by" in complaint and found == right


@pytest.mark.parametrize("options", [{"top_k": 3}, {"top_p": 0.6}, {"top_k": 5, "top_p": 0.8}, {"top_k": 99}], ids=str)
def test_fewer_ids_are_sampled_from_as_transformers_does(options):
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(64, generator=torch.Generator().manual_seed(0)).double()
    expected = TemperatureLogitsWarper(0.7)(None, logits[None])
    if "top_k" in options:
        expected = TopKLogitsWarper(options["top_k"])(None, expected)
    if "top_p" in options:
        expected = TopPLogitsWarper(options["top_p"])(None, expected)
    assert torch.equal(Sampling(0.7, **options)._cut(logits / 0.7), expected[0])
    for wrong in ({"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}, {"temperature": -1.0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Sampling(**wrong)
