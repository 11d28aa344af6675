"""Look at the host of this process: installed releases, network interfaces, shared memory. No file imports torch."""
