"""Estimate a rank's memory: model states, activations, logits, messages."""
