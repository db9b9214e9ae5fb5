"""Matrices of safetensors files that are quantised: a file for each format says how it is read."""
