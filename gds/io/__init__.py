"""The ways in which bytes come from files: reads, page cache, memory of the host."""
