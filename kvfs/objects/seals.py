"""Files whose ETag is to be the MD5 that their seal gives them, when it is asked for before.

In a namespace whose ETags are `md5-all` (`tree.etags`) a file that was closed a moment ago has no
ETag yet. A process that is to tell one has the node seal the file at once, and waits:

| the file | the told ETag |
|---|---|
| is sealed in time | its MD5 |
| is in use: it is open or mapped for writing | a computed one, until the last close |
| is not sealed in time: it is long, or the node has much to do | a computed one, kept for good |

A file that is open for writing may have other content at any moment, and is no version that
lasts.
"""

import time
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

from kvfs.meta.engine import Transaction
from kvfs.meta.records import Flag
from kvfs.objects import lookup
from kvfs.objects.object_info import Facts
from kvfs.session.session import Session
from kvfs.tree import etags, sealed_etags
from kvfs.tree.namespace_policies import MD5_ALL
from kvfs.vfs.node_client import NodeClient

T = TypeVar("T")
PATIENCE_S: Final = 20.0
"""Patience with a seal: SDKs wait a minute for an answer."""
_ATTEMPTS: Final = 8


class Seals:
    """The seals of one store; any thread."""

    def __init__(self, session: Session, node: NodeClient) -> None:
        self._session = session
        self._node = node

    def is_awaited(self, bucket: bytes, facts: Facts) -> bool:
        """Returns whether the ETag of a version is not final, and may be waited for."""
        if facts.inode.flags & Flag.SEALED:
            return False
        if facts.etag != etags.computed(facts.ino, facts.inode):  # it was given one
            return False
        return self._session.read(lambda t: _is_awaited(t, bucket, facts))

    def settled(self, look: Callable[[], T], awaited: Callable[[T], Mapping[int, str]]) -> T:
        """Returns the result of `look`, with ETags that stay. `awaited` names the files in a result
        that are not sealed (inode numbers), and their ETags in it. Blocking. Raises what `look`
        raises, Unavailable."""
        until = time.monotonic() + PATIENCE_S
        in_use: set[int] = set()
        found = look()
        for _ in range(_ATTEMPTS):
            waiting = {ino: tag for ino, tag in awaited(found).items() if ino not in in_use}
            if not waiting:
                break
            if self._node.seal(list(waiting), until):
                in_use.update(waiting)
            elif self._keep(waiting):
                break
            found = look()
        return found

    def _keep(self, told: Mapping[int, str]) -> bool:
        """Returns whether all of these are the ETags of their files from now on."""
        kept = self._session.write(lambda t: [sealed_etags.keep(t, *each) for each in told.items()])
        return all(kept)


def _is_awaited(t: Transaction, bucket: bytes, facts: Facts) -> bool:
    if lookup.find_bucket(t, bucket).etag != MD5_ALL:
        return False
    return lookup.is_awaited(t, facts)
