"""Plans of loads: which bytes are read into which tensors. Pure."""
