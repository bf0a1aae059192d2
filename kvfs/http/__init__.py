"""The HTTP/1.1 server of KVFS, and a client for nodes: the kernel moves bodies, and every wait has
a deadline.

`kvfs.http.api` is its public face. It knows nothing of what is served, and nothing of KVFS: front
doors and nodes give it a handler.

| module | subject |
|---|---|
| `limits` | what a peer may send, and how long each wait lasts |
| `full_server` | which peers are served while all connections are taken: no I/O |
| `connection_errors` | what goes wrong on a connection |
| `head` | the head of a request |
| `parser` | bytes to a head: strict, no I/O |
| `chunks` | the framing of chunked bodies: strict, no I/O |
| `stream` | a socket, with deadlines |
| `tls_stream` | the same with TLS on it |
| `inbox` | bytes that have arrived and were not taken yet |
| `body` | the body of a request |
| `response` | a handler's answer, and its head as bytes: no I/O |
| `response_writer` | a response onto a stream |
| `connection` | one connection: requests in, responses out, in order |
| `idle_connections` | connections that wait for their next request, and the task that serves them |
| `server` | listeners, connections, deadlines, the graceful end |
| `tls_contexts` | contexts for TLS |
| `http_client` | one connection as its client: requests out, answers in |
"""
