"""The command line's own words: the help of every verb, and what a shell completes."""
