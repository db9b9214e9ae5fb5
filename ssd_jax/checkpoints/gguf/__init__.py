"""GGUF files: header, configuration, tensors, and the architectures that they name."""
