"""Tensor and sequence parallelism: weights cut along features, activations between blocks along the sequence."""
