"""The version of the programs; the formats on disk carry their own."""

from typing import Final

VERSION: Final = "0.1.0"
PROTOCOL: Final = 1
"""The version of what nodes of a cluster say to each other and keep in their engine: it grows by
one when that changes. Nodes work together where theirs are at most one apart, so that a cluster can
be upgraded node by node."""
CONTROL: Final = 1
"""Likewise, of what a node and other processes of its host say to each other over its control
socket, so that programs go on while the node is replaced by the next version, or they are."""
