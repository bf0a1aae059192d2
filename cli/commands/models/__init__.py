"""Model weights: their parts, loads and their speed."""
