"""Checkpoints: their sources (`sources`), how they are read, and how arrays are loaded.

`opening.open_checkpoint` is the entry point. Every format (GGUF, Hugging Face safetensors, our own
orbax directories, draft checkpoints) is a `tensors.TensorSource` with Hugging Face's names and
layouts. Tokenizers, their vocabularies and chat templates come from the same files.
"""
