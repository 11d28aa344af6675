"""Decide activation checkpointing."""
