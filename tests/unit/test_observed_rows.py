"""How attention's masks are counted, and where a rank's tokens lie in one process's rows."""

from __future__ import annotations

import weakref
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from meshwright.observation.blame import Blame
from meshwright.observation.copied import Copied
from meshwright.observation.groups import steps_in_groups
from meshwright.observation.passes import Pair, Passes
from meshwright.observation.patches import count_keys, keys_by_mask
from meshwright.observation.resumes import Resume
from meshwright.observation.row_kinds import of_rows, of_shares
from meshwright.observation.settings import wrong_draws
from meshwright.observation.traces import Place, Run, parts_of_rows, places_in, rows_given

ROWS, HEADS, QUERIES, KEYS = 2, 3, 4, 6
VISIBLE = torch.arange(KEYS) <= torch.arange(QUERIES)[:, None] + 1  # 2 keys for the first query, 5 for the last


@pytest.mark.parametrize(
    ("mask", "is_causal", "counts"),
    [
        (None, False, [6, 6, 6, 6]),
        (None, True, [1, 2, 3, 4]),
        (VISIBLE, False, [2, 3, 4, 5]),
        (torch.zeros(QUERIES, KEYS).masked_fill(~VISIBLE, torch.finfo(torch.float32).min), False, [2, 3, 4, 5]),
        (VISIBLE.expand(ROWS, 1, QUERIES, KEYS), False, [2, 3, 4, 5]),
        (-8.0 * torch.arange(KEYS).expand(QUERIES, KEYS), False, [6, 6, 6, 6]),  # ALiBi hides nothing
        (torch.ones(ROWS, HEADS, QUERIES, 1, dtype=torch.bool), False, [6, 6, 6, 6]),
    ],
)
@pytest.mark.parametrize("heads", [(ROWS, HEADS), (ROWS,)], ids=["heads", "no heads"])
def test_keys_in_sight_of_each_query(mask, is_causal, counts, heads):
    if mask is not None and mask.dim() - 2 > len(heads):
        mask = mask[:, 0]
    query, key = torch.zeros(*heads, QUERIES, 8), torch.zeros(*heads, KEYS, 8)
    assert keys_by_mask(query, key, mask, is_causal).tolist() == [counts] * ROWS


def step(**rows: list[int]) -> dict:
    given = {"rows": [*rows], "ids": [*rows.values()]}
    return {"calls": [{"inputs": {"ids": given}}]}


@pytest.mark.parametrize(
    ("whole", "part", "at"),
    [
        ([5, 7, 5, 9, 7, 5], [5, 9, 7], [2, 3, 4]),
        ([1, 2, 1, 2, 8, 9, 3, 3], [1, 2, 3, 3], [0, 1, 6, 7]),
        ([1, 2, 1, 4, 1, 6], [2, 4, 6], [1, 3, 5]),
        ([10, 11, 12, 13, 14, 15], [14, 10, 15], [4, 0, 5]),
        ([1, 2, 1, 4, 1, 6], [4, 2, 6], None),
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [2], None),
    ],
    ids=["a run", "two runs", "dealt in turn", "each once", "another order", "the whole", "a token"],
)
def test_a_ranks_tokens_are_found_in_a_row(whole, part, at):
    found = parts_of_rows(step(whole=whole), step(part=part))
    assert {key: (other, places.tolist()) for key, (other, places) in found.items()} == (
        {"part": ("whole", at)} if at else {}
    )


def test_scores_that_a_module_returns_are_a_routers(monkeypatch):
    for home, name in ((torch, "softmax"), (torch.Tensor, "softmax"), (functional, "scaled_dot_product_attention")):
        monkeypatch.setattr(home, name, getattr(home, name))  # put back afterwards
    scores, seen = torch.zeros(2, 3, 5), []
    recorder = SimpleNamespace(sketched={}, attends=lambda tensor: True, sees=lambda counts: seen.append(counts.shape))
    count_keys(recorder)
    recorder.sketched[id(scores)] = weakref.ref(scores), 0, {}
    scores.softmax(-1)
    torch.softmax(scores, -1)
    assert seen == []
    (scores * 2).softmax(-1)
    assert seen == [(2, 3)]


