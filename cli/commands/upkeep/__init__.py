"""Stores and engines: fsck, scrub, quarantine, rebuild."""
