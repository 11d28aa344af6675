"""Times of mixtures of experts: messages, reordered rows, casts, the host's waits, and what makes each vanish."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.published.shapes import decoder_block, gated_experts, latent_block
from meshwright.planning.layout import Layout
from meshwright.simulation.cards import device, machines
from meshwright.simulation.job import Architecture, Execution, Job, MixtureRun
from meshwright.simulation.products import (
    cast_seconds,
    dispatch_seconds,
    host_seconds,
    mixture_traffic,
    ordered_bytes,
    reached,
    starved_seconds,
)
from meshwright.simulation.step_memory import block_activations
from meshwright.simulation.step_time import Cost, block_times

TOP_K = 8
BLOCK = decoder_block(2048, 16, 8, 1024, experts=gated_experts(2048, 64, TOP_K, 1024))


def job(gpus: int = 16, ep: int = 16, products: str = "bfloat16", **mixture: object) -> Job:
    run = Execution(products=products, fused=True, mixture=MixtureRun(**mixture))  # type: ignore[arg-type]
    model = Architecture("mixture", (BLOCK,) * 4, 32_000)
    return Job(model, Layout(dp_shard=gpus, ep=ep), 4096, gpus, 1, run, machines("h100", gpus, across="ib400"))


def test_a_token_travels_once_to_a_node_and_its_copies_each_for_itself():
    assert reached(1, TOP_K) == pytest.approx(1) and 6 < reached(16, TOP_K) < TOP_K
    cluster, row = job().machines, 4096 * 2048 * 2
    empty = cluster.launch_s + cluster.inside.latency_s + cluster.across.latency_s
    tokens, copies = (dispatch_seconds(BLOCK, job(dispatch=how)) - empty for how in ("tokens", "copies"))
    assert tokens == pytest.approx(row * reached(2, TOP_K) / 2 / cluster.across.speed)  # to the other one of two nodes
    assert copies == pytest.approx(row * TOP_K / 2 / cluster.across.speed)


def test_copies_are_sorted_on_arrival_and_padded_only_where_there_is_a_cause():
    row, own = 2048 * 2, 4096
    several, alone = job(ep=16, dispatch="copies"), job(64, 64, dispatch="copies")
    assert ordered_bytes(BLOCK, alone) == 2 * row * (own + own * TOP_K)  # one expert on a rank: nothing to sort
    assert ordered_bytes(BLOCK, several) == 2 * row * (own + 3 * own * TOP_K)
    assert ordered_bytes(BLOCK, job(products="float8", dispatch="copies")) == 2 * row * (own + 5 * own * TOP_K)
    assert ordered_bytes(BLOCK, job(products="float8", dispatch="tokens")) < ordered_bytes(BLOCK, several)


def test_biases_stashes_and_weights_move_bytes_only_where_a_system_has_them():
    plain = mixture_traffic(BLOCK, job(weighs_inside=True))
    elements = 4096 * TOP_K * 2048
    assert mixture_traffic(BLOCK, job())[1] - plain[1] == pytest.approx(2 * elements)
    stashed = mixture_traffic(BLOCK, job(weighs_inside=True, stashes=True))
    assert stashed[0] - plain[0] == pytest.approx(stashed[1] - plain[1]) and stashed[0] > plain[0]
    assert BLOCK.experts is not None
    biased = replace(BLOCK, experts=replace(BLOCK.experts, biased=True))
    assert mixture_traffic(biased, job(weighs_inside=True)) == plain  # a grouped product adds them
    apart = mixture_traffic(biased, job(weighs_inside=True, grouped=False))
    assert apart[0] - plain[0] == pytest.approx(28 * elements)
    saved = block_activations(BLOCK, job()) - block_activations(BLOCK, job(weighs_inside=True))
    assert saved == pytest.approx(2 * elements)


def test_clamps_move_the_gates_inputs_once_more_and_again_where_activations_are_recomputed():
    assert BLOCK.experts is not None
    clamped, inside = replace(BLOCK, experts=replace(BLOCK.experts, clamped=True)), 4096 * TOP_K * 1024 * 2
    assert mixture_traffic(clamped, job()) == mixture_traffic(BLOCK, job())  # a grouped product's kernel clamps

    def more(recompute: str) -> tuple[float, ...]:
        apart = job(grouped=False).with_execution(recompute=recompute)
        pairs = zip(mixture_traffic(clamped, apart), mixture_traffic(BLOCK, apart), strict=True)
        return tuple((there - here) / inside for there, here in pairs)

    assert more("none") == pytest.approx((8, 10)) and more("modules") == pytest.approx((8, 18))


def test_rotary_positions_in_operators_of_their_own_move_queries_and_keys_25_times_more():
    fused, apart = (block_times(BLOCK, job().with_execution(fused_rotary=one)) for one in (True, False))
    elements = 4096 * (16 + 8) * 128 * 2
    traffic = job().machines.device.traffic_s
    assert apart.forward[Cost.TRAFFIC] - fused.forward[Cost.TRAFFIC] == pytest.approx(traffic(10 * elements))
    assert apart.backward[Cost.TRAFFIC] - fused.backward[Cost.TRAFFIC] == pytest.approx(traffic(15 * elements))


def test_a_group_of_products_fills_the_device_better_than_one_after_the_other():
    card = device("h100")
    one, group = card.product_s(1024, 2048, 2048, "bfloat16"), card.product_s(1024, 2048, 2048, "bfloat16", number=16)
    assert one < group < 16 * one
    assert group == pytest.approx(card.product_s(16 * 1024, 2048, 2048, "bfloat16"), rel=0.05)


def test_shallow_products_lose_more_where_products_are_fast_for_the_memory():
    card = device("h100")
    slower = [
        card.product_s(8192, 8192, depth, dtype) / depth for dtype in ("bfloat16", "float8") for depth in (512, 8192)
    ]
    assert slower[0] / slower[1] < slower[2] / slower[3]


def test_casts_cost_nothing_in_half_precision_and_less_where_weights_are_cast_once():
    assert cast_seconds(BLOCK, job()) == (0.0, 0.0)
    eight = job(products="float8")
    once = eight.with_execution(casts_weights=False)
    assert all(a > b > 0 for a, b in zip(cast_seconds(BLOCK, eight), cast_seconds(BLOCK, once), strict=True))
    apart = job(products="float8", grouped=False)
    assert cast_seconds(BLOCK, apart)[0] - cast_seconds(BLOCK, eight)[0] == pytest.approx(2 * 3 * 8e-6)  # of 4 experts


def test_the_device_waits_for_a_host_that_waits_for_the_device():
    assert starved_seconds((3.0, 1.0), 0.0, 5.0) == 0.0  # the host runs ahead
    assert starved_seconds((3.0, 1.0), 1.0, 4.0) == 2.0  # experts: 3 of the host for 1; then the rest hides its own
    assert starved_seconds((1.0, 3.0), 2.0, 1.0) == 1.0  # a lead of 1 behind the experts
    free = block_times(BLOCK, job(waits=False)).forward.get(Cost.HOST, 0.0)
    assert block_times(BLOCK, job()).forward[Cost.HOST] >= free


def test_graphs_take_launches_from_the_host():
    (experts, rest), back = host_seconds(BLOCK, job())
    (same, less), less_back = host_seconds(BLOCK, job().with_execution(graphs="partial"))
    assert same == experts and 0 < less < rest and 0 < less_back < back
    whole = job().with_execution(graphs="full")
    assert host_seconds(BLOCK, whole) == ((0.0, 0.0), 0.0)
    assert block_times(BLOCK, whole).backward.get(Cost.HOST, 0.0) == 0.0


def test_recomputing_up_projections_costs_their_products_and_saves_queries_keys_and_values():
    block = latent_block(2048, 16, query_rank=512, key_rank=256, rotary=64, key_dim=128, value_dim=128, width=4096)
    plain, again = job(), job().with_execution(recompute="latents")
    longer = block_times(block, again).backward[Cost.PRODUCTS] - block_times(block, plain).backward[Cost.PRODUCTS]
    assert 0 < longer < block_times(block, plain).forward[Cost.PRODUCTS]
    assert block_activations(block, again) < block_activations(block, plain)
    assert block_times(BLOCK, again).backward == block_times(BLOCK, plain).backward  # no latents


def test_an_all_to_all_of_copies_slows_down_beyond_eight_peers_of_a_rack():
    def seconds(ep: int, dispatch: str) -> float:
        one = replace(job(72, ep, dispatch=dispatch), machines=machines("gb200", 72))
        empty = one.machines.launch_s + one.machines.inside.latency_s
        return dispatch_seconds(BLOCK, one) - empty

    row = 4096 * 2048 * 2 / machines("gb200", 72).inside.speed
    assert seconds(8, "copies") == pytest.approx(row * TOP_K * 7 / 8)
    assert seconds(36, "copies") == pytest.approx(row * TOP_K * 35 / 36 / 0.4)
    assert seconds(36, "tokens") == pytest.approx(row * reached(36, TOP_K) * 35 / 36 / 0.75)


def test_casts_in_blocks_are_slower_than_by_one_scale():
    of = machines("b200", 16, across="ib400")
    scale, blocks = (cast_seconds(BLOCK, replace(job(products=d), machines=of))[0] for d in ("float8", "mxfp8"))
    kernels = 8e-6 * 4  # two linear layers, two grouped ones
    assert (blocks - kernels) * 0.6 == pytest.approx(scale - kernels)


def test_heads_that_eight_does_not_divide_have_no_tensor_core_in_separate_kernels():
    def seconds(heads: int, dim: int) -> float:
        old = replace(job(1, 1), execution=Execution(attention="unfused"), machines=machines("a100", 1))
        return block_times(decoder_block(heads * dim, heads, heads, 4096), old).forward[Cost.ATTENTION]

    assert seconds(16, 108) > 1.5 * seconds(16, 112) > seconds(16, 104)


def test_experts_with_as_many_rows_as_the_fullest_one_compute_them_all():
    one = job(8, 1)
    full = replace(one, execution=replace(one.execution, imbalance=8.0, mixture=MixtureRun(pads=True)))
    alone = replace(one, execution=replace(one.execution, imbalance=8.0))
    products = [block_times(BLOCK, some).forward[Cost.PRODUCTS] for some in (one, alone, full)]
    assert products[0] == products[1] and products[2] > 4 * products[0]
