"""Measure the machine of this job, and write its profile."""
