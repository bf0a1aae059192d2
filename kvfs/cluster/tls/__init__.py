"""TLS between the nodes of a cluster.

| module | subject |
|---|---|
| `certificates` | the authority that follows from a secret, certificates of nodes: no I/O |
| `peer_tls` | the contexts of a node, made anew when a secret or a certificate is replaced |
"""
