"""docs/data/composition.txt is what the rules and the computation say."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.survey import composition
from benchmarks.survey.composition import AXES, DRAWN, SWITCHES, Together, drawn, judge, page, pairs, refusal, singles
from meshwright.core.errors import IntegrityError

PAGE = Path(__file__).parents[2] / "docs" / "data" / "composition.txt"


def as_allowed() -> str:
    """The page, if all that the rules allow is equal."""
    written = PAGE.read_text(encoding="utf-8")
    day, torch = written.split(" on ", 1)[1].split(" with torch ", 1)
    return page({one: refusal(one) for one in (*singles(), *drawn())}, day, torch.split(":", 1)[0])


@pytest.mark.all
def test_the_page_is_what_the_rules_say_and_all_that_they_allow_was_equal():
    assert PAGE.read_text(encoding="utf-8") == as_allowed(), "run make composition, and commit its file"


def test_every_switch_meets_every_axis_and_60_combinations_are_drawn():
    assert {(one.axis, one.switches[0].name) for one in singles()} == {
        (axis, switch.name) for axis in AXES for switch in SWITCHES
    }
    assert len({one.name for one in drawn()}) == DRAWN == 60 and {one.axis for one in drawn()} == set(AXES)
    assert {switch.name for one in drawn() for switch in one.switches} == {switch.name for switch in SWITCHES}
    assert all(2 <= len(one.switches) <= 4 for one in drawn()) and len(pairs()) > 100


@pytest.mark.all
@pytest.mark.parametrize("number", range(0, DRAWN, 13))
def test_some_of_what_was_drawn_is_equal_again(pool, number):
    """Each the first from there on that the rules allow."""
    one = next(one for one in drawn()[number:] if not refusal(one))
    assert judge(one, pool) == "", one.name


def test_what_differs_or_breaks_is_shown(monkeypatch):
    broken = drawn()[0]
    monkeypatch.setattr(composition, "refusal", lambda together: "")

    def fail(*args: object, **options: object) -> None:
        raise IntegrityError("nothing fits. Mend it")

    monkeypatch.setattr(composition, "verify", fail)
    said = judge(broken, None)  # type: ignore[arg-type]
    assert said == "DIFFERS: nothing fits."
    found: dict[Together, str] = dict.fromkeys((*singles(), *drawn()), "")
    assert "**DIFFERS: nothing fits.**" in page(
        found | {broken: said}, "a day", "2"
    ) and "59 equal, 1 refused or different" in page(found | {broken: said}, "a day", "2")
