"""Record what a model's constructor does to its tensors, and do it again where they are needed."""
