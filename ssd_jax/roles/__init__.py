"""The roles target, drafter and branching draft: their protocols, and the records they exchange."""
