"""First-fork reports: where two runs of the same prompts part, and whether rounding explains it."""
