"""Backups of a store or of a cluster: what is in them, where they lie, how they come back."""
