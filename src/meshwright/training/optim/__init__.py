"""Build optimizers and learning-rate schedules."""
