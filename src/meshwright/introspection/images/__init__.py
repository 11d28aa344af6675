"""Find how a model takes images beside tokens, and cut batches of them by rows."""
