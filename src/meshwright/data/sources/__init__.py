"""Find and read the files that a user names."""
