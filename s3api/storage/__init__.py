"""How operations reach the store: batches, the node's notices, a bucket's settings."""
