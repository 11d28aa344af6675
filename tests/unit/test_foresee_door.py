"""The public ``foresee`` and ``plan`` for GPUs that need not be here: the command's answers, and its refusals."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch.nn.functional as F
from torch import nn

import meshwright
from meshwright import Batch, Cluster, ConfigError, Layout, Techniques, foresee
from meshwright.cli.main import main
from meshwright.models.decoder_config import SIZES, MoEConfig
from meshwright.planning.build import plan as build_plan
from meshwright.simulation.answer import Proposal
from meshwright.simulation.foresee import CHOSEN

pytestmark = pytest.mark.all

MODEL = replace(SIZES["debug"], n_layers=4)
BATCH = Batch(16, 64, 2)
H100 = Cluster(8, gpu="h100")
PAGE = Path(__file__).parents[2] / "docs/rent.md"


@pytest.fixture(scope="module")
def searched():
    return foresee(MODEL, batch=BATCH, cluster=H100, pins=("pp=1", "cp=1", "recompute=full"))


def test_a_stated_layout_is_planned_for_the_card_and_judged():
    layout = Layout(dp_shard=4, tp=2)
    made = meshwright.plan(MODEL, layout, batch=BATCH, cluster=H100)
    engine = build_plan(MODEL, layout, batch=BATCH, cluster=Cluster(8, 8, "cuda"))
    assert made.device == "cuda" and made.precision.compute == "bfloat16"
    assert replace(made, notes=made.notes[:-1]) == engine
    assert re.fullmatch(r"foreseen on 8 H100: 0\.\d of 85 GB on a GPU \(fits\), .* s for a step", made.notes[-1])
    judged = foresee(MODEL, layout, batch=BATCH, cluster=H100)
    assert judged.chosen is not None and judged.chosen.plan == made and judged.candidates == (judged.chosen,)


def test_techniques_choose_the_dtype_to_compute_in():
    in_float32 = meshwright.plan(
        MODEL,
        Layout(dp_shard=8),
        batch=BATCH,
        cluster=H100,
        techniques={"precision": {"compute": "float32"}},
    )
    assert in_float32.precision.compute == "float32"
    frozen = foresee(MODEL, batch=BATCH, cluster=H100, techniques={"freeze": ["layers"]}, pins=("pp=1", "tp=1")).chosen
    assert frozen is not None and frozen.plan.frozen and frozen.techniques.freeze == ("layers",)
    in_half = {"precision": {"compute": "float16"}}
    with pytest.raises(ConfigError, match="V100 has no products in bfloat16. Set techniques.precision.compute"):
        meshwright.plan(MODEL, Layout(dp_shard=8), batch=BATCH, cluster=Cluster(8, gpu="v100"))
    on_v100 = meshwright.plan(
        MODEL, Layout(dp_shard=8), batch=BATCH, cluster=Cluster(8, gpu="v100"), techniques=in_half
    )
    assert on_v100.precision.compute == "float16"


def test_an_open_layout_is_searched_and_the_plan_is_the_chosen_ones(searched):
    chosen = searched.chosen
    for one in (*searched.candidates, *searched.front):
        assert isinstance(one, Proposal) and one.fits and one.plan.world == 8
        assert {axis: one.plan.size(axis) for axis in ("dp_replicate", "dp_shard", "tp")} == {
            axis: getattr(one.layout, axis) for axis in ("dp_replicate", "dp_shard", "tp")
        }
        assert one.plan.activation_checkpointing == one.techniques.activation_checkpointing == "full"
        again = build_plan(
            MODEL,
            one.layout,
            batch=replace(BATCH, microbatch_rows=one.microbatch),
            cluster=Cluster(8, 8, "cuda"),
            techniques=one.techniques,
        )
        assert replace(one.plan, notes=one.plan.notes[:-1]) == again
    assert chosen == searched.candidates[0]
    times = [one.step_s for one in searched.candidates]
    assert times == sorted(times)


def test_an_open_layout_gives_the_plan_that_foresee_chooses():
    cluster = Cluster(2, gpu="h100")
    chosen = foresee(MODEL, batch=BATCH, cluster=cluster).chosen
    assert chosen is not None and meshwright.plan(MODEL, Layout(), batch=BATCH, cluster=cluster) == chosen.plan


@pytest.mark.fast
def test_attributes_are_the_documented_figures(searched):
    chosen = searched.chosen
    documented = re.findall(r"`(\w+)`", PAGE.read_text().partition("Keys of the JSON: ")[2].partition("\n\n")[0])
    answer = json.loads(searched.to_json())
    assert list(answer) == documented[:8]
    assert sorted(answer["chosen"]) == sorted(documented[8:])
    assert answer == json.loads(json.dumps(searched.to_dict()))
    for name in ("mem_gb", "fits", "step_s", "tok_s_gpu", "mfu", "microbatch"):
        assert answer["chosen"][name] == getattr(chosen, name), name
    assert Layout(**answer["chosen"]["layout"]) == chosen.layout


def test_the_command_prints_what_the_function_returns(tmp_path, capsys):
    flags = ["--model.size=debug", "--data.tokenizer=ids:300:0", "--data.seq_len=64", "--batch.global_batch=16"]
    asked = ["plan", *flags, "--gpus", "2", "--gpu", "h100", "--pin", "pp=1"]
    assert main(asked) == 0
    printed = capsys.readouterr().out
    assert main([*asked, "--json"]) == 0
    answer = capsys.readouterr().out
    model = replace(SIZES["debug"], vocab_size=300, max_seq_len=max(64, SIZES["debug"].max_seq_len))
    found = foresee(
        model, batch=Batch(16, 64, 0, 300), cluster=Cluster(2, gpu="h100"), techniques=Techniques(), pins=["pp=1"]
    )
    assert json.loads(answer) == json.loads(found.to_json())
    assert printed == f"{found}\n"


def test_a_layout_that_does_not_fit_is_no_choice():
    large = replace(SIZES["8B"], n_layers=8)
    judged = foresee(
        large, Layout(dp_replicate=8, dp_shard=1), batch=Batch(64, 4096, 8), cluster=Cluster(8, gpu="l40s")
    )
    (only,) = judged.candidates
    assert judged.chosen is None and not only.fits and only.mem_gb > 48 and not judged.searched
    assert "(does not fit)" in only.plan.notes[-1] and "GB too much" in str(judged)
    assert json.loads(judged.to_json())["chosen"] is None
    with pytest.raises(ConfigError, match="nothing fits on 1 RTX4090: the smallest layout .* GB too much"):
        foresee(SIZES["8B"], batch=Batch(64, 4096), cluster=Cluster(1, gpu="rtx4090"))
    with pytest.raises(ConfigError, match="Or take more GPUs or a larger card, or shorter rows"):
        few = {"optimizer_state": "8bit"}
        foresee(SIZES["8B"], batch=Batch(64, 4096), cluster=Cluster(1, gpu="rtx4090"), techniques=few)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda: Cluster(0), "a cluster of 0 ranks"),
        (lambda: Cluster(8, -1), "with -1 on a node"),
        (lambda: Cluster(8, device="cpu", gpu="h100"), "computes on cuda, not on cpu"),
        (lambda: Cluster(8, link="ib400"), 'name the card too, such as gpu="h100"'),
        (lambda: ask(cluster=Cluster(8, gpu="h10")), "gpu = 'h10': .* Did you mean 'H100'"),
        (lambda: ask(cluster=Cluster(8, gpu="h100", link="fast")), "link = 'fast': legal are ibN, .* such as ib400"),
        (lambda: ask(cluster=Cluster(12, gpu="h100")), "12 GPUs do not fill nodes of 8. .*8 or 16"),
        (lambda: ask(cluster=Cluster(6, 4, gpu="gb200")), "6 GPUs do not fill nodes of 4. .*4 or 8"),
        (lambda: ask(cluster=Cluster(8)), 'names no GPU: give one, such as Cluster\\(8, gpu="h100"\\). Known are V100'),
        (lambda: ask(batch=None), "give batch=Batch"),
        (lambda: ask(pins=("tp<8>",)), "pin 'tp<8>'"),
        (lambda: ask(layout=Layout(tp=2), pins=("tp=2",)), "the request states one .*such as tp=2"),
        (lambda: ask(layout=Layout(tp=2), cluster=Cluster(7, gpu="h100")), "tp = 2 .* counts that work: 4 or 8 GPUs"),
        (
            lambda: ask(layout=Layout(tp=64)),
            "tp = 64 does not divide the world size 8. No count from 2 to 32 GPUs works",
        ),
        (lambda: ask(layout=Layout(dp_shard=3)), "dp_shard = 3 does not divide the world size 8. No count"),
        (lambda: ask(layout=Layout(tp=-2)), "layout.tp = -2: .*, or -1 for what is left.$"),
        (
            lambda: ask(cluster=Cluster(10_000_000, gpu="h100")),
            "up to 1,048,576 GPUs, and the cluster has 10,000,000: state",
        ),
        (lambda: ask(techniques={"optimiser": "sgd"}), "Did you mean"),
        (lambda: build_plan(MODEL, Layout(), batch=BATCH, cluster=H100), "call meshwright.plan or meshwright.foresee"),
        (lambda: meshwright.plan(MODEL, Layout(), cluster=H100), "give batch=Batch"),
    ],
)
def test_questions_without_an_answer_are_refused_in_a_sentence(ask, words):
    with pytest.raises(ConfigError, match=words) as refused:
        ask()
    assert len(str(refused.value).splitlines()) == 1


def ask(**changes):
    return foresee(MODEL, **{"batch": BATCH, "cluster": H100, **changes})


@pytest.mark.fast
def test_clusters_without_a_card_are_planned_as_before():
    assert [(field.name, field.default) for field in fields(Cluster)][:2] == [("world", 1), ("ranks_per_node", 0)]
    assert Cluster(4).device == "cpu" and Cluster(4, gpu="a100").device == "cuda"
    layout = Layout(dp_shard=2, dp_replicate=2)
    assert meshwright.plan(MODEL, layout, cluster=Cluster(4)) == build_plan(MODEL, layout, cluster=Cluster(4))


def test_uneven_experts_and_slow_ranks_make_a_step_longer():
    layout, batch, cluster = Layout(dp_shard=8, ep=8), Batch(32, 2048, 4), Cluster(8, gpu="h100")
    model = replace(SIZES["1B"], n_layers=2, vocab_size=300, moe=MoEConfig(n_experts=8, hidden_dim=4096))
    even, uneven, slow = (
        foresee(model, layout, batch=batch, cluster=cluster, **given).candidates[0]
        for given in ({}, {"imbalance": 2.0}, {"straggler": 1.5})
    )
    assert uneven.step_s > even.step_s and uneven.mem_gb > even.mem_gb
    assert slow.step_s == pytest.approx(1.5 * even.step_s) and slow.mem_gb == even.mem_gb


@pytest.mark.fast
@pytest.mark.parametrize("given", [{"imbalance": 0.9}, {"straggler": float("nan")}])
def test_nothing_is_faster_than_the_mean(given):
    with pytest.raises(ConfigError, match="is 1 or more"):
        foresee(SIZES["debug"], Layout(dp_shard=8), batch=Batch(8, 64), cluster=Cluster(8, gpu="h100"), **given)


STATED = [
    (0, {"activation_checkpointing": "full"}),
    (2, {"activation_checkpointing": "none", "loss_chunks": 4}),
    (1, {"activation_checkpointing": "selective_op"}),
    (0, {"activation_checkpointing": "offload", "reshard_after_forward": False}),
    (4, {"loss_chunks": 1, "sync_grad_accum": False}),
    (0, {"activation_checkpointing": "every_n", "loss_chunks": 8, "reshard_after_forward": True}),
    (0, {"pipeline_schedule": "gpipe"}),
    (1, {"pipeline_schedule": "dualpipe_v"}),
]


@pytest.mark.parametrize(("rows", "stated"), STATED, ids=[",".join(map(str, one[1].values())) for one in STATED])
def test_what_a_request_states_is_kept_by_every_candidate(rows, stated):
    pipeline = "pp=2" if "pipeline_schedule" in stated else "pp=1"
    answer = foresee(
        MODEL, batch=Batch(16, 64, rows), cluster=H100, techniques=stated, pins=(pipeline, "cp=1", "dp_shard>=2")
    )
    assert answer.candidates
    for one in (*answer.candidates, *answer.front):
        found = {**one.figures, "activation_checkpointing": one.figures["recompute"]}
        found["pipeline_schedule"] = found["schedule"]
        own = 16 // (one.layout.dp_replicate * one.layout.dp_shard)
        assert {key: found[key] for key in stated} == stated and min(rows, own) in (0, found["microbatch"])
        assert {key: getattr(one.techniques, key) for key in stated} == stated
    assert len(answer.kept) == len(stated) + (rows > 0)
    assert all(one.step_s < answer.candidates[0].step_s for one in answer.freed)


@pytest.mark.parametrize("kind", [dict, Techniques])
def test_auto_states_nothing(kind):
    asked = {"batch": Batch(16, 64), "cluster": H100, "pins": ("pp=1", "cp=1")}
    auto = foresee(MODEL, techniques=kind(**dict.fromkeys(CHOSEN.values(), "auto")), **asked)
    assert auto.to_json() == foresee(MODEL, **asked).to_json() and not auto.kept


def test_a_faster_layout_without_what_was_set_is_a_section_of_its_own():
    dear = {"activation_checkpointing": "full", "loss_chunks": 8}
    answer = foresee(replace(SIZES["1B"], n_layers=4), batch=Batch(16, 1024, 1), cluster=H100, techniques=dear)
    assert answer.kept == ("microbatch=1", "recompute=full", "loss_chunks=8") and answer.freed
    assert "faster, without some of what was set (microbatch=1, recompute=full, loss_chunks=8)" in str(answer)
    assert answer.to_dict()["freed"][0]["recompute"] != "full"
    assert str(answer).index("recompute full") < str(answer).index("faster, without")


def test_what_does_not_fit_as_stated_is_refused_with_what_fits_without():
    card = Cluster(1, gpu="rtx4090")
    with pytest.raises(
        ConfigError, match=r"nothing fits on 1 RTX4090.* Without microbatch=32, recompute=none this fits"
    ):
        foresee(SIZES["1B"], batch=Batch(32, 512, 32), cluster=card, techniques={"activation_checkpointing": "none"})


def test_a_layout_that_fits_by_less_than_forecasts_are_off_is_tight():
    full = foresee(SIZES["1B"], Layout(), batch=Batch(8, 512), cluster=Cluster(1, gpu="rtx4090"))
    limit = 25.3 * (1 - 0.08)
    assert {one.figures["verdict"] == "tight" for one in (*full.candidates, *full.front) if one.mem_gb > limit} <= {
        True
    }
    assert {one.figures["verdict"] == "fits" for one in (*full.candidates, *full.front) if one.mem_gb <= limit} <= {
        True
    }


def test_frozen_weights_have_no_weight_gradients_in_mfu():
    whole, frozen = (
        foresee(MODEL, Layout(dp_shard=1), batch=Batch(4, 64, 4), cluster=Cluster(1, gpu="h100"), techniques=one)
        for one in ({}, {"freeze": ["layers"]})
    )
    flops = [one.candidates[0].mfu * one.candidates[0].step_s for one in (whole, frozen)]
    assert 0.6 < flops[1] / flops[0] < 0.95


def test_a_run_is_priced_by_its_tokens(capsys):
    flags = ["--model.size=debug", "--data.tokenizer=ids:300:0", "--batch.global_batch=16", "--steps=1000"]
    asked = ["plan", *flags, "--gpus", "2", "--gpu", "h100", "--layout.dp_shard=2", "--json"]
    priced = {}
    for more in (["--tokens=2.5B", "--price=3"], ["--price=3"], ["--tokens=2.5B"]):
        assert main([*asked, *more]) == 0
        answer = json.loads(capsys.readouterr().out)
        priced[tuple(more)] = run = answer["run"]
        assert run["gpu_hours"] == pytest.approx(run["tokens"] / answer["chosen"]["tok_s_gpu"] / 3600)
        assert run["days"] == pytest.approx(run["gpu_hours"] / 2 / 24)
    whole, of_steps, free = priced.values()
    assert whole["tokens"] == 2.5e9 and whole["cost"] == pytest.approx(3 * whole["gpu_hours"]) and "cost" not in free
    assert of_steps["tokens"] == 1000 * 16 * 128
    assert main([*asked[:-1], "--tokens=1T", "--price=2.5"]) == 0
    assert " at 2.5 for a GPU hour" in capsys.readouterr().out
    for million in ("1e+6", "1_000_000", "1000K"):
        assert main([*asked, f"--tokens={million}", "--price=1e308"]) == 0
        run = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["run"]
        assert run["tokens"] == 1e6
    assert main([*asked, "--tokens=1e30", "--price=1e308"]) == 0
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["run"]["cost"] is None
    for wrong in ("many", "0", "-1", "2.5X", "1__0"):
        assert main([*asked, f"--tokens={wrong}"]) and "300M, 2.5B, 15T or 1.5e13" in capsys.readouterr().err


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, 128)).unbind(2)
        mixed = F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v)), is_causal=True)
        return x + self.down(F.gelu(self.up(self.out(mixed.transpose(1, 2).flatten(2)))))


class Unmeasured(nn.Module):
    """Too large to be measured, with no config to build a small copy from: tp, pp and cp are refused."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(32000, 1024), nn.Linear(1024, 32000, bias=False)
        self.blocks = nn.ModuleList(Block(1024) for _ in range(16))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_a_legal_layout_is_found_where_rules_refuse_all_of_the_fastest():
    answer = foresee(Unmeasured, batch=Batch(64, 1024), cluster=Cluster(64, gpu="h100"))
    assert len(answer.refused) == 24 and answer.chosen is not None
    layout = answer.chosen.layout
    assert layout.dp_replicate * layout.dp_shard == 64
    assert len({one.candidate.key for one in answer.candidates}) == len(answer.candidates)


@pytest.mark.parametrize("layout", [Layout(), Layout(dp_shard=8), Layout(dp_shard=4, tp=2)])
def test_a_microbatch_beyond_a_ranks_rows_is_all_of_them(layout):
    for one in foresee(MODEL, layout, batch=Batch(16, 64, 17), cluster=H100).candidates:
        assert one.microbatch == 16 // (one.layout.dp_replicate * one.layout.dp_shard)


def test_a_microbatch_that_does_not_divide_the_rows_is_kept():
    few = foresee(MODEL, batch=Batch(16, 64, 7), cluster=H100, pins=["dp_shard<=2", "dp_replicate=1"])
    assert {one.microbatch for one in (*few.candidates, *few.front)} == {7}