DTYPES = "float32", "float32"
BEFORE, INNER = torch.tensor([3.0, -1.0, 2.0]), torch.tensor([1.0, 4.0, -2.0])


@pytest.mark.parametrize(("times", "is_found"), [(1, True), (2, False), (0.5, False)])
def test_a_modules_output_that_counts_again_in_the_one_around_it(times, is_found):
    keys = {("h.1.attn input", 1): BEFORE, ("h.1.attn", 1): INNER, ("h.2.attn", 1): INNER * 3}
    pairs = {key: [Pair(0, "row", whole, whole, DTYPES)] for key, whole in keys.items()}
    steps = SimpleNamespace(in_order=lambda: [*keys], pairs=pairs.get, own=[{}, {}], whole={"short": False})
    off = [Pair(rank, "row", BEFORE + times * INNER, BEFORE, DTYPES) for rank in (0, 1)]
    assert Passes.added_again(steps, "h.1", off) == ("h.1.attn" if is_found else "")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "even"),
    [
        ([1.0, 1.01, -1e-3], [True, True, False]),  # the last one's sign is rounding
        ([1.0, 1.0, 1e-3], [True, True, True]),
        ([1.0, 2.0, 1e-3], None),  # no rounding
    ],
)
def test_where_adam_makes_a_step_of_rounding_is_left_out(found, even):
    def step(values: list[float]) -> dict:
        entry = {"m": [torch.tensor(values)], "shape": [3], "dtype": "bfloat16", "whole": None, "placements": []}
        return {"gradients": {"bias": entry}}

    place = Place("bias")
    blame = SimpleNamespace(
        places=[{"bias": place}],
        many=SimpleNamespace(step=lambda rank, number: step(found)),
        base={"steps": [step([1.0, 1.0, 1e-3])]},
        _bound=lambda *of: 6e-2,
    )
    where = Blame._even(blame, 0, 0, place)  # type: ignore[arg-type]
    assert (where is None) == (even is None) and (where is None or where.tolist() == even)


def data(*steps: list[list[str]]) -> list[dict]:
    """What a rank's model was given in each call of each step; a row is a token, and its label follows its name."""
    found = []
    for calls in steps:
        given = [{"rows": rows, "shape": [len(rows)], "ids": None, "dtype": "int64"} for rows in calls]
        own = [{"module": "", "known": True, "inputs": {"0": one}, "gives": []} for one in given]
        flat = [torch.tensor([float(ord(row[-1])) for row in rows]) for rows in calls]
        targets = [{"call": n, "shape": [len(t)], "flat": t} for n, t in enumerate(flat, 1)]
        found.append({"calls": own, "forward": [], "targets": targets})
    return found


def rows_of_step(whole: list[str], *ranks: list[str]) -> Passes:
    """One step of one process beside that of ranks; rows are told apart by the first letter."""
    passes = object.__new__(Passes)
    (passes.whole,), passes.own = data([whole]), [data([rows])[0] for rows in ranks]
    for step in (passes.whole, *passes.own):
        for call in step["calls"]:
            call["inputs"]["0"]["rows"] = [row[0] for row in call["inputs"]["0"]["rows"]]
    passes.lengths = [{} for _ in ranks]
    passes.whole_keys, *passes.keys = [
        {1: step["calls"][0]["inputs"]["0"]["rows"]} for step in (passes.whole, *passes.own)
    ]
    return passes


