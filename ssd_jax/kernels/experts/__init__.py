"""Products of rows of activations with the weights of the expert that each row goes to."""
