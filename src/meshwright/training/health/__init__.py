"""Watch the ranks of a run: heartbeats, lost peers, stragglers."""
