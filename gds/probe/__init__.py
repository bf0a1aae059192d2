"""Probes of this machine: what it has and can do for loads."""
