"""A node, put together (`parts`), started and stopped (`opening`)."""

from kvfs.node.composition import Node
from kvfs.node.startup import open_node

__all__ = ["Node", "open_node"]
