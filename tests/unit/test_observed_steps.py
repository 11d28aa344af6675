"""Which step of one process each step of a rank is, and which parameter of one process a rank's is."""

from __future__ import annotations

import io
import pickle
from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from meshwright.observation.blame import Blame
from meshwright.observation.diagnosis import Diagnosis
from meshwright.observation.patches import before, without_harm
from meshwright.observation.recorder import Recorder
from meshwright.observation.traces import NOTHING, Run, left_to_next_turn, matched, of_rounding, places_in, steps_away


@pytest.mark.parametrize(
    ("own", "times"),
    [
        (["ab", "cd", "ef", "gh"], [0, 1, 2, 3]),
        (["ef", "gh"], [2, 3]),  # joined later
        (["ab", "gh"], [0, 3]),  # was away
        (["a", "c"], [0, 1]),  # left
        (["xy", "zw"], [0, 1]),  # rows that one process never has
        (["ab", "cd", "ef", "gh", "ij"], [0, 1, 2, 3, 4]),
        ([], []),
    ],
)
def test_steps_are_found_by_their_rows(own, times):
    assert matched([set(rows) for rows in own], [set(rows) for rows in ("ab", "cd", "ef", "gh")]) == times


def test_a_batch_that_repeats_leaves_no_gap():
    assert matched([{"a"}] * 2, [{"a"}] * 4) == [0, 1]


def step(rows: str, *before: float) -> dict[str, Any]:
    calls = [{"inputs": {"x": {"rows": [*row]}}} for row in rows.split()]
    weight = {"m": [torch.tensor(before)], "shape": [len(before)], "dtype": "float32", "whole": None, "offset": None}
    return NOTHING | {"calls": calls, "before": {"w": weight}, "after": {"w": weight}}


ONE = [step(rows, number, 1.0) for number, rows in enumerate(("ab", "cd", "ef", "gh", "ij"))]


def beside_one(*steps: dict[str, Any]) -> Run:
    """The run in which a first rank does as one process, and a second takes these steps."""
    return Run(None, [{"steps": steps} for steps in (ONE, [*steps])]).aligned({"steps": ONE})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("steps", "taken"),
    [
        ((ONE[0], step("cd ef gh", 3.0, 1.0), ONE[4]), [0, 3, 4]),  # calls before the last are those of steps left out
        ((ONE[0], step("gh", 1.0, 1.0), ONE[4]), [0, 4]),  # it has its parameters again behind its first step
        ((ONE[0], step("gh", 1.0, 1.0), step("ij", 2.0, 1.0)), [0, 3, 4]),  # it never has
        ((ONE[2], ONE[3], ONE[4]), [2, 3, 4]),
    ],
)
def test_a_rank_that_was_away_takes_part_again_once_it_has_the_parameters(steps, taken):
    own = beside_one(*steps).ranks[1]["steps"]
    assert [number for number, one in enumerate(own) if one is not NOTHING] == taken
    assert steps_away(own) == sorted({*range(taken[0], 5)} - {*taken})


@pytest.mark.parametrize(
    ("steps", "step_of_it", "is_found"),
    [
        ((ONE[0], ONE[1], ONE[4]), 2, False),  # somebody gave it what the others had computed
        ((ONE[0], ONE[1], step("ij", 2.0, 1.0)), 2, True),
        ((ONE[0], ONE[1], step("ij", 2.0, 1.0)), 1, False),
        ((ONE[0], ONE[1]), 2, False),  # it has left
    ],
)
def test_a_step_that_is_left_out_is_a_fault_if_parameters_differ_afterwards(steps, step_of_it, is_found):
    blame = SimpleNamespace(base={"steps": ONE}, many=beside_one(*steps))
    assert Blame._left_out(blame, step_of_it) == ([1] if is_found else [])  # type: ignore[arg-type]


