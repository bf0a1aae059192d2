"""The format of checkpoints: safetensors headers, indexes."""
