"""Namespaces, users, exports, nodes, settings."""
