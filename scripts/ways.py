"""Write tests/ways.txt: a few ways in which every two values of different factors meet, as far as the rules allow.

    python scripts/ways.py [--check]        --check: change nothing; exit with 1 if the file would be another

Most faults need one switch or two to show (Kuhn, Wallace, Gallo 2004). Greedy, one way at a time (Cohen et al. 1997, AETG): the rules are
asked about the few candidates that would cover most, never about the whole product.
"""

from __future__ import annotations

import random
import sys
from functools import partial
from itertools import combinations, product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.ways import AXES, FACTORS, FILE, OURS, Way

Choice = tuple[str, str]
"""(factor, value)."""
Pair = tuple[Choice, Choice]
NAMES = list(FACTORS)
SPARSE = ("softmax", "sigmoid", "deepseek_v3")
LAYOUTS = [
    axes
    for axes in (
        dict(zip(("dp", "tp", "pp", "ep"), values, strict=True)) for values in product(*(FACTORS[n] for n in ("dp", "tp", "pp", "ep")))
    )
    if 2 <= Way(**axes).layout.world <= 4 and (axes["ep"] == "1" or Way(**axes).layout.dp_shard * Way(**axes).layout.tp > 1)
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
        "dp=hsdp",
        "dp=fsdp tp=2 sequence=cut",
    )
]
"""They come first: where one of them fails, that says more than a way of many switches; and most mutants die in one of them."""
CANDIDATES, ATTEMPTS = 5, 24
"""Legal ways of which the best is taken, and how many are tried before a pair is called refused."""


def is_wanted(pair: Pair) -> bool:
    """Families meet the axes; what is said of an axis meets nothing where the axis is not there."""
    chosen = dict(pair)
    if "-" in chosen.values() or not _fits({"pp": "2", "tp": "2"} | chosen, chosen):
        return False
    family = chosen.get("model") not in (None, *OURS)
    return not family or all(name in AXES for name in chosen)


def all_pairs() -> list[Pair]:
    names = combinations(FACTORS, 2)
    return [pair for a, b in names for x in FACTORS[a] for y in FACTORS[b] if is_wanted(pair := ((a, x), (b, y)))]


def pairs_of(way: Way) -> set[Pair]:
    chosen = [(name, getattr(way, name)) for name in FACTORS]
    return {pair for pair in combinations(chosen, 2) if is_wanted(pair)}


def price(way: Way) -> float:
    return way.layout.world * (4 if way.compile == "yes" else 1) * (1 if way.pp == way.tp == "1" else 1.5)


def completed(given: dict[str, str], missing: set[Pair], draw: random.Random, plain: float) -> Way | None:
    """A way with the given values; None where no axes have them. Each other value covers, with those before, most of what is missing.

    Args:
        plain: the share of factors that are left at their first value: what is refused may be legal with less beside it.
    """
    gain = partial(_gain, missing=missing, draw=draw)
    fitting = [axes for axes in LAYOUTS if all(axes.get(name, value) == value for name, value in given.items()) and _fits(axes, given)]
    if not fitting:
        return None
    chosen = max(fitting, key=lambda axes: sum(gain(choice, {**axes, **given}) for choice in axes.items())) | given
    allowed = {name: values for name, values in FACTORS.items() if name not in chosen}
    allowed["schedule"] = FACTORS["schedule"][1:] if chosen["pp"] == "2" else ("-",)
    allowed["sequence"] = FACTORS["sequence"][1:] if chosen["tp"] == "2" else ("-",)
    allowed["model"] = SPARSE if chosen["ep"] == "2" else FACTORS["model"]
    for name in sorted(allowed, key=lambda name: (name != "model", draw.random())):
        if name not in chosen:
            is_plain = draw.random() < plain
            chosen[name] = allowed[name][0] if is_plain else max(allowed[name], key=lambda value: gain((name, value), chosen))
    return Way(**chosen)


def _fits(axes: dict[str, str], given: dict[str, str]) -> bool:
    """Whether the axes have what is said of them: a schedule a pipeline, a cut of the sequence tensor ranks, ep a model with experts."""
    said = (("pp", "schedule"), ("tp", "sequence"))
    has_axes = all(given.get(name, "-") == "-" or axes[axis] == "2" for axis, name in said)
    return has_axes and (axes.get("ep") != "2" or given.get("model", SPARSE[0]) in SPARSE)


def _gain(choice: Choice, others: dict[str, str], *, missing: set[Pair], draw: random.Random) -> float:
    """How many missing pairs the choice makes with the others, and a little chance."""
    pairs = {tuple(sorted([choice, other], key=lambda c: NAMES.index(c[0]))) for other in others.items() if other[0] != choice[0]}
    return len(pairs & missing) + draw.random()


def covering(draw: random.Random) -> tuple[list[Way], dict[Pair, str]]:
    """The ways, and why pairs that are in none were refused."""
    known: dict[Way, str] = {}
    missing, order = set(all_pairs()), all_pairs()
    found = list(PLAIN)
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
            if way not in known:
                known[way] = way.refusal()
            if not known[way] and pair in pairs_of(way):
                legal.append(way)
            why = known[way] or why
            if len(legal) == CANDIDATES:
                break
        if legal:
            found.append(max(legal, key=lambda way: len(pairs_of(way) & missing) / price(way)))
            missing -= pairs_of(found[-1])
        else:
            missing.discard(pair)
            refused[pair] = why
    return pruned(found), refused


def pruned(found: list[Way]) -> list[Way]:
    """Without those that cover nothing of their own, the dearest first."""
    kept = list(found)
    for way in sorted(set(found) - {*PLAIN}, key=lambda way: (-price(way), str(way))):
        others = [other for other in kept if other != way]
        if pairs_of(way) <= set().union(*map(pairs_of, others)):
            kept = others
    return sorted(kept, key=str)


def text() -> str:
    found, refused = covering(random.Random(0))
    covered = set().union(*map(pairs_of, found))
    lines = [
        "# Written by scripts/ways.py: ways in which every two values of different factors meet, as far as the rules allow.",
        f"# {len(found)} ways cover {len(covered)} pairs; {len(refused)} pairs were found in no legal way:",
        *(f"# {'='.join(a)} {'='.join(b)}: {why}" for (a, b), why in sorted(refused.items())),
        *map(str, found),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    made = text()
    if "--check" not in sys.argv:
        FILE.write_text(made, encoding="utf-8")
    elif made != FILE.read_text(encoding="utf-8"):
        sys.exit("tests/ways.txt is not what the rules say today: run python scripts/ways.py, and read what changed")
    print(made.splitlines()[1])
