"""The version of the programs; the formats on disk carry their own."""

from typing import Final

VERSION: Final = "0.1.0"
PROTOCOL: Final = 2
"""The version of the messages between nodes of a cluster and of the records in their engine: it
grows by one when these change. Nodes work together if theirs are at most one apart, so that a
cluster can be upgraded node by node."""
CONTROL: Final = 2
"""The version of the messages between a node and other processes of its host over its control
socket, so that programs go on while the node, or they, are replaced by the next version."""
KNOWS_HOMES: Final = 2
"""The protocol from which on a node knows homes of names (`kvfs.holdings.home_map`)."""
KEEPS_TAGS: Final = 2
"""The number of protocol and control from which on a program keeps tags of records
(`kvfs.meta.schema`)."""
