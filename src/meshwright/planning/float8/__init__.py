"""Decide float8 training."""
