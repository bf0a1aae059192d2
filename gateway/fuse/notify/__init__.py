"""What the kernel is told of changes by others."""
