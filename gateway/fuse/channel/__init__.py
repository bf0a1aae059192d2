"""The requests of the kernel: how they are read, answered and handed to libfuse."""
