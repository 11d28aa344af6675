"""The verb: what it prints, and how it ends."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from support.problems import UNTIED
from test_verify import DDP, even, off_by_a_little

from meshwright.cli.main import main
from meshwright.models.decoder_config import SIZES, MoEConfig
from meshwright.planning.layout import Layout
from meshwright.verification.problem import shrunk
from meshwright.verification.testing import assert_layout_equals_single_process

SMALL = ["--model.size=debug", "--data.seq_len=12", "--batch.global_batch=4", "--steps=1"]


@pytest.fixture
def ask(capsys):
    def command(*words):
        status = main(["verify", *words])
        said = capsys.readouterr()
        return status, said.out, said.err

    return command


@pytest.mark.all
def test_several_layouts_are_verified_in_one_go(ask):
    status, out, err = ask(*SMALL, "--layout", "dp_shard=2", "--layout=dp_replicate=3", "--json")
    told = json.loads(out)
    assert (status, err) == (0, "") and [report["equal"] for report in told] == [True, True]
    assert [(r["layout"]["dp_replicate"], r["layout"]["dp_shard"]) for r in told] == [(1, 2), (3, 1)]


def test_every_size_can_be_shrunk_and_keeps_its_structure():
    for config in SIZES.values():
        small = shrunk(config)
        assert small.n_heads // small.n_kv_heads == config.n_heads // config.n_kv_heads
        assert (small.tied_embeddings, small.qk_norm, small.rope_scaling) == (
            config.tied_embeddings,
            config.qk_norm,
            config.rope_scaling,
        )
        assert small.dim <= 128 and small.vocab_size <= 307


def test_a_shrunk_mixture_keeps_its_experts_a_dense_layer_and_their_widths_in_proportion():
    moe = MoEConfig(
        n_experts=64, top_k=6, hidden_dim=2048, n_shared=1, first_dense=3, router="sigmoid", n_groups=8, top_groups=4
    )
    small = shrunk(replace(SIZES["8B"], moe=moe))
    assert small.n_layers == 2 and small.moe == replace(moe, hidden_dim=32, first_dense=1) and small.dim == 64
    assert shrunk(replace(SIZES["8B"], moe=replace(moe, hidden_dim=0))).expert_dim == small.hidden_dim


@pytest.mark.all
def test_a_shrunk_model_is_verified_in_the_words_of_people(ask):
    status, out, _ = ask("--model.size=70B", "--shrink", "--batch.global_batch=2", "--steps=1", "--layout=dp_shard=2")
    assert status == 0 and out.startswith("dp_shard=2: equal within rounding") and "float32  gradient   equal" in out


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ([], 2, "no layout to verify: name one, like --layout"),
        (["--layout", "dp_shrd=2"], 2, "Did you mean 'dp_shard'"),
        (["--layout=dp_shard=2", "--model.size=70B"], 2, "--shrink makes a small model of the same structure"),
        (["--layout=dp_shard=2", "--max-world=4"], 2, "--max-world says how far --all goes"),
        (["--layout=dp_shard=2", "--steps=0"], 2, "--steps = 0 is out of range: it must be 1 or more"),
        (["--layout=dp_shard=2", "--model", "support.nothing:Model"], 2, "cannot import 'support.nothing:Model'"),
        (
            ["--layout=dp_shard=2", "--model", "support.foreign:Blocks", "--shrink"],
            3,
            "let its factory build a small one",
        ),
        (["--layout"], 2, "--layout needs a value: text, such as --layout dp_shard=2,tp=2"),
    ],
)
def test_refusals_teach(ask, words, status, said):
    found, out, err = ask(*words)
    assert found == status and said in err and "Traceback" not in err and not out


@pytest.mark.all
def test_the_assertion_for_other_peoples_tests_fails_with_the_report(pool):
    assert_layout_equals_single_process(UNTIED, Layout(dp_shard=2), even, steps=1, pool=pool)
    with pytest.raises(
        AssertionError,
        match=r"DIFFERS.*\n.*first differs at the initial weight layers.1.attention.wq.weight, on rank 1",
    ):
        assert_layout_equals_single_process(
            UNTIED, DDP, even, steps=1, parallelize_fn=off_by_a_little, dtypes=("float64",), pool=pool
        )
