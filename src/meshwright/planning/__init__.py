"""Facts and wishes become a Plan: a frozen, batch-free value, to print, compare and store. No process group, no GPU."""
