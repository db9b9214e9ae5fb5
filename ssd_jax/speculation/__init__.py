"""SSD on the host: speculation cache, fan-out, backups, waiting, the controller. No JAX."""
