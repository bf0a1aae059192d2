"""The transfer of files' bytes from other nodes and the cold tier, and on to other nodes while they
come.

| module | subject |
|---|---|
| `transfer` | one file on its way, and those who wait for it |
| `transfers` | all that come to a node, each once |
| `origins` | where a file's data come from: which nodes, or the cold tier |
| `arrivals`, `outdated_data` | what becomes of what came; what goes since others replaced it |
| `peer_fetches`, `peer_fetch` | chunks of other nodes: streams, failures, what is believed |
| `chunk_plan` | which chunks are asked for next: no I/O |
| `sources` | the nodes that may have them, and what is known of each: no I/O |
| `hedging` | one stream, and whether it is stuck |
| `chunk_receiver` | the body of an answer into the file, verified chunk by chunk |
| `transport` | the ways by which the bytes of an answer come: TCP |
| `rdma` | the other one: Mooncake's transfer engine |
| `chunk_provider` | what this node has for others |
| `cold` | objects of a cold tier |
"""
