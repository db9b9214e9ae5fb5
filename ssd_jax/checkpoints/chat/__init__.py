"""Chats as text: messages, the templates that write them, and the formats that models write."""
