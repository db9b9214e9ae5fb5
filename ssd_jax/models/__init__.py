"""Decoder families: configuration, layers, logical axes. Nothing here knows of engines."""
