"""Name the pretend device."""

DEVICE_TYPE = "pretend"
"""Its type in ``torch.device``, of its module ``torch.pretend``, and of its process group backend."""
