"""Watch the ranks of a run: heartbeats, stalls, lost peers."""
