"""Search layouts and switches for the best plans."""
