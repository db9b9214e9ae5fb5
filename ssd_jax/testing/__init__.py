"""For tests of what is built on this package: checkpoints, and roles without JAX."""
