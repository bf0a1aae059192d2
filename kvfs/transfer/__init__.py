"""The transfer of files' bytes from other nodes, and on to others while they come.

| module | subject |
|---|---|
| `chunk_plan` | which chunks are asked for next: no I/O |
| `sources` | the nodes that may have them, and what is known of each: no I/O |
| `chunk_receiver` | the body of an answer into the file, verified chunk by chunk |
| `transport` | the ways by which the bytes of an answer come: TCP |
| `rdma` | the other one: Mooncake's transfer engine |
| `incoming_file`, `arriving_file` | a file that fills, and the readers that wait for it |
| `hedging` | one stream, and whether it is stuck |
| `fetch` | one file: streams, failures, what is believed |
| `file_fetches` | the files of a node, each fetched once |
| `chunk_provider` | what this node has for others |
"""
