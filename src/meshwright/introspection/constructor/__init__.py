"""Record how a model's constructor fills its tensors, and repeat it on each rank."""
