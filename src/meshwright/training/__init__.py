"""Train from a config: the config tree, what it builds, and the loop."""
