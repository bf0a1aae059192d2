"""The bytes of requests and replies, and what they mean to KVFS."""
