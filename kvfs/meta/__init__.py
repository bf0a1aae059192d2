"""Metadata: the contract of an engine, the records and keys, and the engines."""
