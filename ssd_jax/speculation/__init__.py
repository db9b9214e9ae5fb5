"""The algorithm: sampling law, randomness, and (next) proposals, verification, outcomes, cache.

Pure functions of arrays; nothing here knows of devices or models.
"""
