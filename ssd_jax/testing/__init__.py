"""Helpers for tests of code built on this package: checkpoints, and roles without JAX."""
