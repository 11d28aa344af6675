"""Submit runs as Slurm jobs."""
