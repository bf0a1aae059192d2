"""What checkpoints look like: safetensors headers, indexes."""
