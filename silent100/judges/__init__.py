"""Judges that come along; each is a command like any other's."""