@pytest.mark.parametrize(
    ("whole", "ranks", "are_wrong", "are_labels"),
    [
        (["a1", "b2", "a3", "c4"], (["a1", "b2"], ["a3", "c4"]), (), ()),  # one token twice, with other labels
        (["a1", "b2", "c4"], (["a1", "b2"], ["a1", "c4"]), (1,), ()),
        (["a1", "b2", "a3", "c4"], (["a1", "b2"], ["a9", "c4"]), (), (1,)),
    ],
)
def test_a_row_that_a_step_has_twice_may_be_on_two_ranks(whole, ranks, are_wrong, are_labels):
    passes = rows_of_step(whole, *ranks)
    for found, wanted in ((passes.wrong_rows(), are_wrong), (passes.wrong_labels(), are_labels)):
        assert (found[0] if found else ()) == wanted


def test_the_parts_of_a_batch_may_come_in_another_order():
    def trace(*names: str) -> dict:
        inputs = {name: {"rows": [name], "shape": [1, 2], "ids": None, "dtype": "float32"} for name in names}
        return {"steps": [{"calls": [{"inputs": inputs}]}]}

    run = Run(None, [trace("audio", "image", "more")]).aligned(trace("image", "audio"))  # type: ignore[arg-type]
    assert [*run.step(0, 0)["calls"][0]["inputs"]] == ["image", "audio", "more"]
    assert rows_given(run.step(0, 0)) == {"audio", "image", "more"}


def test_places_of_a_table_that_are_read_elsewhere():
    table = torch.arange(6.0)
    passes = SimpleNamespace(reference={("col", 1): {"table": SimpleNamespace(tokens=table)}})
    for found, row, is_so in (
        (table[[0, 1, 2]], "table", True),
        (table[:3] + 0.5, "table", False),
        (table, "a", False),
    ):
        off = [Pair(1, row, found, table[3:], DTYPES)]
        assert Passes.are_elsewhere(passes, off, "col") == is_so  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("back", "wrong"),
    [
        (([1.0, 3.0], [5.0, 1.0]), ("dead path", (1,))),
        (([4.0, 1.0], [1.0, 2.0]), ("wrong order", (0,))),
        (([1.0, 2.0], [4.0, 1.0]), None),
        (([2.0, 4.0], [8.0, 2.0]), None),
    ],
)
def test_what_comes_back_to_a_stage(back, wrong):
    usual = [1.0, 2.0], [4.0, 1.0]
    pairs = [Pair(0, str(n), *map(torch.tensor, both), DTYPES) for n, both in enumerate(zip(back, usual, strict=True))]
    passes = SimpleNamespace(in_order=lambda: [("first", 1)], _returned=lambda key: pairs, own=[{}, {}])
    found = Passes.given_back(passes, (0,))  # type: ignore[arg-type]
    assert (found and (found[0], found[2])) == wrong


@pytest.mark.parametrize("rates", [{"betas": [0.75, 0.9]}, {"momentum": 0.75}], ids=["Adam", "SGD"])
def test_a_moment_that_was_another_parameters(rates):
    def entry(*values: float) -> dict:
        return {"m": [torch.tensor(values)]}

    key, share = ("exp_avg", 0.25) if "betas" in rates else ("momentum_buffer", 1.0)
    last = {"state": {"a": {key: entry(4.0, 8.0)}, "b": {key: entry(1.0, 2.0)}}}
    now = {"gradients": {"a": entry(8.0, 4.0)}, "rates": {"a": rates}}
    for begun, is_anothers in (((1.0, 2.0), True), ((4.0, 8.0), False), ((0.0, 0.0), False)):
        now["state"] = {"a": {key: entry(*(0.75 * b + share * g for b, g in zip(begun, (8.0, 4.0), strict=True)))}}
        run = Run(None, [{"steps": [last, now]}])  # type: ignore[arg-type]
        assert Resume(run, 1).has_anothers(0, "a") == is_anothers


