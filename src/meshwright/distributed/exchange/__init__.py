"""Exchange tensors among the ranks of one axis: over a process group, or among threads of a rehearsal."""
