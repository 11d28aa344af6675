"""Apply tensor and sequence parallelism: weights cut along features, activations along the sequence."""
