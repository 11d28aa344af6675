"""Lists what a step asks of the host."""
