"""Find a model of transformers that computes what our decoder does."""
