"""Decide context parallelism: which tokens of a row each rank has, and how attention reaches the others."""
