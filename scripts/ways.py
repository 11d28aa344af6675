"""Write tests/ways.txt: a few ways in which every two values of different factors meet, as far as the rules allow.

    python scripts/ways.py [--check | --anew]
        --check: change nothing; exit with 1 if the file would be another
        --anew: compute all ways; else those of the file that are legal stay, and some are added for what is missing

Most faults need one switch or two to show (Kuhn, Wallace, Gallo 2004). Greedy, one way at a time (Cohen et al. 1997,
AETG): the rules are asked about the few candidates that would cover most, never about the whole product.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from itertools import combinations, product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
from support.remembered import remember
from support.ways import AXES, FACTORS, FILE, OURS, SAID_OF, Way, ways

Choice = tuple[str, str]
"""(factor, value)."""
Pair = tuple[Choice, Choice]
NAMES = list(FACTORS)
SPARSE = ("softmax", "sigmoid", "deepseek_v3")
MESH = ("dp", "tp", "pp", "ep", "cp")
LAYOUTS = [
    axes
    for axes in (dict(zip(MESH, values, strict=True)) for values in product(*(FACTORS[n] for n in MESH)))
    for layout in [Way(**axes).layout]
    if 2 <= layout.world <= 4 and (axes["ep"] == "1" or layout.dp_shard * layout.tp * layout.cp >= int(axes["ep"]))
]
PLAIN = [
    Way.of(text)
    for text in (
        "dp=ddp",
        "dp=ddp model=tied freeze=start",
        "dp=ddp microbatches=rows shards=synced",
        "dp=fsdp",
        "dp=fsdp microbatches=rows",
        "dp=fsdp microbatches=rows shards=zero1",
        "dp=fsdp microbatches=rows shards=zero2",
        "dp=fsdp units=two",
        "dp=hsdp",
        "dp=fsdp tp=2 sequence=cut",
        "dp=fsdp freeze=start dtypes=two",
    )
]
"""They come first: where one of them fails, that says more than a way of many switches.

