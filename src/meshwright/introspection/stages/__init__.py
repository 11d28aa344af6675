"""Find where a model can be cut into pipeline stages: what goes from block to block, and what else a forward reads."""
