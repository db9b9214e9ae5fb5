"""The engine and its roles. Host-side control imports no JAX; `target` owns the device programs."""
