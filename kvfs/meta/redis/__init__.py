"""The distributed metadata engine: Redis or Valkey."""
