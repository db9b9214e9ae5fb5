"""An HTTP server with OpenAI's interface, `ssd-jax serve`."""
