"""Use a trained model: evaluate it, write with it."""
