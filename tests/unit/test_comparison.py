"""What two computations are compared by: sketches, fingerprints, observed modules, traces on disk."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from meshwright.comparison import sketch
from meshwright.comparison.equality import Comparison, Difference, sum_floor, traced_bound
from meshwright.comparison.sketch import TENSOR_WIDTH, TokensOfRank, observing, sketch_part, sketch_rows
from meshwright.comparison.trace import Sketches, Trace, TracedStep, TraceFile, fingerprints
from meshwright.core.errors import ConfigError
from meshwright.core.files import replacing


@pytest.mark.first
@pytest.mark.parametrize("shape", [(4, 30), (4, 1, 6), (4, 7, 5), (4, 3, 11, 8), (4, 200, 16)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sketches_of_rows_keep_distances_and_rows_apart(shape, dtype):
    g = torch.Generator().manual_seed(0)
    ratios = []
    for _ in range(20):
        x, y = (torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for _ in range(2))
        found = sketch_rows(x)
        assert found.shape == (4, 8) and found.dtype == torch.float64
        assert (
            torch.equal(sketch_rows(x[1:2]), found[1:2])
            or (found[1] - sketch_rows(x[1:2])[0]).norm() < 1e-2 * found[1].norm()
        )
        off = (sketch_rows(x) - sketch_rows(y)).norm() / (x.double() - y.double()).norm()
        ratios.append(off.item())
        moved = x.clone()
        moved[2].view(-1)[0] += 1
        changed = (sketch_rows(moved) - found).norm(dim=1) > 0
        assert changed.tolist() == [False, False, True, False]
    assert 0.7 < sum(ratios) / len(ratios) < 1.3 and max(ratios) < 2.5 and min(ratios) > 0.3


@st.composite
def cut_tensors(draw):
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=3)))
    cuts = [sorted(draw(st.sets(st.integers(1, max(1, n - 1)), max_size=2)) & set(range(1, n))) for n in shape]
    return shape, cuts, draw(st.integers(0, 99))


@settings(max_examples=60)
@given(cut_tensors())
def test_sketches_of_parts_add_up_to_that_of_the_whole(case):
    shape, cuts, seed = case
    whole = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    total = torch.zeros(TENSOR_WIDTH, dtype=torch.float64)
    ranges = [list(zip([0, *cut], [*cut, n], strict=True)) for cut, n in zip(cuts, shape, strict=True)]
    for place in (
        torch.cartesian_prod(*[torch.arange(len(r)) for r in ranges]).view(-1, len(ranges)).tolist() if ranges else [[]]
    ):
        parts = [ranges[dim][i] for dim, i in enumerate(place)]
        part = whole[tuple(slice(*p) for p in parts)]
        total += sketch_part(part, tuple(p[0] for p in parts), shape)
    assert torch.allclose(total, sketch_part(whole, (0,) * len(shape), shape), atol=1e-12)
    assert sketch_part(whole[:0], (0,) * len(shape), shape).tolist() == [0.0] * TENSOR_WIDTH if shape else True


@pytest.mark.parametrize(("length", "ranks"), [(10, 2), (9, 2), (9, 4), (5, 4), (3, 2)])
@pytest.mark.parametrize("features", [(6,), (3, 4)])
def test_what_ranks_see_of_their_tokens_adds_up_to_what_one_sees_of_all(length, ranks, features):
    """Also where the last rank's tokens are filled up, or it has none."""
    whole, filled = torch.randn(4, length, *features).double(), torch.full((4, ranks, *features), torch.nan).double()
    total, modules = torch.zeros(4, 8).double(), []
    for rank in range(ranks):
        tokens = TokensOfRank.run(rank, ranks, length)
        part = torch.cat([whole, filled], 1)[:, rank * tokens.filled :][:, : tokens.filled].requires_grad_()
        model = nn.Identity()
        with observing(model, tokens=tokens) as observed:
            (model(part) * 2).sum().backward()
        assert observed.shapes[""] == whole.shape[1:]
        total += observed.rows()[0][""]
        modules.append(observed.rows()[1][""])
    assert torch.allclose(total, sketch_rows(whole), atol=1e-12)
    assert torch.allclose(sum(modules), sketch_rows(torch.full_like(whole, 2.0)), atol=1e-12)


def test_a_vector_has_as_many_directions_as_a_matrix():
    """Two would do for equality, and be far off as an estimate of a distance."""
    for shape in ((64,), (3, 64), (64, 3)):
        directions = torch.stack(
            [sketch_part(row.view(shape), (0,) * len(shape), shape) for row in torch.eye(math.prod(shape)).double()], 1
        )
        assert torch.linalg.matrix_rank(directions) == TENSOR_WIDTH
    rows = torch.stack([sketch_rows(row.view(1, 20))[0] for row in torch.eye(20).double()], 1)
    assert torch.linalg.matrix_rank(rows) == 8


def test_signs_are_the_same_everywhere():
    assert sketch._signs(2, 5, "last", torch.float32, torch.device("cpu")).tolist() == [
        [1, -1, -1, -1, -1],
        [-1, -1, 1, -1, -1],
    ]


