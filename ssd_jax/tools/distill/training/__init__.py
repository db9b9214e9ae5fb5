"""Training a draft on what its target writes."""
