"""A node, put together (`parts`), started and stopped (`opening`)."""

from kvfs.node.opening import open_node
from kvfs.node.parts import Node

__all__ = ["Node", "open_node"]
