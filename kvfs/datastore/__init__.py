"""A node's own disk: the store directory, data files, their checksums, leases and the local
index."""
