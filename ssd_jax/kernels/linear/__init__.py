"""Products of a few rows of activations with weights packed to be read once, in order."""
