"""Measure a run's figures, and write them to disk and to trackers."""
