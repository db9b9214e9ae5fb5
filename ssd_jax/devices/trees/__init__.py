"""Drafts that propose token trees, and that branch off them."""
