"""The terminal chat: entries, commands, the conversation, its figures, and the session of them."""
