"""Weights: how they come into being, how they lie on ranks, and how whole tensors are read off them."""
