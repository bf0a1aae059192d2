"""Use cases that every door shares: each is decided here once, doors translate."""