def test_a_fingerprint_knows_every_value_of_its_row():
    g = torch.Generator().manual_seed(0)
    batch = {key: torch.randint(0, 9, (3, 5), generator=g) for key in ("tokens", "labels", "positions", "document_ids")}
    before = fingerprints(batch)
    for key in batch:
        for place in range(5):
            changed = {name: values.clone() for name, values in batch.items()}
            changed[key][1, place] += 1
            assert (fingerprints(changed) == before).tolist() == [True, False, True]
    swapped = batch | {"tokens": batch["labels"], "labels": batch["tokens"]}
    assert (fingerprints(swapped) != before).all()


class Chain(nn.Module):
    """Hands on what a child returned, as it is; and once changed in place."""

    def __init__(self, in_place: bool):
        super().__init__()
        self.inner, self.in_place = nn.Linear(4, 4), in_place

    def forward(self, x):
        x = self.inner(x)
        return x.mul_(2) if self.in_place else x


@pytest.mark.parametrize("in_place", [False, True])
def test_a_module_that_hands_on_a_tensor_is_observed_as_it_returns_it(in_place):
    torch.manual_seed(0)
    model, x = Chain(in_place), torch.randn(3, 6, 4)
    with observing(model) as observed:
        model(x).sum().backward()
    forward, backward = observed.rows()
    inner = model.inner(x)
    assert torch.allclose(forward["inner"], sketch_rows(inner)) and torch.allclose(
        forward[""], sketch_rows(inner * (1 + in_place))
    )
    assert torch.allclose(backward[""], sketch_rows(torch.ones(3, 6, 4)))
    # torch drops hooks on what is changed in place
    assert in_place or torch.allclose(backward["inner"], sketch_rows(torch.ones(3, 6, 4)))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_bounds():
    assert (
        traced_bound("float32", 1e-9) == 1e-6
        and traced_bound("bfloat16", 0.01) == 0.04
        and traced_bound("float64", 0.0) == 1e-10
    )
    parts = torch.tensor([1.0, 2.0, 3.0])
    # the summands' own, where the sum may be luck
    assert sum_floor(parts + 0.5, parts) == pytest.approx(2 * 0.5 * 3**0.5 / 6)
    assert sum_floor(parts + torch.tensor([0.5, -0.5, 0.0]), parts) == pytest.approx(2 * 0.5**0.5 / 6)


def test_a_factor_is_told_where_rounding_blurs_it_and_only_there():
    def found(ratios, bound):
        return Comparison(
            "bfloat16", tuple(Difference("gradient", str(i), 0.5, bound, r) for i, r in enumerate(ratios))
        )

    assert found([0.5, 0.505, 0.495], 0.02).factor == 0.5 and found([0.5, 0.505, 0.495], 1e-6).factor is None
    assert found([1.01, 0.99], 0.02).factor is None and found([0.5, 0.9], 0.05).factor is None


def made(rows: int = 4) -> Trace:
    g = torch.Generator().manual_seed(0)
    sketches = {stage: Sketches(["b", "a"], torch.randn(2, rows, 8, generator=g)) for stage in ("forward", "backward")}
    sketches |= {stage: Sketches(["w"], torch.randn(1, 16, generator=g)) for stage in ("gradient", "parameter")}
    floors = [{"forward": {"b": 1e-7, "a": 2e-7}, "loss": {"": 3e-7}}]
    step = TracedStep(torch.arange(rows), 1.5, 2.5, sketches)
    return Trace(
        {"seed": 0},
        "cpu",
        Sketches(["w"], torch.randn(1, 16, generator=g)),
        [step],
        {"a": (4,), "b": (4,)},
        {"float32": floors},
    )


def test_a_trace_is_read_as_it_was_written_and_by_rows(tmp_path):
    trace = made()
    trace.write(tmp_path / "t")
    file = TraceFile(tmp_path / "t")
    assert (file.facts, file.drawn_on, file.n_steps, file.dtypes) == ({"seed": 0}, "cpu", 1, ("float32",))
    assert (
        file.shapes == trace.shapes
        and file.floors("float32", 1) == trace.floors["float32"][0]
        and file.initial.names == ["w"]
    )
    step = file.step(1, slice(1, 3))
    assert (step.loss, step.norm, step.batch.tolist()) == (1.5, 2.5, [1, 2])
    assert step.sketches["forward"].names == ["b", "a"]
    assert torch.equal(step.sketches["forward"].values, trace.steps[0].sketches["forward"].values[:, 1:3])
    assert torch.equal(step.sketches["gradient"].values, trace.steps[0].sketches["gradient"].values)


def test_a_broken_trace_is_refused(tmp_path):
    made().write(tmp_path / "t")
    whole = (tmp_path / "t").read_bytes()
    for broken in (whole[:50], whole[:-9], b"", whole.replace(b"meshwright trace 2", b"meshwright trace 9")):
        (tmp_path / "t").write_bytes(broken)
        with pytest.raises(ConfigError, match="check_trace = .*t: .*|check_trace = .*no trace that this version reads"):
            TraceFile(tmp_path / "t")


def test_what_cannot_be_written_whole_leaves_what_was_there(tmp_path):
    (tmp_path / "t").write_text("before")
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "t") as beside:
        beside.write_text("half")
        1 / 0  # noqa: B018
    assert (tmp_path / "t").read_text() == "before" and [path.name for path in tmp_path.iterdir()] == ["t"]
