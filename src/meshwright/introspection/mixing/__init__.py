"""Find and intercept the calls by which a model's tokens see each other."""
