"""Generate text, token by token, with keys and values that belong to the generation."""
