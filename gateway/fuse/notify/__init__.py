"""Messages that tell the kernel of changes by others."""
