"""Use cases that every door shares: each is decided here once, doors translate.

| module | subject |
|---|---|
| `open` | how a door comes to a descriptor, or to its answer |
| `missing_data` | the one decision on a file whose data file is not what its record says |
| `stage`, `stage_records` | files in the making, and their transactions |
| `names` | files that have their names from the beginning; a rename over a durable file |
| `post_commit`, `deferred_notify` | a change of names committed, and those told who must know |
| `port` | the node as doors reach it: in process (`kvfs.node.local_port`), by socket |
| `control_port`, `node_client` | that socket; what a client makes of a node that does not answer |
| `space_reservation`, `admission` | space for what will be written: beside the node, in it |
| `space_accounting` | the bytes and files of each namespace |
| `touches`, `miss_counters` | what was read and what was missed, for eviction and for people |
| `volume`, `inode_holders` | inode numbers, orphans, access times; who holds an inode |
| `content_versions`, `seal` | new content of a published file; its checksums |
| `quarantine` | data files that nobody may read, until an administrator removes them |
| `kernel_notify` | messages by which a mount's kernel forgets |
"""
