"""The roles target, drafter and branching draft: protocols, and the records they exchange."""
