"""``MeshwrightStrategy``: lay out what Lightning Fabric's ``setup`` is given; the loop stays Fabric's."""

from __future__ import annotations

from meshwright.core.errors import MissingExtraError

try:
    import lightning_fabric as _lightning_fabric  # noqa: F401
except ImportError as missing:
    raise MissingExtraError("meshwright.integrations.fabric", "lightning-fabric", "fabric") from missing

from .fabric_private import MeshwrightStrategy

__all__ = ["MeshwrightStrategy"]
