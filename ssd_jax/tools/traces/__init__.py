"""Reading and drawing what `--trace` wrote."""