def test_a_parameter_of_zeros_is_cut_as_its_neighbour():
    def table(rows: list[float], columns: int) -> dict[str, Any]:
        marginals = [torch.tensor(rows), torch.full((columns,), sum(rows))]
        return {"m": marginals, "shape": [len(rows), columns], "dtype": "float32", "whole": None, "offset": None}

    whole = {"a.down": table([1.0, 2.0, 3.0, 4.0], 6), "a.up": table([0.0] * 8, 4)}
    own = {"a.down": table([3.0, 4.0], 6), "a.up": table([0.0] * 8, 2)}
    place = places_in(own, whole)["a.up"]
    assert (place.name, place.dim) == ("a.up", 1) and place.index is not None and place.index.tolist() == [2, 3]
    assert "a.up" not in places_in(own, whole | {"a.up": table([0.0] * 8, 5)})


def test_models_that_take_turns_in_one_process_are_compared_turn_by_turn():
    """Two ranks each with a model of its own, and one process that was observed for half of their steps."""
    one = [step(rows, number, 1.0) | {"left": {}} for number, rows in enumerate(("ab", "cd", "ef", "gh"))]
    own = (("ab", 0), ("ef", 2), ("xy", 4)), (("cd", 1), ("gh", 3), ("zw", 5))
    ranks = [{"steps": [step(rows, number, 1.0) for rows, number in steps]} for steps in own]
    many = Run(None, ranks).aligned({"steps": one})  # type: ignore[arg-type]
    taken = [[n for n, at in enumerate(rank["steps"]) if at is not NOTHING] for rank in many.ranks]
    assert many.turns and taken == [[0, 2, 4], [1, 3, 4]]
    turns = left_to_next_turn({"steps": one}, many)["steps"]
    assert [turn.get("left") for turn in turns] == [one[2]["before"], one[3]["before"], None, None]
    assert not Run(None, [{"steps": one}] * 2).aligned({"steps": one}).turns  # type: ignore[arg-type]


def test_gradients_that_are_rounding_in_every_step_are_named():
    def norms(**found: float) -> dict[str, Any]:
        return {"gradients": {name: {"norm": norm} for name, norm in found.items()} | {"none": None}}

    steps = [norms(w=1.0, shift=2e-8, idle=0.0, late=1e-9), norms(w=0.5, shift=1e-8, idle=0.0, late=0.1)]
    assert of_rounding(steps) == {"shift"} and of_rounding(steps[:1]) == {"shift", "late"}


def test_a_tensor_that_is_unpickled_is_no_file_that_is_read():
    recorder, file = Recorder({"folder": ""}), io.BytesIO()
    with patch.object(torch, "load", torch.load):
        before(torch, "load", recorder.loaded)
        pickle.loads(pickle.dumps(torch.ones(2)))
        assert recorder.now["loaded"] == []
        torch.save(torch.ones(2), file)
        file.seek(0)
        torch.load(file)
    assert recorder.now["loaded"] == ["before"]


def test_a_note_that_fails_ends_the_recording_and_not_the_script(capsys):
    recorder = SimpleNamespace(closed=False, n_done=2, met=(1, 4))

    def note(value):
        return 1 / value

    noted = without_harm(recorder, note)
    assert noted(2) == 0.5 and not recorder.closed
    assert noted(0) is None and recorder.closed
    assert "rank 1: nothing is recorded from step 3 on, for ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rows", "reads", "is_so"),
    [
        ("ab xy cd ef", False, True),
        ("ab xy cz ef", False, False),
        ("ab cy cd ef", False, False),  # a row of this step twice
        ("ab ab cd ef", False, False),  # those of the first step twice
        ("ab ef cd gh", False, False),  # two steps in another order
        ("ab xy cd ef", True, False),  # it was resumed
    ],
)
def test_ranks_that_take_a_step_which_one_process_skips(rows, reads, is_so):
    def at(step: int) -> Any:
        mine = [Counter(row) for row in rows.split()[step]]
        return SimpleNamespace(counts=lambda: (Counter("ab cd ef gh".split()[step]), mine))

    diagnosis = SimpleNamespace(number=1, n=2, base={"steps": [0, 1, 2, 3]}, many=None, places=None)
    diagnosis.resume = SimpleNamespace(reads=lambda _: reads)
    with patch("meshwright.observation.diagnosis.Passes", lambda _base, _many, _places, step: at(step)):
        assert Diagnosis._takes_one_more(diagnosis) == is_so  # type: ignore[arg-type]
