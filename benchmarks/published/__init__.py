"""Read published measurements, and describe their models, clusters and software to the forecast."""
