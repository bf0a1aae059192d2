"""The engine of a node in a cluster: all metadata on its own disk, changed through a server."""
