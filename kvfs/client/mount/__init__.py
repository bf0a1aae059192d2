"""Clients at paths of a mount: which store is behind one, and which data file."""
