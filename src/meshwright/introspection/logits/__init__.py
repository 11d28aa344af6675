"""What a model does to its logits: found on a small copy, recorded in each forward, done to pieces."""
