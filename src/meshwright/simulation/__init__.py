"""Forecast a step's seconds and bytes from a layout, a batch and a cluster, and search for the best layouts."""
