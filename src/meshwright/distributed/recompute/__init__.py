"""Activation checkpointing, activation offload and per-block compilation applied."""
