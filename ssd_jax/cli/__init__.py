"""Command-line entry points: thin wrappers that read flags, call the library and print."""
