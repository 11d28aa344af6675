"""Find processes, start them, let them agree, and watch them."""
