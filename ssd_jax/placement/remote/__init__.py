"""The draft on another host: a worker that is started by itself, and the engine's end of it."""
