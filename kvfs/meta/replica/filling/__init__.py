"""The first and any later reading of all that a shard has."""
