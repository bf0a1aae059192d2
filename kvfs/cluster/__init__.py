"""The nodes of a cluster: membership, failure detection, and how nodes come to trust each other."""
