"""The way of a request: its head, its body, its outcome."""
