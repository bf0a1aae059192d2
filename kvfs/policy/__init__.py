"""Pure decisions: what to evict. Nothing here reads a disk or a clock."""
