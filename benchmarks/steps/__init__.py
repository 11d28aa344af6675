"""Forecast steps of a measured CPU from their operators, and messages with what overlaps them."""
