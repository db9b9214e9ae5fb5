"""Data parallelism of the draft role: several drafts of one model share its work."""
