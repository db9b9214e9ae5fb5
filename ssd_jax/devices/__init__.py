"""Target and draft on devices: their compiled programs, and the roles that dispatch them."""
