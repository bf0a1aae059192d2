"""How the bytes of a file come from other nodes, and go on to others while they come.

| module | subject |
|---|---|
| `plan` | which chunks are asked for next: no I/O |
| `sources` | the nodes that may have them, and what is known of each: no I/O |
| `receiving` | the body of an answer into the file, verified chunk by chunk |
| `transport` | the ways by which the bytes of an answer come: TCP |
| `rdma` | the other one: Mooncake's transfer engine |
| `arriving` | a file that fills, and who waits for it |
| `hedging` | one stream, and whether it is stuck |
| `fetch` | one file: streams, failures, what is believed |
| `fetching` | the files of a node, each fetched once |
| `shelf` | what this node has for others |
"""
