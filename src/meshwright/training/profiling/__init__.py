"""Record a few steps: profiles, traces, memory history."""
