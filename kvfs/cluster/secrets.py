"""The secrets by which nodes know that they are of one cluster. No I/O.

A cluster has one secret, and for a while two: a new one is given to all nodes before the old one is
withdrawn. As text, a line for each, the newest first:

    kvfs-cluster:<id of the cluster>:<64 hexadecimal digits>

Invariants
- No message and no repr shows a secret. Two are told apart by their digest, which is public: it
  stands in the engine and goes over the wire.
"""

import hashlib
import hmac
import os
import re
from collections.abc import Sequence
from typing import Final

from kvfs.base.errors import Invalid

KEY_SIZE: Final = 32
MOST: Final = 4
"""Secrets that are valid at a time."""
LIMIT: Final = 4096
"""Bytes of their text."""
DIGEST_SIZE: Final = 8
_SCHEME: Final = "kvfs-cluster"
is_cluster_id: Final = re.compile(r"[0-9a-f]{16}").fullmatch
"""Matches the id of a cluster."""
_is_key: Final = re.compile(rf"[0-9a-f]{{{2 * KEY_SIZE}}}").fullmatch


class Secret:
    """One secret of a cluster."""

    __slots__ = ("_key", "cluster", "digest")

    def __init__(self, cluster: str, key: bytes) -> None:
        self.cluster = cluster
        self._key = key
        self.digest = self.derive(b"digest")[:DIGEST_SIZE]
        """Identifies it, and tells nothing about it."""

    def __repr__(self) -> str:
        return f"Secret({self.cluster}, {self.digest.hex()})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and (self.cluster, self._key) == (
            other.cluster,
            other._key,
        )

    def __hash__(self) -> int:
        return hash(self.digest)

    def derive(self, purpose: bytes) -> bytes:
        """Returns another key of KEY_SIZE bytes, for one purpose: a holder of the digest does not
        have the secret."""
        return hmac.digest(self._key, b"kvfs " + purpose, hashlib.sha256)

    def as_text(self) -> str:
        """Returns its line. Anyone who has it can be a node."""
        return f"{_SCHEME}:{self.cluster}:{self._key.hex()}\n"


class Secrets(tuple[Secret, ...]):
    """The secrets of one cluster that are valid now, the newest first; at least one."""

    __slots__ = ()

    @property
    def cluster(self) -> str:
        """The cluster that they belong to."""
        return self[0].cluster

    @property
    def digests(self) -> tuple[bytes, ...]:
        return tuple(secret.digest for secret in self)

    def common(self, digests: Sequence[bytes]) -> Secret | None:
        """Returns the newest of ours that is among these."""
        return next((secret for secret in self if secret.digest in digests), None)

    def with_new(self) -> "Secrets":
        """Returns the secrets with a new one before them; the oldest goes if there are too many."""
        return Secrets((generate(self.cluster), *self)[:MOST])

    def as_text(self) -> str:
        """Returns a line for each."""
        return "".join(secret.as_text() for secret in self)


def generate(cluster: str) -> Secret:
    """Returns a new secret of a cluster."""
    return Secret(cluster, os.urandom(KEY_SIZE))


def parse(text: str, source: str) -> Secrets:
    """Returns the secrets in a text that came from `source`. Raises Invalid, which shows nothing of
    it."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        scheme, _, rest = line.strip().partition(":")
        cluster, _, key = rest.partition(":")
        if scheme != _SCHEME or not is_cluster_id(cluster) or not _is_key(key):
            raise Invalid(
                f"{source}, line {number}: no secret of a cluster; `kvfs node secret` on one of its"
                " nodes prints it"
            )
        found.append(Secret(cluster, bytes.fromhex(key)))
    if not found or len(found) > MOST:
        raise Invalid(f"{source} holds {len(found)} secrets of a cluster: there are 1 to {MOST}")
    if len({secret.cluster for secret in found}) > 1:
        raise Invalid(f"{source} holds secrets of several clusters")
    return Secrets(dict.fromkeys(found))
