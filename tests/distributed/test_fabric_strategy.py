"""A strategy of Lightning Fabric over a layout: folders, loaders, clipping, and what it refuses."""

from __future__ import annotations

import ast
from typing import Any

import pytest
import torch
from support.followed import found_in
from support.from_pages import function_of, furthest, meet
from support.ranks import ranks, refusal

from meshwright import ConfigError, Layout, UnsupportedError

ROWS = 4


def started(layout: Layout, **options: Any) -> Any:
    from lightning_fabric import Fabric

    from meshwright.integrations.fabric import MeshwrightStrategy

    meet()
    strategy = MeshwrightStrategy(layout, **options.pop("strategy", {}))
    fabric = Fabric(accelerator="cpu", devices=layout.world, strategy=strategy, **options)
    fabric.launch()
    return fabric


def set_up(layout: Layout) -> tuple[Any, Any, Any, Any]:
    """Model and optimizer together, and a loader of rows that are equally long: the mean of means is the mean."""
    fabric = started(layout)
    model = function_of("yours", "your_model")()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    rows, padded = function_of("yours", "your_rows")(32, 8, 8), function_of("yours", "padded")
    each = ROWS // (layout.dp_shard * layout.dp_replicate)
    loader = torch.utils.data.DataLoader(rows, batch_size=each, collate_fn=padded)
    return fabric, model, optimizer, fabric.setup_dataloaders(loader)


def steps(layout: Layout, folder: str, first: int, last: int) -> list[float]:
    """A job: steps ``first`` to ``last``, from the folder's state and into it."""
    fabric, model, optimizer, loader = set_up(layout)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if first:
        assert fabric.load(folder, state) == {} and state["step"] == first
    found = []
    for step, batch in enumerate(loader):
        if first <= step < last:
            loss = model(**batch).loss
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(fabric.all_reduce(loss.detach())))
        elif step == last:  # beside the save, and no part of it
            fabric.backward(model(**batch).loss)
            fabric.save(folder, {**state, "step": last})
            optimizer.step()
    fabric.strategy.teardown()
    return found


def by_hand(count: int) -> list[float]:
    model, rows = function_of("yours", "your_model")(), function_of("yours", "your_rows")(32, 8, 8)
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(count):
        batch = function_of("yours", "padded")(rows[ROWS * step : ROWS * (step + 1)])
        logits = model(input_ids=batch["input_ids"]).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


@pytest.mark.all
def test_steps_are_those_of_one_process_and_go_on_in_another_layout(spmd, tmp_path):
    """Two on FSDP, two on tp from the folder that those wrote. A sampler deals rows in turn, so a step has the same."""
    folder, expected = str(tmp_path / "state"), spmd(1, by_hand, 4)[0]
    first = spmd(2, steps, Layout(dp_shard=2), folder, 0, 2)[0]
    second = spmd(2, steps, Layout(dp_shard=1, tp=2), folder, 2, 4)[0]
    assert furthest(first + second, expected) <= 1e-6


@ranks(2)
def test_elements_of_shards_are_clipped_by_value():
    """A job: the largest element of all whole gradients, before and behind."""
    fabric, model, optimizer, loader = set_up(Layout(dp_shard=2))
    fabric.backward(model(**next(iter(loader))).loss)
    largest = []
    for limit in (None, 1e-3):
        if limit is not None:
            fabric.clip_gradients(model, optimizer, clip_val=limit)
        whole = [parameter.grad.full_tensor().abs().max() for parameter in model.parameters()]
        largest.append(float(max(whole)))
    before, behind = largest[0], largest[1]
    assert before > 1e-2 and behind == pytest.approx(1e-3)


def two_optimizers(layout: Layout | None) -> list[float]:
    """A job: the norms of two steps, each of two optimizers clipped by its own; by plain torch without a layout."""
    model, rows = function_of("yours", "your_model")(), function_of("yours", "your_rows")(8, 8, 8)
    batches = [function_of("yours", "padded")(rows[first : first + 4]) for first in (0, 4)]
    table = [model.model.embed_tokens.weight]
    rest = [parameter for parameter in model.parameters() if parameter is not table[0]]
    optimizers = [torch.optim.AdamW(table, lr=1e-2), torch.optim.SGD(rest, lr=1e-1)]
    if layout is not None:
        fabric = started(layout)
        model, *optimizers = fabric.setup(model, *optimizers)
    norms = []
    for batch in batches:
        loss = model(**batch).loss
        loss.backward() if layout is None else fabric.backward(loss)
        for optimizer in optimizers:
            if layout is None:
                norms.append(torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.2))
            else:
                norms.append(fabric.clip_gradients(model, optimizer, max_norm=0.2))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [float(norm) for norm in norms]


@pytest.mark.first("tp")
@pytest.mark.parametrize("layout", [Layout(dp_shard=2), Layout(dp_shard=1, tp=2)], ids=["dp_shard", "tp"])
def test_each_optimizer_is_clipped_by_the_norm_of_its_own_gradients(spmd, layout):
    expected = two_optimizers(None)
    assert abs(expected[0] - expected[1]) > 0.1
    assert furthest(spmd(2, two_optimizers, layout)[0], expected) <= 2e-6


