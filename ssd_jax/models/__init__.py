"""Decoder families: configuration, layers, logical axes. They know of no engine."""
