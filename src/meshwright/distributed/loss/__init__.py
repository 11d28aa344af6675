"""Compute and check losses that a user declares: sums or means, over any output of a model."""
