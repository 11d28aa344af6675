"""Expert parallelism, decided."""
