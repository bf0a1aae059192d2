"""What a node keeps on its own disk: the store directory, data files, their checksums, leases and
the local index."""
