"""Leases on data files: what a client was told is here stays until its lease ends."""
