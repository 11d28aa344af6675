"""What a test needs of the environment that it runs in: the package installed, a release of transformers."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest


def _release(package: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in version(package).split(".")[:2])
    except PackageNotFoundError:
        return ()


TRANSFORMERS = _release("transformers")
installed = pytest.mark.skipif(
    not _release("meshwright"), reason="the sources are on the path: an advised command is another one there"
)
not_of_517 = pytest.mark.skipif(
    TRANSFORMERS == (5, 17),
    reason="transformers 5.17 writes this model otherwise",
)
