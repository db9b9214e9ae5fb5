"""Settings of an engine: declared, checked by themselves and together."""
