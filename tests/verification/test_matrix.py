"""The matrix of layouts: a part of it is judged here.

The page is that of the code; what was judged is remembered, unless it differs.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path

import pytest
from support.covering import cheapest_cover
from test_verify import off_by_a_little

from benchmarks.survey import cache as matrix_cache
from benchmarks.survey import matrix
from benchmarks.survey.__main__ import judge_matrix
from benchmarks.survey.cache import FOLDERS, HOUSE, Cache, fingerprint, judge_all
from benchmarks.survey.matrix import (
    COLUMNS,
    MAX_NORM,
    PLAIN,
    STEPS,
    TENSOR_WAYS,
    WAYS,
    Cell,
    Judged,
    Row,
    cells,
    judge,
    refusal,
    rows,
)
from benchmarks.survey.page import page
from meshwright.core.errors import UnsupportedError
from meshwright.distributed.process.workers import WorkerDied
from meshwright.planning.layout import Layout
from meshwright.verification.outcome import reference
from meshwright.verification.verify import verify

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "data" / "matrix.txt"

# --- a part of the matrix

COMPILED_ELSEWHERE = ("compile", "activation_checkpointing = memory_budget")
"""test_compiled has the first, and all at once; test_recompute has the second."""
SMALL = {cell.name: cell for cell in cells() if cell.row.layout.world <= 4}
FACTORS = {
    "layout": list(dict.fromkeys(cell.row.layout for cell in SMALL.values())),
    "way": [way for way in (*WAYS, *TENSOR_WAYS) if way.name not in COMPILED_ELSEWHERE],
    "column": list(COLUMNS),
}


def cell_of(c: dict) -> Cell:
    return Cell(Row(c["layout"], c["way"]), c["column"])


def is_legal(c: dict) -> bool:
    return cell_of(c).name in SMALL and not is_refused(cell_of(c))


@cache
def is_refused(cell: Cell) -> bool:
    return refusal(cell) is not None


def price(c: dict) -> float:
    """Compiling is dear where many ranks do it.

    On two it comes first, so that it also covers a layout and a column. Microbatches are many where few ranks share
    the rows.
    """
    world, compiles = c["layout"].world, dict(c["way"].techniques).get("compile", False)
    if compiles:
        return 0.5 if world == 2 else 100
    return 1.5 if c["way"].microbatch_rows and world == 2 else 1


def covered(c: dict) -> frozenset:
    """Every layout computes every column, and every way is gone once. Pairs of techniques are for test_ways."""
    return frozenset({(c["layout"], c["column"]), c["way"]})


COVER = (Path(__file__).parent / "matrix_cover.txt").read_text(encoding="utf-8").splitlines()
"""Names of the cells: to compute them asks the rules about every one of the product."""


def computed_cover() -> list[Cell]:
    every = (dict(zip(FACTORS, values, strict=True)) for values in product(*FACTORS.values()))
    cover = cheapest_cover(filter(is_legal, every), price, covered)
    return sorted(map(cell_of, cover), key=lambda cell: COLUMNS.index(cell.column))


@pytest.mark.all
@pytest.mark.parametrize("name", COVER)
def test_a_cell_is_equal(pool, measured, name):
    cell = SMALL[name]
    judged = judge(cell, pool)
    assert judged.state == "equal", judged.reason
    assert len(judged.errors) == len(cell.errors) and 0 < min(judged.errors)
    measured(cell.row.name, f"matrix, {cell.column.name}", dict(zip(cell.errors, judged.errors, strict=True)))


@pytest.mark.all
def test_the_cover_is_the_cheapest_that_was_found():
    names = [cell.name for cell in computed_cover()]
    assert names == COVER, f"matrix_cover.txt should have these lines:\n{chr(10).join(names)}"


def test_the_cover_has_every_layout_column_and_way():
    cover = [SMALL[name] for name in COVER]
    assert {(cell.row.layout, cell.column) for cell in cover} == {(a, b) for a in FACTORS["layout"] for b in COLUMNS}
    assert {cell.row.way for cell in cover} == set(FACTORS["way"])
    assert len(COVER) <= 1.1 * len(FACTORS["layout"]) * len(COLUMNS), "hardly more than every layout in every column"


@pytest.mark.parametrize("way", [PLAIN, next(way for way in WAYS if way.name == "freeze")], ids=lambda way: way.name)
def test_every_step_is_clipped(spmd, way):
    for problem in Cell(Row(Layout(dp_shard=2), way), COLUMNS[0]).problems():
        found = spmd(1, reference, replace(problem, steps=STEPS, max_norm=MAX_NORM))[0]
        assert len(found.norms) == STEPS and min(found.norms) > 2 * MAX_NORM


def test_what_is_legal_only_elsewhere_is_refused_by_name():
    def said(layout: Layout, way: str, column: int = 0) -> tuple[str, str]:
        judged = judge(Cell(Row(layout, next(w for w in WAYS if w.name == way)), COLUMNS[column]), None)  # type: ignore[arg-type]
        return judged.state, judged.reason

    assert said(Layout(dp_shard=2), "data_parallel = ddp") == (
        "refused",
        "techniques.data_parallel = ddp keeps whole parameters on every rank, but layout.dp_shard = 2 cuts them.",
    )
    assert said(Layout(dp_shard=8), 'sync_grad_accum = "shard", microbatches')[0] == "refused"
    assert said(Layout(dp_replicate=2, dp_shard=1), "data_parallel = ddp", 2)[0] == "refused", "bf16 is fully_shard's"


# --- what differs


EASY = Cell(Row(Layout(dp_replicate=2, dp_shard=1), PLAIN), COLUMNS[0])


@pytest.mark.kills("verify", mutant="a cell that differs")
def test_a_cell_that_differs_says_where(pool, monkeypatch):
    monkeypatch.setattr(matrix, "verify", partial(verify, parallelize_fn=off_by_a_little))
    judged = judge(EASY, pool)
    assert (judged.state, judged.reason) == (
        "DIFFERS",
        "float64 first differs at the initial weight layers.1.attention.wq.weight, on rank 1",
    )
    assert len(judged.errors) == 2 and judged.errors[0] > 1e-9


@pytest.mark.parametrize("trouble", [WorkerDied(1, -9), UnsupportedError("this came too late")])
def test_what_breaks_or_is_refused_after_the_plan_was_made_differs(pool, monkeypatch, trouble):
    def breaks(*_, **__):
        raise trouble

    monkeypatch.setattr(matrix, "verify", breaks)
    judged = judge(EASY, pool)
    assert judged.state == "DIFFERS" and judged.reason == f"{type(trouble).__name__}: {trouble}"


# --- the page


def skeleton(text: str) -> list[tuple[str, ...]]:
    """Of every table its headings, and the name of every row."""
    lines = [
        [word.strip() for word in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith(("|", "## "))
    ]
    heads = [number - 1 for number, words in enumerate(lines) if set(words[-1]) == {"-"}]
    return [tuple(words) if number in heads else (words[0],) for number, words in enumerate(lines)]


def states(text: str) -> list[list[str]]:
    """Of every row, whether its cells are refused or have numbers."""
    lines = [line.strip("|").split("|")[1:] for line in text.splitlines() if line.startswith("|")]
    return [["equal" if word.strip()[:1].isdigit() else word.split("(")[0].strip() for word in line] for line in lines]


@cache
def as_planned(cell: Cell) -> Judged:
    return judge(cell, None) if is_refused(cell) else Judged("equal", errors=(1e-16,) * 2, day="2026-01-01")  # type: ignore[arg-type]


@pytest.mark.all
def test_the_page_shows_the_matrix_that_the_code_has():
    now = page({cell: as_planned(cell) for cell in cells()})
    committed = PAGE.read_text(encoding="utf-8")
    again = "run make matrix, and commit docs/data/matrix.txt"
    assert skeleton(committed) == skeleton(now), again
    assert states(committed) == states(now), again
    assert "**DIFFERS** (" not in committed and ", 0 differ." in committed


@pytest.mark.all
def test_a_page_with_another_matrix_is_seen(monkeypatch):
    now = page({cell: as_planned(cell) for cell in cells()})
    assert len(skeleton(now)) > len(rows()) and ("plain",) in skeleton(now)
    for number, row in enumerate(rows()[:3]):
        other = now.replace(f"| {row.way.name} |", "| plainer |", number + 1)
        assert skeleton(other) != skeleton(now)
    differing = page({cell: replace(as_planned(cell), state="DIFFERS", reason="here") for cell in cells()})
    assert "**DIFFERS** (1)" in differing and "1. here" in differing and states(differing) != states(now)


# --- the cache


def counting(monkeypatch, state: str = "equal") -> list[Cell]:
    judged = []

    def stub(cell, pool):
        judged.append(cell)
        return Judged(state, "because" if state != "equal" else "", (1e-16, 2e-7), 0.5, "2026-01-01")

    monkeypatch.setattr(matrix_cache, "judge", stub)
    return judged


def run_all(cache: Cache, chosen: list[Cell]) -> dict[Cell, Judged]:
    return judge_all(chosen, cache.all_known(chosen), cache, None, lambda cell, judged: None)  # type: ignore[arg-type]


def test_a_cell_is_judged_once_and_again_when_something_changes_that_it_depends_on(tmp_path, monkeypatch):
    judged, chosen = counting(monkeypatch), cells()[:3]
    first = run_all(Cache(tmp_path / "cache", "these sources"), chosen)
    assert run_all(Cache(tmp_path / "cache", "these sources"), chosen) == first and judged == chosen
    run_all(Cache(tmp_path / "cache", "other sources"), chosen)
    assert judged == chosen * 2
    longer = replace(PLAIN, microbatch_rows=3)  # the same name, another cell
    run_all(Cache(tmp_path / "cache", "other sources"), [Cell(replace(chosen[0].row, way=longer), chosen[0].column)])
    assert len(judged) == 7
    for broken in ("half a fi", "{}", "[]"):
        judged.clear()
        for file in (tmp_path / "cache").iterdir():
            file.write_text(broken)
        assert run_all(Cache(tmp_path / "cache", "other sources"), chosen) == first and judged == chosen


@pytest.mark.all
def test_every_cell_has_a_file_of_its_own(tmp_path, monkeypatch):
    counting(monkeypatch)
    run_all(Cache(tmp_path, "these sources"), cells())
    assert len(list(tmp_path.iterdir())) == len(cells()) == len(set(cells()))


def test_a_cell_that_differs_is_judged_again(tmp_path, monkeypatch):
    judged = counting(monkeypatch, "DIFFERS")
    cache = Cache(tmp_path, "these sources")
    for _ in range(2):
        run_all(cache, [EASY])
    assert judged == [EASY, EASY]
    cache.keep(EASY, Judged("equal"))
    assert cache.known(EASY) == Judged("equal")
    judge_all([EASY], {}, cache, None, lambda cell, judged: None)  # type: ignore[arg-type]
    assert cache.known(EASY) is None, "that it was equal before is forgotten"


def test_the_fingerprint_is_of_what_cells_depend_on(tmp_path):
    house = tmp_path / "meshwright"
    shutil.copytree(HOUSE, house, ignore=shutil.ignore_patterns("__pycache__"))
    before = fingerprint(house)
    assert before == fingerprint()
    for folder in ("cli", "training", "data", "checkpoint"):
        (house / folder / "__init__.py").write_text("# changed")
    assert fingerprint(house) == before
    for folder in FOLDERS:
        (house / folder / "__init__.py").write_text("# changed")
        assert fingerprint(house) != before
        before = fingerprint(house)
    (house / "core" / "new.py").write_text("")
    assert fingerprint(house) != before


# --- the command


@pytest.fixture
def command(tmp_path, monkeypatch):
    (tmp_path / "docs" / "data").mkdir(parents=True)
    return partial(judge_matrix, root=tmp_path)


@pytest.mark.all
def test_the_command_writes_the_page_and_says_what_it_found(command, tmp_path, monkeypatch, capsys):
    judged = counting(monkeypatch)
    assert command([]) == 0 and len(judged) == len(cells())
    text = (tmp_path / "docs" / "data" / "matrix.txt").read_text()
    assert (
        skeleton(text) == skeleton(page({cell: as_planned(cell) for cell in cells()}))
        and "on 2026-01-01 with torch" in text
    )
    assert f"{len(cells())} equal, 0 refused, 0 differ; " in capsys.readouterr().out
    assert command([]) == 0 and len(judged) == len(cells()), "all are known"
    assert (tmp_path / "docs" / "data" / "matrix.txt").read_text() == text
    assert command(["--cold"]) == 0 and len(judged) == 2 * len(cells())


def test_a_part_leaves_the_page_alone_and_what_differs_is_exit_status_one(command, tmp_path, monkeypatch, capsys):
    judged = counting(monkeypatch, "DIFFERS")
    assert command(["--only", "dp_shard=4: freeze"]) == 1
    assert len(judged) == len(COLUMNS) and not (tmp_path / "docs" / "data" / "matrix.txt").exists()
    said = capsys.readouterr().out
    assert "dp_shard=4: freeze: tied: DIFFERS: because" in said and "3 differ; " in said
    assert command(["--only", "dp_shard=7"]) == 2 and "no row has 'dp_shard=7' in its name" in capsys.readouterr().err


def test_ctrl_c_keeps_what_was_judged(command, monkeypatch, capsys):
    judged = counting(monkeypatch)

    def stop(cell, pool, calm=matrix_cache.judge):
        if len(judged) == 2:
            raise KeyboardInterrupt
        return calm(cell, pool)

    monkeypatch.setattr(matrix_cache, "judge", stop)
    assert command(["--only", "dp_shard=8: "]) == 130 and "what was judged is remembered" in capsys.readouterr().err
    judged.append(EASY)
    assert command(["--only", "dp_shard=8: "]) == 0 and "2 of them judged before" in capsys.readouterr().out
