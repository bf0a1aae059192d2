"""The NFS door: NFS-Ganesha, run by the node over views of the namespaces that are exported."""
