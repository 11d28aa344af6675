"""Record the operations of a model's constructor on its tensors, and repeat them where the tensors are needed."""
