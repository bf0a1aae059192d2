"""The kernel's requests: how they are read, answered and handed to libfuse."""
