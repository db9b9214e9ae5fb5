"""The machine: files, signals, memory, cores, caches. It knows nothing of models."""
