"""Operations on buckets and their settings."""
