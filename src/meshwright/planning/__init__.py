"""Facts and wishes become a Plan: a frozen, batch-free value that can be printed, compared and stored. Needs no process group and no GPU."""
