"""Calls as the documents of KempnerForge, NeMo AutoModel and Optimus-DL print them: benchmarks/contracts has each.

A contract's ranks are shared by all of a document that need as many; the first that fails names its line.
"""

from __future__ import annotations

import importlib

import pytest

from benchmarks.contracts.__main__ import DOCUMENTS, outcomes_of

CASES = [
    (document, world)
    for document in DOCUMENTS
    for world in sorted({item.world for item in importlib.import_module(document).ITEMS.found.values()})
]


@pytest.mark.first("automodel_nvfsdp-4")
@pytest.mark.parametrize(("document", "world"), CASES)
def test_documented_contracts_hold(pool, document, world):
    items = importlib.import_module(document).ITEMS.found
    numbers = [number for number, item in items.items() if item.world == world]
    found = outcomes_of(pool, document, world, numbers, items)
    assert found.keys() == set(numbers)
    assert {number: evidence for number, (mark, evidence, _) in found.items() if mark == "FAIL"} == {}
