"""The target: its programs, of chains and of trees, and the role that dispatches them."""
