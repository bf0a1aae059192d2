"""The FUSE mount: the kernel moves the bytes, this package decides."""
