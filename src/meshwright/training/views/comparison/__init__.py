"""Lay runs beside each other, by what they wrote into their folders. Torch-free."""
