"""Jobs that only one node of a cluster at a time may do: the engine records which node does one.

Invariants
- A claim names a node's incarnation. It is void when that has lost its lease, and another node may
  take it then.
- A claim alone does not stop a node that hung while another took it: a job's writes must be made in
  transactions that `check` the claim, so that the engine refuses late ones.
"""

from kvfs.base.errors import Conflict
from kvfs.cluster.membership import Membership
from kvfs.cluster.node_records import Claim, unpack_claim
from kvfs.meta import keys
from kvfs.meta.engine import Engine, Transaction
from kvfs.meta.records import pack


class Claims:
    """The claims of one node."""

    def __init__(self, member: Membership, engine: Engine) -> None:
        self._member = member
        self._engine = engine

    async def take(self, name: str) -> bool:
        """Takes the job `name`; returns whether this node does it from now on, or does it already;
        else another living node does. Raises what `Engine.transact` raises."""
        if not self._member.holds_lease:
            return False
        found = await self._engine.read(lambda t: _claim(t, name))
        if found is None or not self._stands(found):
            return await self._engine.transact(lambda t: self._try(t, name))
        return found == self._mine

    def check(self, t: Transaction, name: str) -> None:
        """Checks the claim in a transaction of the job. Raises Conflict if another node does it by
        now."""
        if _claim(t, name) != self._mine:
            raise Conflict(f"another node does '{name}' by now")

    async def drop(self, name: str) -> None:
        """Ends the claim: the job is done. Raises what `Engine.transact` raises."""

        def drop(t: Transaction) -> None:
            if _claim(t, name) == self._mine:
                t.delete(keys.claim(name))

        await self._engine.transact(drop)

    @property
    def _mine(self) -> Claim:
        return Claim(node=self._member.node, incarnation=self._member.incarnation)

    def _try(self, t: Transaction, name: str) -> bool:
        found = _claim(t, name)
        if found is not None and self._stands(found):
            return found == self._mine
        t.put(keys.claim(name), pack(self._mine))
        return True

    def _stands(self, claim: Claim) -> bool:
        return claim == self._mine or self._member.roster.lives(claim.node, claim.incarnation)


def _claim(t: Transaction, name: str) -> Claim | None:
    value = t.get(keys.claim(name))
    return None if value is None else unpack_claim(value)
