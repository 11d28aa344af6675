"""Plain torch models. They know nothing of meshes, and import nothing else of meshwright."""
