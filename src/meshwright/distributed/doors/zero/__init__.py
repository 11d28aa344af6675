"""Accept nvFSDP's call as a door into the engine."""
