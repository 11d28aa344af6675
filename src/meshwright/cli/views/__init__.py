"""Show what runs wrote: several beside each other, and the pages that verbs write."""
