"""Assert in your own project's tests that a layout equals one process."""

from __future__ import annotations

from typing import Any

from meshwright.planning.layout import Layout

from .problem import BatchFactory
from .verify import verify


def assert_layout_equals_single_process(
    model_factory: Any, layout: Layout, batch_factory: BatchFactory | None = None, **options: Any
) -> None:
    """Fail, with the report as the message, unless a layout equals one process.

    The arguments are those of ``meshwright.verify``.

        from my_code import MyModel
        from meshwright import Layout
        from meshwright.verification.testing import assert_layout_equals_single_process

        def test_my_model_shards():
            assert_layout_equals_single_process(MyModel, Layout(dp_shard=4))

    Raises:
        AssertionError: the layout differs; the message names the first place.
    """
    report = verify(model_factory, layout, batch_factory, **options)
    if not report:
        raise AssertionError(str(report))
