"""A smaller model as a draft, and the records of what it proposes."""
