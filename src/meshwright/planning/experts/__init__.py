"""Decide expert parallelism."""
