"""Tensor and sequence parallelism, decided."""
