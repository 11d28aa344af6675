"""Activation checkpointing, decided."""