@pytest.mark.parametrize(
    ("scales", "kind"),
    [
        ((2.0, 2.0, 2.0, 2.0), "double reduction"),
        ((1.5, 1.5, 1.5, 1.5), "wrong scale"),
        ((1.5, 1.5, 0.7, 0.7), "missing reduction"),
        ((1.5, 1.5, 1.2, 1.2, 0.7, 0.7, 0.9, 0.9), "missing reduction"),  # in two calls
        ((1.5, 0.7, 1.5, 0.7), None),
    ],
)
def test_rows_that_ranks_scale(scales, kind):
    rows, each = torch.randn(8, 5, generator=torch.Generator().manual_seed(0)), len(scales) // 2
    pairs = [Pair(n // each, str(n), scale * rows[n], rows[n], ("", "")) for n, scale in enumerate(scales)]
    passes = SimpleNamespace(own=[{}, {}], add_up=lambda _: False)
    assert (of_rows(passes, pairs, pairs) or (None, ""))[0] == kind  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("scales", "kind"),
    [
        ((3.6, 3.6, 1.385, 1.385), "wrong scale"),
        ((1.35 - 1e-7, 1.35 + 1e-7, 0.65 - 1e-7, 0.65 + 1e-7), "wrong scale"),
        ((1.5, 0.5), "wrong scale"),  # one row on each rank
        ((2.42, 1.65, None, 2.64), "missing reduction"),
        ((None, None, None, 1.0), "missing reduction"),
    ],
)
def test_rows_that_count_by_shares_of_batches_or_of_their_own(scales, kind):
    assert of_shares(scales, 2)[0] == kind


@pytest.mark.parametrize(
    ("own", "drawn", "are_drawn"),
    [
        (["ab", "xy"], ["s", "st"], True),
        (["ab", "xy"], ["s", "s"], False),  # other rows of the same draws
        (["ab", "xy"], ["st", "s"], False),  # the other rank draws its own
        (["abcd", "xyzw"], ["s", "st"], False),  # every rank has all rows
        (["ab", "cd"], ["s", "st"], False),
        (["ab", "xk"], ["s", "st"], "drawn"),  # a row of another step: ranks may shuffle by what they choose
    ],
)
@pytest.mark.parametrize("kind", ["drawn", "chosen"])
def test_rows_that_ranks_draw_themselves(own, drawn, are_drawn, kind):
    none = {"drawn": [], "chosen": []}
    ranks = [{"steps": [none | {kind: [*states]}]} for states in drawn]
    blame = SimpleNamespace(base={"steps": [none | {kind: ["s"]}]}, many=Run(None, ranks))  # type: ignore[arg-type]
    blame._drawn = partial(Blame._drawn, blame)
    found = Blame._draw_rows(blame, Counter("abcd"), [Counter(rows) for rows in own], Counter("abcdk"))  # type: ignore[arg-type]
    assert found == (are_drawn in (True, kind))


def test_a_part_with_other_dims_has_no_place():
    def whole(*shape: int) -> dict:
        return {**entry(*range(shape[0])), "shape": [*shape], "whole": None, "offset": None}

    mine = {
        "a.bias": {**entry(2.0, 3.0), "whole": [4], "offset": [2]},
        "a.weight": {**whole(2, 18), "m": [torch.ones(2)]},
    }
    assert [*places_in(mine, {"a.bias": whole(4), "a.weight": whole(4, 2, 3, 3)})] == ["a.bias"]
    assert [*places_in(mine, {"a.bias": whole(4), "a.weight": whole(4, 18)})] == ["a.bias", "a.weight"]


def entry(*values: float) -> dict:
    return {"m": [torch.tensor(values)], "shape": [len(values)], "dtype": "float32", "norm": 1.0, "fits": False}


@pytest.mark.parametrize(
    ("held", "differ"),
    [
        ([(2.0, 4.0), (1.0, 2.0)], ()),  # one rank alone keeps it
        ([(1.0, 2.0), (1.0, 2.0)], (0, 1)),
        ([(2.0, 4.0), (2.0, 4.0001)], ()),
        ([(2.0, 4.4), (2.0, 4.4)], (0, 1)),
        ([(2.0,), (2.0, 4.0, 1.0)], ()),  # in another shape
    ],
)
def test_a_copy_differs_where_no_rank_has_it_right(held, differ):
    assert copies_off([(2.0, 4.0)], [[own] for own in held]) == [(rank, 0) for rank in differ]


def copies_off(
    whole: list[tuple[float, ...]], ranks: list[list[tuple[float, ...]]], world: int = 0
) -> list[tuple[int, int]]:
    """Ranks and numbers of the copies that differ in the first step, of copies of a parameter that was (1, 2)."""

    def step(copies: list[tuple[float, ...]]) -> dict:
        return {"before": {"w": entry(1.0, 2.0)}, "copies": [{"owner": "", "held": {"w": entry(*v)}} for v in copies]}

    run = Run(None, [{"steps": [step(copies)], "world": world} for copies in ranks])  # type: ignore[arg-type]
    copied = Copied({"steps": [step(whole)]}, run, [{"w": Place("w")}] * len(ranks), [])
    return [(off.rank, number) for off, number in copied.off(0)]


@pytest.mark.parametrize(
    ("held", "differ"),
    [
        ([[(5.0, 6.0), (2.0, 4.0)]], []),  # found in another order
        ([[(2.0, 4.4), (5.0, 6.0)]], [(0, 0)]),
        ([[(5.0, 6.6)]], [(0, 1)]),  # the other one is gone
        ([[(9.0, 9.0), (5.0, 6.0), (2.0, 4.0)]], []),
        ([[]], []),
    ],
)
def test_of_several_copies_the_nearest_is_the_same(held, differ):
    assert copies_off([(2.0, 4.0), (5.0, 6.0)], held) == differ


def test_parameters_that_an_older_step_left():
    steps = [{"after": {"w": entry(n, 2.0)}, "before": {"w": entry(1.0, 2.0)}} for n in (1.0, 3.0, 5.0)]
    for number, older in ((1, False), (2, True)):
        assert Resume(Run(None, [{"steps": steps}]), number).is_older(0, "w") == older  # type: ignore[arg-type]


@pytest.mark.parametrize(("after", "is_so"), [("aabb", True), ("aaaa", False), ("abcd", False), ("aab.", False)])
def test_ranks_that_take_a_step_in_groups(after, is_so):
    own = [{"after": {} if key == "." else {"w": entry(ord(key), 2.0)}} for key in after]
    passes = SimpleNamespace(own=own, places=[{"w": Place("w")}] * 4)
    assert steps_in_groups(passes, {"w"}) == is_so  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("whole", "own", "wrong"),
    [
        ("a", "aa", None),  # the mask of whole rows
        ("a", "ab", (1,)),
        ("a", "xy", (1,)),  # of an own seed, and ranks must agree
        ("ab", "ab", None),  # one process draws the parts of both ranks
        ("ab", "aa", (1,)),
        ("abc", "aba", (2,)),
    ],
)
def test_ranks_with_the_same_rows_draw_alike_or_the_parts_of_one_process(whole, own, wrong):
    def step(states: str) -> dict:
        draws = [{"module": "drop", "state": state, "again": False, "n": 8} for state in states]
        return {"calls": [{"inputs": {"ids": {"rows": ["r"]}}}], "draws": draws}

    passes = SimpleNamespace(own=[*map(step, own)], whole=step(whole), names=[{}] * len(own))
    assert (wrong_draws(passes, []) or ("", None))[1] == wrong  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtypes", "short", "found"),
    [
        ({"a.0": "bfloat16", "a.1": "float32"}, False, "a.0"),
        ({"a.0": "bfloat16", "a.1": "bfloat16"}, False, "a.0"),  # one process has no 16 bits at all
        ({"a.0": "float32", "a.1": "bfloat16"}, True, "a.1"),  # one of several alike layers
        ({"a.0": "bfloat16", "a.1": "bfloat16"}, True, None),  # a policy that casts other modules than autocast does
        ({"a.0": "float32", "a.1": "float32"}, True, None),
    ],
)
def test_a_module_of_16_bits_where_one_process_has_more(dtypes, short, found):
    def pairs(key: tuple[str, int]) -> list[Pair]:
        return [Pair(0, "r", torch.ones(3) * 1.001, torch.ones(3), (dtypes[key[0]], "float32"))]

    passes = SimpleNamespace(whole={"short": short}, in_order=lambda: [(name, 1) for name in dtypes], pairs=pairs)
    assert (Passes.first_shorter(passes) or (None,))[0] == found  # type: ignore[arg-type]


