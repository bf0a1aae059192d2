"""Single namespaces as mounts of their own, which NFS exports."""
