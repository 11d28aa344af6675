"""Decide tensor and sequence parallelism."""
