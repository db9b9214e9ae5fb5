"""The algorithm: sampling law, randomness, proposals, verification, records and their branches.

Pure functions of arrays, and pure host code (fan-out, speculation cache, backups, n-grams); nothing
here knows of devices or models.
"""