def test_a_copy_beside_a_rank_that_never_steps_is_not_judged():
    held = [(1.0, 2.0)]
    assert copies_off([(2.0, 4.0)], [held, held]) and not copies_off([(2.0, 4.0)], [held, held], world=3)


def test_what_a_checkpoint_has_no_name_for_was_not_saved():
    step = {"after": {}, "saved": [1.0], "keys": ["optimizer.0.momentum"], "loaded": ["after"]}
    resume = Resume(Run(None, [{"steps": [step, step]}]), 1)  # type: ignore[arg-type]
    assert [resume.kind([0], [], [key]) for key in ("momentum", "rest")] == ["not restored", "not saved"]


def sketch_of(*values: float) -> dict:
    return entry(*values) | {"norm": torch.tensor(values).norm().item(), "placements": ()}


@pytest.mark.parametrize(
    ("others", "is_off"),
    [((0.01, 0.01), False), ((2e-4, 2e-4), True), ((2e-4, float("inf")), True), ((2e-4, 1e6), True)],
)
def test_a_gradient_that_cancels_in_a_step_is_compared_with_what_it_is_in_others(others, is_off):
    whole, own, bias = sketch_of(2e-4), sketch_of(2e-4 + 2e-8), Place("bias")
    steps = [{"gradients": {"bias": whole}}, *({"gradients": {"bias": sketch_of(other)}} for other in others)]
    blame = SimpleNamespace(base={"steps": steps}, places=[{"bias": bias}], _blocks=lambda *_: [])
    blame.many = SimpleNamespace(step=lambda *_: {"rates": {"bias": {}}})
    blame._bound, blame._entries = lambda *_: 5e-5, lambda *_: [(0, bias, own, whole)]
    assert bool(Blame._gradients(blame, 0)) == is_off  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("others", "differs"), [((0.0, 0.0), True), ((0.5, 0.5), False), ((0.0, float("inf")), True), ((0.0, 1e6), True)]
)
def test_an_output_that_cancels_is_compared_with_those_of_other_rows(others, differs):
    usual = {"at": None, "is_flat": False, "dtype": "float32", "features": torch.zeros(1)}
    whole, near, *rest = (
        SimpleNamespace(**usual, key=key, tokens=torch.tensor([value]))
        for key, value in (("a", 2e-4), ("a", 2e-4 + 3.6e-8), *(("b", other) for other in others))
    )
    shared = [(0, near, whole), *((0, row, row) for row in rest)]
    passes = SimpleNamespace(whole={"short": False}, _shared=lambda *_: shared)
    passes._aligned = lambda _rank, _name, mine, theirs: (mine.tokens, theirs.tokens)
    assert Passes.pairs(passes, ("head", 1))[0].differs == differs  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("steps", "joined"),
    [
        (["aa", ".b", "cc"], [False, False, True]),
        ([".a", "bb", "cc"], [False, True, False]),
        (["a.", ".b", "c."], [False] * 3),  # models that take turns
        (["aa..", "..bb", "aa.."], [False] * 3),
    ],
)
def test_a_rank_joins_where_it_takes_a_step_with_one_that_took_the_last(steps, joined):
    own = [[{"after": {} if keys[rank] == "." else {"w": 1}} for keys in steps] for rank in range(len(steps[0]))]
    found = [Resume(Run(None, [{"steps": one} for one in own]), n).joined(0) for n in range(len(steps))]  # type: ignore[arg-type]
    assert found == joined
