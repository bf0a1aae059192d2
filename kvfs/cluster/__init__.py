"""Which nodes there are, whether they live, and how they come to trust each other."""
