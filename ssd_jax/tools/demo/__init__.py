"""What `ssd-jax demo` shows: an answer by origin, the fastest mode here, and predictions."""
