"""What a step will hold, seen on a step that is played on tensors without memory: no process group, no weights."""
