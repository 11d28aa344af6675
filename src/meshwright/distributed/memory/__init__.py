"""Account for the memory of a step, measured or foreseen on tensors without memory."""
