"""Define plain torch models, which know nothing of meshes and import little else of meshwright."""
