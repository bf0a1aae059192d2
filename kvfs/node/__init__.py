"""A node, put together (`composition`), started and stopped (`startup`)."""

from kvfs.node.composition import Node
from kvfs.node.startup import open_node

__all__ = ["Node", "open_node"]
