"""The keepers: a node's own work, in tasks of the node's nursery."""
