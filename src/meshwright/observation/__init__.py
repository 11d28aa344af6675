"""Observe anybody's training script, and say where two runs of it begin to differ."""
