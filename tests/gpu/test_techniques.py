"""Every technique that one GPU carries against plain torch on it: the cases of first contact (docs/gpu.md) as tests."""

import pytest

from benchmarks.first_contact import kernels, parity, ranks
from benchmarks.first_contact.plan import KERNELS

pytestmark = pytest.mark.gpu

WITHOUT_NEED = [name for name, row in ranks.LAYOUTS.items() if "send" not in row.get("needs", [])]
"""gloo sends no tensor of a GPU from rank to rank."""


@pytest.mark.parametrize("name", parity.CASES)
def test_a_technique_on_one_gpu_equals_plain_torch(spmd, name):
    if "float8" in name:
        pytest.importorskip("torchao")
    figures, _ = spmd(1, parity.case, name, timeout=300.0)[0]
    assert figures["error"] <= figures["bound"]


@pytest.mark.parametrize("job", [parity.dropout, parity.checkpoint, parity.generation], ids=lambda job: job.__name__)
def test_draws_checkpoints_and_generation_are_those_of_one_process(spmd, job):
    spmd(1, job, timeout=300.0)


@pytest.mark.parametrize("state", ["8bit", "4bit"])
def test_optimizer_state_in_few_bits_trains_as_torchaos_own_does(spmd, state):
    pytest.importorskip("torchao")
    figures, _ = spmd(1, parity.low_bit, state, timeout=300.0)[0]
    assert figures["losses apart"] < 1e-3


@pytest.mark.parametrize("name", WITHOUT_NEED)
def test_ranks_on_one_gpu_equal_plain_torch(name, tmp_path):
    figures, _ = ranks.layout(name, str(tmp_path / "no results"))
    assert figures["error"] <= figures["bound"]


@pytest.mark.parametrize(("name", "dtype"), [row for row in KERNELS if row[0] != "cpu flash"])
def test_a_fused_kernel_gives_what_blocks_do_at_every_length_head_and_group(spmd, name, dtype):
    figures, _ = spmd(1, kernels.fused, name, dtype, timeout=300.0)[0]
    assert max(figures.values()) <= kernels.BOUNDS[dtype]
