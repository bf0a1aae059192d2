"""The way of a request: its head, its body, what became of it."""