def plain_weights(layout: Layout, folder: str) -> dict[str, Any]:
    """A job: read a file of whole weights behind ``setup``, and return them whole."""
    fabric = started(layout)
    model = fabric.setup(function_of("yours", "your_model")())
    fabric.load_raw(f"{folder}/model.pt", model)
    return fabric.strategy.parallel(model).state_dict(rank0_only=True)


@pytest.mark.all
@pytest.mark.parametrize("layout", [Layout(dp_shard=2), Layout(dp_shard=1, tp=2)], ids=["dp_shard", "tp"])
def test_whole_weights_are_read_and_returned(spmd, tmp_path, layout):
    given = {name: torch.randn_like(value) for name, value in function_of("yours", "your_model")().state_dict().items()}
    torch.save(given, tmp_path / "model.pt")
    first, second = spmd(2, plain_weights, layout, str(tmp_path))
    assert not second and first.keys() == given.keys()
    assert all(torch.equal(first[name], value) for name, value in given.items())


def words_of(case: str) -> str:
    """A job: in what words a strategy is refused."""
    try:
        if case == "precision":
            started(Layout(dp_shard=1), precision="bf16-mixed")
        elif case == "pp":
            fabric = started(Layout(dp_shard=1, pp=2))
            fabric.setup(function_of("yours", "your_model")())
        elif case == "float16":
            fabric = started(Layout(dp_shard=2), strategy={"techniques": {"precision": {"compute": "float16"}}})
            fabric.setup(function_of("yours", "your_model")())
        elif case == "stepped":
            fabric, model = started(Layout(dp_shard=2)), function_of("yours", "your_model")()
            optimizer = torch.optim.AdamW(model.parameters())
            model(
                input_ids=torch.ones(1, 4, dtype=torch.int64), labels=torch.ones(1, 4, dtype=torch.int64)
            ).loss.backward()
            optimizer.step()
            fabric.setup(model, optimizer)
        elif case == "streams":
            fabric, model, _, loader = set_up(Layout(dp_shard=1, tp=2))
            torch.manual_seed(1 + fabric.global_rank)
            model.eval()(**next(iter(loader)))  # nothing is drawn
            model.train()(**next(iter(loader)))
        elif case == "other optimizer":
            fabric, model, _, _ = set_up(Layout(dp_shard=2))
            other = torch.optim.SGD(function_of("yours", "your_model")().parameters())
            fabric.clip_gradients(model, other, max_norm=1.0)
        elif case == "raw optimizer":
            fabric, _, optimizer, _ = set_up(Layout(dp_shard=2))
            fabric.load_raw("optimizer.pt", optimizer)
        else:
            fabric, model, optimizer, _ = set_up(Layout(dp_shard=2))
            fabric.clip_gradients(model, optimizer, max_norm=1.0, norm_type=1.0)
    except (ConfigError, UnsupportedError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.follows("MeshwrightStrategy()", "strict=")
@ranks(1)
def test_what_the_strategy_advises_is_done(tmp_path):
    text = words_of("precision")
    assert "would cast beside the plan, which decides dtypes: leave it out" in text
    printed = ast.literal_eval(found_in(r"set MeshwrightStrategy\(techniques=(.*)\)", text))
    fabric = started(Layout(dp_shard=1), strategy={"techniques": printed})
    model = fabric.setup(function_of("yours", "your_model")())
    assert fabric.strategy.parallel(model).plan.precision.compute == "bfloat16"
    state = {"model": model, "step": 3}
    fabric.save(tmp_path / "saved", state)
    state["epoch"] = 1
    text = refusal(lambda: fabric.load(tmp_path / "saved", state))
    assert "holds no 'epoch', but ['step']: leave it out, or give strict=False" in text
    fabric.load(tmp_path / "saved", {**state, "step": 0}, strict=False)
    assert fabric.load(tmp_path / "saved", {"model": model}) == {"step": 3}


REFUSED = {
    "pp": (2, "UnsupportedError: MeshwrightStrategy: layout.pp = 2", "parallelize(...)"),
    "float16": (2, "ConfigError: MeshwrightStrategy: techniques.precision.compute = float16", "bfloat16"),
    "stepped": (2, "ConfigError: optimizer: this AdamW has the state", "before the first step"),
    "streams": (2, "ConfigError: MeshwrightStrategy: ranks of layout.tp have different", "seed + fabric.strategy.rows"),
    "other optimizer": (
        2,
        "ConfigError: MeshwrightStrategy: 21 of the 21 parameters of this SGD",
        "fabric.setup(model,",
    ),
    "raw optimizer": (2, "ConfigError: MeshwrightStrategy: fabric.load(path", "fabric.load_raw(path, model)"),
    "norm": (2, "UnsupportedError: MeshwrightStrategy: clip_gradients(norm_type=1.0)", "leave it out"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_layout_cannot_carry_is_refused(spmd, case):
    world, begins, remedy = REFUSED[case]
    for said in spmd(world, words_of, case):
        assert said.startswith(begins) and remedy in said, said
