"""Copies of blocks in namespaces that are kept by their nodes (coherence `peer`)."""
