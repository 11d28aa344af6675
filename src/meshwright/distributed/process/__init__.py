"""Processes: who they are, how they start, agree and are watched."""
