"""Manage a run's folder: its files, its lock, its continuation and export."""
