"""Estimate what a rank holds: states, activations, logits, messages."""
