"""Models that measurement refuses train as one process does with hints of a line."""

from __future__ import annotations

import pytest
from support.hinted import REMIXED, UNROLLED, VOCABULARY, Remixed, Unrolled

from meshwright import ConfigError, Layout, UnsupportedError, verify
from meshwright.verification.problem import RandomBatches

pytestmark = pytest.mark.all

BATCHES = RandomBatches(VOCABULARY, rows=4, seq_len=6, keys=())
TP, PP, MIXED = Layout(dp_shard=1, tp=2), Layout(dp_shard=1, pp=2), Layout(dp_shard=2, tp=2)
CASES = [(Unrolled, UNROLLED, TP), (Unrolled, UNROLLED, PP), (Unrolled, UNROLLED, MIXED), (Remixed, REMIXED, PP)]


@pytest.mark.parametrize(
    ("model", "hints", "layout"), CASES, ids=lambda value: getattr(value, "__name__", None) or str(value)
)
def test_hinted_models_are_equal(pool, model, hints, layout):
    with pytest.raises((ConfigError, UnsupportedError)):
        verify(model, layout, BATCHES, steps=1, dtypes=("float64",), pool=pool)
    report = verify(model, layout, BATCHES, steps=2, dtypes=("float64",), pool=pool, hints=hints)
    assert report, report
