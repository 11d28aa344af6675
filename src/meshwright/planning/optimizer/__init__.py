"""Decide the number of bits of the optimizer's state, and where it rests."""
