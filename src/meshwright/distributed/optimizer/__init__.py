"""Take the optimizer step: gradient norm, loss scale, low-bit and offloaded state."""
