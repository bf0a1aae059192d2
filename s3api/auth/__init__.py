"""Authentication: signatures of requests, forms and chunks, the identities' credentials, presigned
URLs.

Everything here is pure: bytes in, a verdict out; no sockets, no files, no engine. A refusal is an
`S3Error`; no request of a client raises anything else. No secret, signing key or session token
stands in a repr, a message or an error's `extra`.
"""