And most mutants die in one of them.
"""
CANDIDATES, ATTEMPTS = 12, 30
"""Legal ways of which the best is taken, and how many are tried before a pair is called refused."""
STARTS = 5
"""Arrays that are computed; the cheapest is written."""


def is_wanted(pair: Pair) -> bool:
    """Families meet the axes; what is said of an axis meets nothing where the axis is not there.

    Methods of cp meet pipelines, and their schedules meet cp: no message of one is in the other's order.
    """
    chosen = dict(pair)
    if chosen.keys() == {"schedule", "method"}:
        return False
    if "-" in chosen.values() or not _fits(dict.fromkeys(SAID_OF.values(), "2") | chosen, chosen):
        return False
    family = chosen.get("model") not in (None, *OURS)
    return not family or all(name in AXES for name in chosen)


def all_pairs() -> list[Pair]:
    names = combinations(FACTORS, 2)
    return [pair for a, b in names for x in FACTORS[a] for y in FACTORS[b] if is_wanted(pair := ((a, x), (b, y)))]


@cache
def pairs_of(way: Way) -> frozenset[Pair]:
    chosen = [(name, getattr(way, name)) for name in FACTORS]
    return frozenset(pair for pair in combinations(chosen, 2) if is_wanted(pair))


def completed(given: dict[str, str], missing: set[Pair], draw: random.Random, plain: float) -> Way | None:
    """A way with the given values; None where no axes have them.

    Each other value covers, with those before, most of what is missing.

    Args:
        plain: the share of factors that are left at their first value: what is refused may be legal with less beside
            it.
    """
    gain = partial(_gain, missing=missing, draw=draw)
    fitting = [
        axes
        for axes in LAYOUTS
        if all(axes.get(name, value) == value for name, value in given.items()) and _fits(axes, given)
    ]
    if not fitting:
        return None
    chosen = max(fitting, key=lambda axes: sum(gain(choice, {**axes, **given}) for choice in axes.items())) | given
    allowed = {name: values for name, values in FACTORS.items() if name not in chosen}
    for said, axis in SAID_OF.items():
        allowed[said] = FACTORS[said][1:] if chosen[axis] != "1" else ("-",)
    allowed["model"] = SPARSE if chosen["ep"] != "1" else FACTORS["model"]
    for name in sorted(allowed, key=lambda name: (name != "model", draw.random())):
        if name not in chosen:
            is_plain = draw.random() < plain
            chosen[name] = (
                allowed[name][0] if is_plain else max(allowed[name], key=lambda value: gain((name, value), chosen))
            )
    return Way(**chosen)


def _fits(axes: dict[str, str], given: dict[str, str]) -> bool:
    """Whether the axes have what is said of them: a schedule a pipeline, a cut of the sequence tensor ranks, ep a
    model with experts.
    """
    has_axes = all(given.get(name, "-") == "-" or axes[axis] != "1" for name, axis in SAID_OF.items())
    return has_axes and (axes.get("ep", "1") == "1" or given.get("model", SPARSE[0]) in SPARSE)


def _gain(choice: Choice, others: dict[str, str], *, missing: set[Pair], draw: random.Random) -> float:
    """How many missing pairs the choice makes with the others, and a little chance."""
    pairs = {
        tuple(sorted([choice, other], key=lambda c: NAMES.index(c[0])))
        for other in others.items()
        if other[0] != choice[0]
    }
    return len(pairs & missing) + draw.random()


class Rules:
    """Asks the rules about a way once."""

    def __init__(self) -> None:
        self.known: dict[Way, str] = {}

    def refusal(self, way: Way) -> str:
        if way not in self.known:
            self.known[way] = way.refusal()
        return self.known[way]

    def legal(self) -> list[Way]:
        return [way for way, why in self.known.items() if not why]


def covering(draw: random.Random, rules: Rules, fixed: list[Way]) -> tuple[list[Way], dict[Pair, str]]:
    """The ways, ``fixed`` ones first, and why pairs that are in none were refused."""
    missing, order = set(all_pairs()), all_pairs()
    found = list(fixed)
    missing -= set().union(*map(pairs_of, found))
    refused: dict[Pair, str] = {}
    draw.shuffle(order)
    for pair in order:
        if pair not in missing:
            continue
        legal, why = [], ""
        for attempt in range(ATTEMPTS):
            way = completed(dict(pair), missing, draw, plain=attempt / (ATTEMPTS - 1))
            if way is None:
                why = "no layout of two to four ranks has both"
                break
            if not (said := rules.refusal(way)) and pair in pairs_of(way):
                legal.append(way)
            why = said or why
            if len(legal) == CANDIDATES:
                break
        if legal := legal or [way for way in rules.legal() if pair in pairs_of(way)]:
            found.append(max(legal, key=lambda way: len(pairs_of(way) & missing) / way.price))
            missing -= pairs_of(found[-1])
        else:
            missing.discard(pair)
            refused[pair] = why
    covered = set().union(*map(pairs_of, found))  # also by ways that were found later, for other pairs
    return found, {pair: why for pair, why in refused.items() if pair not in covered}


def reason(pair: Pair, rules: Rules) -> str:
    """Why the pair is in no legal way: the same whatever other ways there are."""
    draw, why = random.Random(str(pair)), ""
    for attempt in range(ATTEMPTS):
        way = completed(dict(pair), set(), draw, plain=attempt / (ATTEMPTS - 1))
        if way is None:
            return "no layout of two to four ranks has both"
        why = rules.refusal(way) or why
    return why


def pruned(found: list[Way], rules: Rules, fixed: list[Way]) -> list[Way]:
    """Without the ways whose own pairs others can take over by changing values that cover nothing of their own.

    The dearest first.
    """
    kept = list(found)
    while True:
        covered = _counted(kept)
        candidates = sorted(set(kept) - {*fixed}, key=lambda way: (len(_own(way, covered)) / way.price, str(way)))
        without = next((rest for way in candidates if (rest := _taken_over(way, kept, rules, fixed)) is not None), None)
        if without is None:
            return sorted(cheapened(kept, rules, fixed), key=str)
        kept = without


def cheapened(found: list[Way], rules: Rules, fixed: list[Way]) -> list[Way]:
    """Each way on fewer ranks, or not compiled, where it keeps its own pairs so."""
    kept = list(found)
    for number in range(len(kept)):
        for name in (*MESH, "compile"):
            old, covered = kept[number], _counted(kept)
            new = None if old in fixed else _kept(old, {name: FACTORS[name][0]}, covered, rules)
            if new is not None and new.price < old.price:
                kept[number] = new
    return kept


def _counted(ways: list[Way]) -> Counter[Pair]:
    """In how many of the ways each pair is."""
    return Counter(pair for way in ways for pair in pairs_of(way))


def _own(way: Way, covered: Counter[Pair]) -> set[Pair]:
    """The pairs that no other way has."""
    return {pair for pair in pairs_of(way) if covered[pair] == 1}


def _taken_over(way: Way, kept: list[Way], rules: Rules, fixed: list[Way]) -> list[Way] | None:
    """The others, changed so that they cover what they and the way covered; None where some pair finds no place."""
    rest = [other for other in kept if other != way]
    covered = _counted(rest)
    while left := [pair for pair in pairs_of(way) if not covered[pair]]:
        pair = min(left)
        for number, old in enumerate(rest):
            if old not in fixed and (new := _with(pair, old, covered, rules)) is not None:
                rest[number] = new
                covered = _counted(rest)
                break
        else:
            return None
    return rest


def _with(pair: Pair, old: Way, covered: Counter[Pair], rules: Rules) -> Way | None:
    """The way, changed to have the pair."""
    return new if (new := _kept(old, dict(pair), covered, rules)) is not None and pair in pairs_of(new) else None


def _kept(old: Way, change: dict[str, str], covered: Counter[Pair], rules: Rules) -> Way | None:
    """The way with other values; None where that would lose a pair, cost more, or be refused."""
    new = replace(
        old,
        **change,
        **{said: "-" for said, axis in SAID_OF.items() if change.get(axis) == "1"},
    )
    if new.price > old.price or not _own(old, covered) <= pairs_of(new):
        return None
    return None if rules.refusal(new) else new


def text(known: list[Way]) -> str:
    rules = Rules()
    fixed = [*PLAIN, *(way for way in known if way not in PLAIN and not rules.refusal(way))]
    arrays = [
        (pruned(found, rules, fixed), refused)
        for found, refused in (covering(random.Random(seed), rules, fixed) for seed in range(STARTS))
    ]
    found, refused = min(arrays, key=lambda array: (len(array[1]), sum(way.price for way in array[0])))
    refused = {pair: reason(pair, rules) for pair in refused}
    covered = set().union(*map(pairs_of, found))
    assert covered | set(refused) == set(all_pairs()) and not covered & set(refused)
    lines = [
        "# Written by scripts/ways.py: ways in which every two values of different factors meet, as far as the rules"
        " allow.",
        f"# {len(found)} ways cover {len(covered)} pairs; {len(refused)} pairs were found in no legal way:",
        *(f"# {'='.join(a)} {'='.join(b)}: {why}" for (a, b), why in sorted(refused.items())),
        *map(str, found),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    torch.set_num_threads(1)
    remember()
    made = text([] if "--anew" in sys.argv else ways())
    if "--check" not in sys.argv:
        FILE.write_text(made, encoding="utf-8")
    elif made != FILE.read_text(encoding="utf-8"):
        sys.exit("tests/ways.txt is not what the rules say today: run python scripts/ways.py, and read what changed")
    print(made.splitlines()[1])
