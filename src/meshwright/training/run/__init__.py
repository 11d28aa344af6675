"""Keep a run's folder: its files, its one user, its continuation and export."""
