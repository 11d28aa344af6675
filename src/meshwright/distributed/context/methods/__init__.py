"""Reach the tokens of other ranks, in each of the ways that attention has."""
