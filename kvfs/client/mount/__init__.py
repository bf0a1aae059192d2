"""Clients at paths of a mount: the store behind a path, and its data file."""
