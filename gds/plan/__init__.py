"""Which bytes are read into which tensors. Pure."""
