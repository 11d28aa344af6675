"""Identify, start, coordinate and watch processes."""
