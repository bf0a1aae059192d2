"""The operations' way to the store: batches, the node's notices, a bucket's settings."""
