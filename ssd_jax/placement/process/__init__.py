"""Placement `process`: a draft in a worker process, its protocol, and the engine's side of it."""
