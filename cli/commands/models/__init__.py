"""Model weights: what they are made of, loads and their speed."""
