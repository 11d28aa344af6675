"""Find where a model can be cut into pipeline stages: tensors between blocks, and other reads of a forward."""
