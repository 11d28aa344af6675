"""Training from a config: the one user-facing config tree, what it builds, and the loop."""
