"""The optional second transport: Mooncake's transfer engine moves the bytes.

A mover is a process of its own that holds the engine, since that is foreign code which listens on
the network: a failure of it hurts only itself, and it is killed and started again.

| module | subject |
|---|---|
| `engine_process` | the mover: imports the engine, carries out requests |
| `port_guard` | the hosts whose connections the kernel lets through to the mover |
| `registered_memory` | memory that it may use: pieces that are lent, pieces where bytes land |
| `transfer_process` | the mover as its node sees it: started, asked, killed |
| `exporter` | chunks for others |
| `rdma_reader` | chunks of others: the transport's face for `fetch` |
| `rdma_transport` | all of it, for a node |

Anyone who reaches the mover's ports may read and write its memory: the engine knows no
authentication. So that memory holds only chunks that a proven peer was just promised, or that were
asked for, is wiped after each, and landed bytes are copied from it before they are verified; and
only hosts of peers that proved their identity reach the ports.
"""
