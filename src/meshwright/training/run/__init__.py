"""A run's folder: what it holds, who may use it, how it is continued and exported."""
