"""Record what a rank's step does, operator by operator, on tensors without memory."""
