"""The last step of a cluster's upgrade: its metadata take the schema of this version, after which
no node of the version before can join.

Nodes of both versions work side by side until then, in the form of the version before, and each can
go back. A person asks for the step (`kvfs node finish-upgrade`), since nothing leads back from it.

| step | `V` (`kvfs.meta.schema`) | a kill after it leaves |
|---|---|---|
| 1 no node of the version before has a record | `1>2` | such a node cannot join; all goes on |
| 2 none has a lease, else back to the start | `1>2` or `1` | likewise |
| 3 again none has a record | `2` | the server with the order of keys that only such a node needs |
| 4 the server has the present layout (`kvfs.meta.redis.scripts.RAISE`) | `2` | nothing to do |

Asked for again it goes on from any of them. A node joins by its lease, then looks at the schema,
then enters its record: so one that saw `1` and has no record in step 1 has a lease in step 2.
"""

from collections.abc import Awaitable, Callable

from kvfs.base.errors import Busy
from kvfs.base.version import KEEPS_TAGS
from kvfs.cluster.node_records import list_nodes
from kvfs.meta import keys, schema
from kvfs.meta.engine import Engine, Transaction


async def finish(
    engine: Engine,
    earlier: Callable[[int], Awaitable[str]],
    raise_layout: Callable[[], Awaitable[bool]],
) -> bool:
    """Takes the steps, from wherever they were left. Returns whether there was anything to do.
    `earlier` is `Membership.earlier`, `raise_layout` step 4 (`ReplicaEngine.raise_layout`).

    Raises Busy while a node that was not removed is of the version before, and names it;
    Unavailable. If cancelled, it goes on from there when it is called again.
    """
    if await engine.transact(_announce):
        return await raise_layout()
    if living := await earlier(KEEPS_TAGS):
        await engine.transact(_take_back)
        raise _busy(living)
    await engine.transact(_finish)
    await raise_layout()
    return True


def _announce(t: Transaction) -> bool:
    """Returns whether the metadata are of the present schema already."""
    if schema.has_tags(t):
        return True
    _refuse_earlier(t)
    t.put(keys.VERSION, schema.RISING)
    return False


def _take_back(t: Transaction) -> None:
    if t.get(keys.VERSION) == schema.RISING:
        t.put(keys.VERSION, schema.BEFORE)


def _finish(t: Transaction) -> None:
    _refuse_earlier(t)
    schema.upgrade(t)


def _refuse_earlier(t: Transaction) -> None:
    found = [
        f"{each.number} ({each.name})"
        for each in list_nodes(t)
        if each.state != "removed" and each.protocol < KEEPS_TAGS
    ]
    if found:
        raise _busy(", ".join(found))


def _busy(nodes: str) -> Busy:
    return Busy(
        f"of an earlier version of KVFS: node {nodes}. Start each with this version, or remove it"
        " (`kvfs node remove`); then ask again"
    )
