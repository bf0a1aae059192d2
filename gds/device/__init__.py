"""Memory of GPUs, and the ways there."""
