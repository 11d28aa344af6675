"""Record what a model's constructor does to its tensors, and repeat it where they are needed."""
