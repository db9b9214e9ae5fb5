"""What is built on the engine: measurements, training, compilers' reports, the chat, the demo."""
