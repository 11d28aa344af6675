"""What a step asks of the host."""
