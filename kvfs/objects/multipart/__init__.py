"""Uploads in parts: their records, their parts' data files, and how they are completed."""
