"""The version of the programs; the formats on disk carry their own."""

from typing import Final

VERSION: Final = "0.1.0"
PROTOCOL: Final = 1
"""Of what nodes of a cluster say to each other and keep in their engine: it grows by one when that
changes. Nodes work together where theirs are at most one apart, so that a cluster can be upgraded
node by node."""
