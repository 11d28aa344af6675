"""Provide what every other package may use: mesh axes, errors, strict configuration, names, units."""
