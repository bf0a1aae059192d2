"""The keepers: what a node does by itself, in tasks of the node's nursery."""
