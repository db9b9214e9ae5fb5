"""The families of decoders: a file for each line says how its config.json and tensors are read."""
