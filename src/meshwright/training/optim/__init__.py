"""How fast and by what rule parameters move: learning-rate schedules and the optimizer."""
