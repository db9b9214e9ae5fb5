"""Products of a few rows of activations with weights packed for reading once, in order."""
