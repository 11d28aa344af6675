"""What a run shows and leaves behind: progress on the screen, metrics on disk, memory, FLOPs, start-up time, the closing report."""
