"""Forecast a step on a measured machine from the operators and messages of its ranks."""
