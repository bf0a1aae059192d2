"""A node's part in a change of a namespace's coherence to `peer`, and back."""
