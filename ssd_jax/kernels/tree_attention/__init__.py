"""Attention of several query tokens a sequence, over its pages and over draft branches."""
