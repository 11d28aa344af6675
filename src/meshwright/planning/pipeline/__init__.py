"""Decide pipeline parallelism: stages, schedules, messages."""
