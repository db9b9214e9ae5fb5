"""The roles: target, drafter, branching draft. What is asked of them, and what they are told."""
