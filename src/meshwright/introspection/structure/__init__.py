"""Measure on a small copy how tensor-parallel ranks can share a transformer, without names or a list of families."""
