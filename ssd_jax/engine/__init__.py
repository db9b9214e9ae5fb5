"""Continuous batching: requests, rounds, stop strings, metrics, traces. Pure host code, no JAX."""
