"""Find where a model can be cut into pipeline stages."""
