"""`LLM`, its calls, and how prompts become requests."""
