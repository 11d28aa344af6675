"""Decide which frozen weights rest in 4 bits, and check that a layout can carry them."""
