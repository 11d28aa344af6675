"""Rehearse a run: real steps of one rank, without the others."""
