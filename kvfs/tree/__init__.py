"""The semantics of the namespace, written once: plain functions of a transaction."""
