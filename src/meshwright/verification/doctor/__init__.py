"""Tell what works in this environment: versions, host, torch, private points, and each mesh axis by trial."""
