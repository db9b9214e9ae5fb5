"""The draft on another host: a worker that is started separately, and the engine's end."""
